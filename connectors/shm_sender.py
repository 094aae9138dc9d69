"""The sending end of a shared-memory edge: allocates, copies in, publishes, collects what was returned."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from connectors import wire
from connectors.ring import CANCELLATION, INLINE_BYTES, Bell, Ring, ShmDescription, Word
from connectors.spans import SpanPool
from connectors.stats import EdgeStats
from connectors.wire import Packed
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost


@dataclass
class _Sent:
    """A chunk whose slot has not been returned."""

    request_id: str
    span: int | None  # in the pool
    cancelled: bool = False


@dataclass(eq=False)
class _Waiting:
    """A send in the line for credits."""

    request_id: str
    epoch: int
    event: asyncio.Event = field(default_factory=asyncio.Event)


class ShmSender:
    """See `connectors.interface.Sender`. All calls on one event loop; sends are served first come, first
    served, so a large chunk is not starved by small ones."""

    def __init__(self, description: ShmDescription) -> None:
        self.stats = EdgeStats()
        self._ring = Ring(description)
        self._bell = Bell(description.to_sender_fd, description.to_receiver_fd)
        self._closed = False
        self._cancelled: set[str] = set()
        self._next_seq: dict[tuple[str, str], int] = {}
        self._broken: set[tuple[str, str]] = set()  # streams that a reset cut
        self._waiting: deque[_Waiting] = deque()
        self._begin(self._ring.attach("sender"))

    async def send(self, chunk: Chunk) -> None:
        """The tensors are copied before it returns. EngineError for a chunk larger than the whole pool."""
        packed = wire.pack(chunk)
        description = self._ring.description
        if packed.size > max(INLINE_BYTES, description.pool_bytes):
            raise EngineError(
                f"edge {description.name}: a chunk of {packed.size} bytes is larger than the edge's"
                f" {description.pool_bytes}; raise its capacity_bytes",
                request_id=chunk.request_id,
            )
        self._follow()
        if self._waiting or not self._try_send(chunk, packed):
            await self._send_in_turn(chunk, packed)

    def cancel(self, request_id: str) -> None:
        """Drops what the receiver has not received of the request, as soon as its loop runs."""
        self._cancelled.add(request_id)
        self._forget_streams(request_id)
        if self._closed:
            return
        self._follow()
        before = self._num_messages
        for slot, sent in self._in_use.items():
            if sent.request_id == request_id and not sent.cancelled:
                sent.cancelled = True
                self._put_message(slot | CANCELLATION)
        if self._num_messages > before:
            self._publish()
        for waiting in self._waiting:
            if waiting.request_id == request_id:
                waiting.event.set()

    def forget(self, request_id: str) -> None:
        self._cancelled.discard(request_id)
        self._forget_streams(request_id)

    def close(self) -> None:
        """What was sent stays there for the receiver. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ring.close("sender", self._epoch)
        self._bell.ring()
        self._bell.close()
        self._wake_all()
        self._ring.memory.unpin()

    def check(self) -> None:
        """Slots and pool add up."""
        assert len(self._free_slots) + len(self._in_use) == self._ring.description.max_chunks
        self._pool.check()

    # --- epochs and credits ---------------------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._free_slots = list(range(self._ring.description.max_chunks))
        self._in_use: dict[int, _Sent] = {}
        self._pool = SpanPool(self._ring.description.pool_bytes)
        self._num_messages = 0
        self._num_returned = 0
        self._receiver_ready = False  # has come to this epoch

    def _follow(self) -> None:
        """Takes notice of a reset and of returned slots."""
        epoch = self._ring.epoch
        if epoch != self._epoch:
            self._broken |= self._next_seq.keys()
            self._next_seq.clear()
            self._begin(epoch)
            self._ring.follow("sender", epoch)
            self._wake_all()
        returned = self._ring.count(Word.RETURNED, epoch)
        self._receiver_ready = returned is not None
        while returned is not None and self._num_returned < returned:
            slot = self._ring.returned_slot(self._num_returned)
            self._num_returned += 1
            sent = self._in_use.pop(slot)
            self._free_slots.append(slot)
            if sent.span is not None:
                self._pool.give_back(sent.span)

    def _reserve(self, size: int) -> tuple[int, int | None] | None:
        """A slot, and a span of the pool for what does not fit into it; None when there is no credit."""
        if not self._receiver_ready or not self._free_slots:
            return None
        span = None
        if size > INLINE_BYTES:
            span = self._pool.take(size)
            if span is None:
                return None
        return self._free_slots.pop(), span

    # --- sending --------------------------------------------------------------------------------------------

    def _try_send(self, chunk: Chunk, packed: Packed) -> bool:
        """True when the chunk was sent or dropped, False when there is no credit."""
        if self._closed or self._ring.is_gone("receiver", self._epoch):
            raise PeerLost(f"edge {self._ring.description.name} is closed", request_id=chunk.request_id)
        if chunk.request_id in self._cancelled:
            return True
        self._check_seq(chunk)
        reserved = self._reserve(packed.size)
        if reserved is None:
            return False
        self._advance_seq(chunk)
        self._write(*reserved, chunk, packed)
        return True

    def _write(self, slot: int, span: int | None, chunk: Chunk, packed: Packed) -> None:
        start_ns = time.monotonic_ns()
        body_offset = self._ring.body_offset(slot, span)
        self._in_use[slot] = _Sent(chunk.request_id, span)
        wire.write(self._ring.memory, body_offset, packed)
        sent_ns = time.monotonic_ns()
        self._ring.put_preamble(slot, body_offset, len(packed.header), sent_ns)
        self._put_message(slot)
        self._publish()
        self.stats.chunks_total += 1
        self.stats.bytes_total += packed.nbytes
        self.stats.transfer_seconds_total += (sent_ns - start_ns) / 1e9

    def _put_message(self, entry: int) -> None:
        self._ring.put_message(self._num_messages, entry)
        self._num_messages += 1

    def _publish(self) -> None:
        self._ring.publish(Word.SENT, self._epoch, self._num_messages)
        self._bell.ring()

    async def _send_in_turn(self, chunk: Chunk, packed: Packed) -> None:
        waiting = _Waiting(chunk.request_id, self._epoch)
        self._waiting.append(waiting)
        self.stats.waits_total += 1
        start = time.monotonic()
        try:
            while not self._is_served(waiting, chunk, packed):
                await waiting.event.wait()
                waiting.event.clear()
        finally:
            self._waiting.remove(waiting)
            if self._waiting:
                self._waiting[0].event.set()
            self.stats.wait_seconds_total += time.monotonic() - start

    def _is_served(self, waiting: _Waiting, chunk: Chunk, packed: Packed) -> bool:
        if not self._closed:
            self._bell.watch(self._heard)  # before the look at the words: what comes after it is heard
            self._follow()
        if waiting.epoch != self._epoch:
            raise PeerLost(
                f"edge {self._ring.description.name} was reset while a chunk waited",
                request_id=chunk.request_id,
            )
        first = self._waiting[0] is waiting
        if not first and chunk.request_id not in self._cancelled and not self._closed:
            return False
        return self._try_send(chunk, packed)

    def _heard(self) -> None:
        self._bell.answer()
        self._follow()
        if not self._waiting:
            self._bell.unwatch()
        elif self._ring.is_gone("receiver", self._epoch):
            self._wake_all()
        else:
            self._waiting[0].event.set()

    def _wake_all(self) -> None:
        for waiting in self._waiting:
            waiting.event.set()

    # --- streams --------------------------------------------------------------------------------------------

    def _check_seq(self, chunk: Chunk) -> None:
        key = (chunk.request_id, chunk.stream)
        name = self._ring.description.name
        if key in self._broken and chunk.seq > 0:
            if chunk.last:
                self._broken.discard(key)
            raise PeerLost(f"edge {name} was reset in the middle of a stream", request_id=chunk.request_id)
        expected = self._next_seq.get(key, 0)
        assert chunk.seq == expected, f"edge {name}: {key} sends {chunk.seq}, expected {expected}"

    def _advance_seq(self, chunk: Chunk) -> None:
        key = (chunk.request_id, chunk.stream)
        self._broken.discard(key)
        if chunk.last:
            self._next_seq.pop(key, None)
        else:
            self._next_seq[key] = chunk.seq + 1

    def _forget_streams(self, request_id: str) -> None:
        for key in [key for key in self._next_seq if key[0] == request_id]:
            del self._next_seq[key]
        self._broken = {key for key in self._broken if key[0] != request_id}
