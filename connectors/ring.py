"""The memory of a shared-memory edge: who writes which word of it, how a write is published, the bells.

    words      one to a cache line, each with one writer
    messages   sender → receiver: a slot that holds a chunk, or the cancellation of one
    returns    receiver → sender: a slot that is free again
    slots      one per chunk credit: a preamble, and the chunk itself when it is small
    pool       the larger chunks

Nothing is locked, so a process may be killed at any instruction. An entry or chunk is written first and the
word that counts it last, so what a dead process left half-written was never visible. The words are aligned
and 8 bytes long: one store instruction on x86-64 and aarch64. x86-64 keeps stores, and loads, in order; where
the hardware does not, a fence does. The receiver's bell is rung after every publication and words are read
again after it is heard, so no wake-up is lost. Two rings are left out: that of a returned slot while no send
waits, and that of a message that the receiver is looking out for. There both ends write their word, fence,
and
read the other's, so at least one of them sees the other.

A sleeping receiver is rung for before a small chunk is packed and copied, and looks out for it for some
microseconds, so that its waking and the sender's work take place at the same time. It is shown the chunk's
header before the tensors are copied, so that it has read that when they are there. A message's
number is used once: what was shown of a chunk stays as it was until the receiver has returned its slot, and
a copy
that fails is published and cancelled at once.

Counting words carry the edge's epoch. A reset by the parent starts the next epoch: words of an earlier one
count for nothing, and the sender writes nothing before the receiver has shown (by a RETURNED word of the new
epoch) that it holds no view of the old.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import platform
import threading
from collections.abc import Callable
from typing import Literal

import msgspec

from connectors.wire import ALIGNMENT, Memory, align
from contracts.errors import EngineError

End = Literal["sender", "receiver"]

INLINE_BYTES = 5 * 1024 - ALIGNMENT  # a payload of 4 KiB and its header
SLOT_BYTES = ALIGNMENT + INLINE_BYTES
WORD = 8
CANCELLATION = 1 << 32  # flag of a message entry
MESSAGES_PER_CHUNK = 3  # unread: the last chunk's cancellation, this chunk, its cancellation
FIRST_EPOCH = 1
_COUNT_BITS = 44  # 2**44 messages an epoch, 2**20 epochs
_COUNT_MASK = (1 << _COUNT_BITS) - 1


_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


class Word:
    """Index among 64-bit words, a cache line apart."""

    EPOCH = 0  # parent
    SENDER_DEAD = 8  # parent: the epoch in which it was told so; likewise below
    RECEIVER_DEAD = 16  # parent
    SENDER_ATTACHED = 24  # sender
    SENDER_CLOSED = 32  # sender
    SENT = 40  # sender: count of message entries
    RECEIVER_ATTACHED = 48  # receiver
    RECEIVER_CLOSED = 56  # receiver
    RETURNED = 64  # receiver (the parent, when there is none): count of return entries
    SENDER_WAITS = 72  # sender: the epoch in which it waits for returned slots, or 0
    COMING = 80  # sender: count of message entries when the one that it is writing is there
    RECEIVER_LOOKS = 88  # receiver: the epoch in which it looks out for what is coming, or 0
    SHOWN = 96  # sender: count of message entries with the one whose header, but for its tensors, is there
    END = 104


WORDS_BYTES = Word.END * WORD
_ATTACHED = {"sender": Word.SENDER_ATTACHED, "receiver": Word.RECEIVER_ATTACHED}
_CLOSED = {"sender": Word.SENDER_CLOSED, "receiver": Word.RECEIVER_CLOSED}
_DEAD = {"sender": Word.SENDER_DEAD, "receiver": Word.RECEIVER_DEAD}


class ShmDescription(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an end needs to open an edge: its inherited descriptors and its sizes."""

    name: str
    memory_fd: int
    to_sender_fd: int
    to_receiver_fd: int
    pool_bytes: int
    max_chunks: int

    @property
    def messages_offset(self) -> int:
        return WORDS_BYTES

    @property
    def returns_offset(self) -> int:
        return self.messages_offset + align(MESSAGES_PER_CHUNK * self.max_chunks * WORD)

    @property
    def slots_offset(self) -> int:
        return self.returns_offset + align(self.max_chunks * WORD)

    @property
    def pool_offset(self) -> int:
        return self.slots_offset + self.max_chunks * SLOT_BYTES

    @property
    def total_bytes(self) -> int:
        return self.pool_offset + self.pool_bytes


class Ring:
    """An edge's memory in this process."""

    def __init__(self, description: ShmDescription) -> None:
        self.description = description
        self.memory = Memory(memoryview(mmap.mmap(description.memory_fd, description.total_bytes)))
        self._words = self.memory.pages.cast("Q")
        self._load: Callable[[int], int] = self._words.__getitem__ if _KEEPS_ORDER else self._load_fenced
        self._fence_lock = threading.Lock()
        self._fence_lock.acquire()
        self._messages = description.messages_offset // WORD
        self._num_messages = MESSAGES_PER_CHUNK * description.max_chunks
        self._returns = description.returns_offset // WORD
        self._num_returns = description.max_chunks
        self._slots = description.slots_offset
        self._pool = description.pool_offset

    # --- words ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._load(Word.EPOCH)

    def start_epoch(self, epoch: int) -> None:
        """The parent's."""
        self._store(Word.EPOCH, epoch)

    def attach(self, end: End) -> int:
        """Takes the end for this process; the epoch it takes part in."""
        epoch = self.epoch
        if self._load(_ATTACHED[end]) == epoch:
            raise EngineError(f"edge {self.description.name} has its {end} already: reset it first")
        self.follow(end, epoch)
        return epoch

    def follow(self, end: End, epoch: int) -> None:
        self._store(_ATTACHED[end], epoch)

    def was_attached(self, end: End) -> bool:
        return self._load(_ATTACHED[end]) > 0

    def close(self, end: End, epoch: int) -> None:
        self._store(_CLOSED[end], epoch)

    def mark_dead(self, end: End) -> None:
        self._store(_DEAD[end], self.epoch)

    def is_gone(self, end: End, epoch: int) -> bool:
        return self._load(_CLOSED[end]) == epoch or self._load(_DEAD[end]) == epoch

    def say(self, word: int, epoch: int) -> None:
        """That this end waits, or looks out; 0: no more. To be followed by a look at what it waits for."""
        self._store(word, epoch)
        self._fence()

    def is_said(self, word: int, epoch: int) -> bool:
        """To be asked after publishing what the other end may wait for."""
        self._fence()
        return self._load(word) == epoch

    def count(self, word: int, epoch: int) -> int | None:
        """None when the word's writer has not come to `epoch`."""
        value = self._load(word)
        return value & _COUNT_MASK if value >> _COUNT_BITS == epoch else None

    def publish(self, word: int, epoch: int, count: int) -> None:
        assert count <= _COUNT_MASK
        self._store(word, epoch << _COUNT_BITS | count)

    # --- entries and preambles: plain reads and writes, ordered by the words that count them ----------------

    def message(self, index: int) -> int:
        return self._words[self._messages + index % self._num_messages]

    def put_message(self, index: int, entry: int) -> None:
        self._words[self._messages + index % self._num_messages] = entry

    def returned_slot(self, index: int) -> int:
        return self._words[self._returns + index % self._num_returns]

    def put_return(self, index: int, slot: int) -> None:
        self._words[self._returns + index % self._num_returns] = slot

    def body_offset(self, slot: int, span: int | None) -> int:
        """Where a chunk lies: in the pool at `span`, or behind its slot's preamble."""
        if span is not None:
            return self._pool + span
        return self._slots + slot * SLOT_BYTES + ALIGNMENT

    def put_preamble(self, slot: int, body_offset: int, header_nbytes: int) -> None:
        place = (self._slots + slot * SLOT_BYTES) // WORD
        self._words[place], self._words[place + 1] = body_offset, header_nbytes

    def put_time(self, slot: int, sent_ns: int) -> None:
        """When the chunk was complete, monotonic."""
        self._words[(self._slots + slot * SLOT_BYTES) // WORD + 2] = sent_ns

    def put_device_offset(self, slot: int, offset: int) -> None:
        """Where the chunk's device tensors lie in the edge's device memory."""
        self._words[(self._slots + slot * SLOT_BYTES) // WORD + 3] = offset

    def device_offset(self, slot: int) -> int:
        return self._words[(self._slots + slot * SLOT_BYTES) // WORD + 3]

    def preamble(self, slot: int) -> tuple[int, int]:
        """(body offset, header bytes)"""
        place = (self._slots + slot * SLOT_BYTES) // WORD
        return self._words[place], self._words[place + 1]

    def time(self, slot: int) -> int:
        return self._words[(self._slots + slot * SLOT_BYTES) // WORD + 2]

    def _load_fenced(self, word: int) -> int:
        value = self._words[word]
        self._fence()
        return value

    def _store(self, word: int, value: int) -> None:
        if not _KEEPS_ORDER:
            self._fence()
        self._words[word] = value

    def _fence(self) -> None:
        """A full memory barrier: a release and then an acquire of a lock of our own, which nothing passes."""
        self._fence_lock.release()
        self._fence_lock.acquire()


class Bell:
    """The eventfds of an edge as one end sees them: it rings the peer and hears its own. Duplicates, so that
    every end closes what it owns."""

    def __init__(self, own_fd: int, peer_fd: int) -> None:
        self._own_fd, self._peer_fd = os.dup(own_fd), os.dup(peer_fd)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._round_rung = False  # rung in this round of the loop
        self._round_owes = False  # and had reason to ring since

    def ring(self) -> None:
        os.eventfd_write(self._peer_fd, 1)

    def ring_soon(self) -> None:
        """Rings at most twice a round of the loop, however often it is called: now, and at its end."""
        if self._round_rung:
            self._round_owes = True
            return
        self.ring()
        if self._loop is not None:
            self._round_rung = True
            self._loop.call_soon(self._end_round)

    def _end_round(self) -> None:
        self._round_rung = False
        if self._round_owes and not self._closed:
            self._round_owes = False
            self.ring()

    def watch(self, heard: Callable[[], None]) -> None:
        """Calls `heard` on the running loop whenever the peer rings. Idempotent; one loop at a time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._own_fd, heard)

    def answer(self) -> None:
        try:
            os.eventfd_read(self._own_fd)
        except BlockingIOError:  # it was answered between the loop's look and ours
            return

    def unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._own_fd)
        self._loop = None

    def close(self) -> None:
        self._closed = True
        self.unwatch()
        os.close(self._own_fd)
        os.close(self._peer_fd)


def sealed_memfd(name: str, size: int) -> int:
    """Memory with no name in any file system, gone with its last holder."""
    fd = os.memfd_create(f"omnistage-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    # An end gone wrong must not shrink the file: reading past its end would kill the other (SIGBUS).
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd
