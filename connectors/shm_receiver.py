"""The receiving end of a shared-memory edge: hands out views, returns slots."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from torch import Tensor

from connectors import wire
from connectors.naps import Naps
from connectors.ring import CANCELLATION, Bell, Ring, ShmDescription, Word
from connectors.stats import EdgeStats
from connectors.wire import Layout
from contracts.chunks import Chunk
from contracts.errors import PeerLost

LOOK_OUT_NS = 20_000


class _Read(NamedTuple):
    """A chunk that came as message `number`, and the bytes of its tensors."""

    number: int
    chunk: Chunk
    nbytes: int


class _Views(NamedTuple):
    """Of the tensors of a chunk in a slot. Kept: the next chunk there is likely to be of the same shapes, and
    making a tensor is a large part of what receiving a small chunk takes."""

    layout: Layout
    offset: int
    tensors: dict[str, Tensor]


class ShmReceiver:
    """See `connectors.interface.Receiver`. All calls on one event loop."""

    hands_over = False

    def __init__(self, description: ShmDescription) -> None:
        self.stats = EdgeStats()
        self._ring = Ring(description)
        self._bell = Bell(description.to_receiver_fd, description.to_sender_fd)
        self._closed = False
        self._naps = Naps()
        self._views: dict[int, _Views] = {}  # slot → those of the last chunk there
        self._stale: dict[int, Chunk] = {}  # id(chunk) → chunk: held since before a reset
        self._held: dict[int, tuple[int, Chunk]] = {}  # id(chunk) → its slot; received, not released
        self._begin(self._ring.attach("receiver"))

    async def receive(self) -> Chunk:
        """What was sent before the sender closed or died is still delivered."""
        waited = False
        while True:
            if self._queue:
                return self._deliver()
            if self._closed:
                raise PeerLost(f"edge {self._ring.description.name} is closed")
            self._bell.watch(self._heard)  # before the look at the words: what comes after it is heard
            self._follow()
            gone = self._ring.is_gone("sender", self._epoch)  # before the last look for chunks
            self._collect()
            if self._queue:
                continue
            if gone:
                raise PeerLost(f"edge {self._ring.description.name} has lost its sender")
            self.stats.waits_total += not waited
            waited = True
            await self._naps.nap()

    def receive_now(self) -> list[Chunk]:
        return []

    async def renewed(self) -> None:
        lost = self._epoch
        while self._epoch == lost:
            self._bell.watch(self._heard)
            self._follow()
            if self._epoch == lost:
                await self._naps.nap()

    def release(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            self._release(chunk)

    def _release(self, chunk: Chunk) -> None:
        if not self._closed:
            self._follow()
        if self._stale.pop(id(chunk), None) is not None:
            self._show_ready()
            return
        slot, held = self._held.pop(id(chunk), (0, None))
        assert held is chunk, f"edge {self._ring.description.name}: released a chunk that is not held"
        if not self._closed:
            self._give_back(slot)

    def cancel(self, request_id: str) -> None:
        if self._closed:
            return
        self._follow()
        self._collect()
        for slot in [slot for slot, read in self._queue.items() if read.chunk.request_id == request_id]:
            self._drop(slot)
        for key in [key for key in self._next_seq if key[0] == request_id]:
            del self._next_seq[key]

    def pin(self) -> None:
        """Registers the edge's memory with CUDA: copies of received tensors to a GPU can be asynchronous.
        Hold the chunk until they are done."""
        self._ring.memory.pin()

    def close(self) -> None:
        """Every view handed out ends here. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self._ring.close("receiver", self._epoch)
        self._bell.ring()
        self._bell.close()
        self._naps.end_soon()
        self._ring.memory.unpin()

    # --- epochs ---------------------------------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._queue: OrderedDict[int, _Read] = OrderedDict()  # by slot
        self._next_seq: dict[tuple[str, str], int] = {}
        self._num_messages = 0
        self._foreseen: _Read | None = None  # what was read of a chunk before its tensors came
        self._num_returned = 0
        self._shown_ready = False
        self._show_ready()

    def _show_ready(self) -> None:
        """Lets the sender of this epoch begin, once no view of an earlier one is left."""
        if not self._closed and not self._shown_ready and not self._stale:
            self._shown_ready = True
            self._ring.publish(Word.RETURNED, self._epoch, 0)
            self._bell.ring()

    def _follow(self) -> None:
        """Takes notice of a reset."""
        epoch = self._ring.epoch
        if epoch != self._epoch:
            self._stale |= {key: chunk for key, (_, chunk) in self._held.items()}
            self._held.clear()
            self._ring.follow("receiver", epoch)
            self._begin(epoch)

    # --- chunks ---------------------------------------------------------------------------------------------

    def _heard(self) -> None:
        self._bell.answer()
        self._follow()
        self._collect()  # cancellations are obeyed even while nobody receives
        if not self._queue:
            self._look_out()
        self._naps.end()

    def _collect(self) -> None:
        """Takes the sender's new messages, in order."""
        count = self._ring.count(Word.SENT, self._epoch) or 0
        while self._num_messages < count:
            number = self._num_messages
            entry = self._ring.message(number)
            self._num_messages += 1
            slot = entry & ~CANCELLATION
            if not entry & CANCELLATION:
                read, self._foreseen = self._foreseen, None
                if read is None or read.number != number:
                    read = self._read(number, slot)
                self._queue[slot] = read
            elif slot in self._queue:
                self._drop(slot)

    def _read(self, number: int, slot: int) -> _Read:
        """What the header says; the tensors are views of what may not be there yet."""
        body_offset, header_nbytes = self._ring.preamble(slot)
        header, layout = wire.read_header(self._ring.memory, body_offset, header_nbytes)
        offset = body_offset + wire.align(header_nbytes)
        views = self._views.get(slot)
        if views is None or views.layout is not layout or views.offset != offset:
            views = _Views(layout, offset, wire.views(self._ring.memory, offset, layout))
            self._views[slot] = views
        return _Read(number, wire.as_chunk(header, views.tensors.copy()), layout.nbytes)

    def _look_out(self) -> None:
        """The sender may have rung ahead of a chunk: it is cheaper to wait for it than to fall asleep
        again."""
        ring, epoch = self._ring, self._epoch
        coming = ring.count(Word.COMING, epoch) or 0
        if coming <= self._num_messages:
            return
        ring.say(Word.RECEIVER_LOOKS, epoch)
        end_ns = time.monotonic_ns() + LOOK_OUT_NS
        while (ring.count(Word.SHOWN, epoch) or 0) < coming and time.monotonic_ns() < end_ns:
            pass
        if ring.count(Word.SHOWN, epoch) == coming:
            self._foreseen = self._read(coming - 1, ring.message(coming - 1))
        while (ring.count(Word.SENT, epoch) or 0) < coming and time.monotonic_ns() < end_ns:
            pass
        ring.say(Word.RECEIVER_LOOKS, 0)
        self._collect()

    def _deliver(self) -> Chunk:
        slot, (_, chunk, nbytes) = self._queue.popitem(last=False)
        self._check_seq(chunk)
        chunk, nbytes = self._complete(slot, chunk, nbytes)
        self._held[id(chunk)] = slot, chunk
        self.stats.chunks_total += 1
        self.stats.bytes_total += nbytes
        self.stats.wait.add((time.monotonic_ns() - self._ring.time(slot)) / 1e9)
        return chunk

    def _complete(self, slot: int, chunk: Chunk, nbytes: int) -> tuple[Chunk, int]:
        """What is handed out, and the bytes of its tensors."""
        return chunk, nbytes

    def _check_seq(self, chunk: Chunk) -> None:
        """A stream starts at 0, starts again at 0 after its cancellation, and has no gap in between. What the
        sender goes on with after a cancellation on this side is passed on as it comes."""
        key = (chunk.request_id, chunk.stream)
        expected = self._next_seq.get(key, chunk.seq)
        assert chunk.seq in (expected, 0), (
            f"edge {self._ring.description.name}: {key} brings {chunk.seq}, expected {expected}"
        )
        if chunk.last:
            self._next_seq.pop(key, None)
        else:
            self._next_seq[key] = chunk.seq + 1

    def _drop(self, slot: int) -> None:
        chunk = self._queue.pop(slot).chunk
        self._next_seq.pop((chunk.request_id, chunk.stream), None)
        self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self._ring.put_return(self._num_returned, slot)
        self._num_returned += 1
        self._ring.publish(Word.RETURNED, self._epoch, self._num_returned)
        if self._ring.is_said(Word.SENDER_WAITS, self._epoch):
            self._bell.ring_soon()
