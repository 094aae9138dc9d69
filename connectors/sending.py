"""What every credited sender shares: slots and spans as credits, the line of waiting sends, streams in
order."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from connectors import wire
from connectors.spans import SpanPool
from connectors.stats import EdgeStats
from connectors.wire import Packed
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost


@dataclass(frozen=True)
class Room:
    """What an edge holds: one slot a chunk, and a pool for the chunks over `inline_bytes`."""

    name: str
    max_chunks: int
    pool_bytes: int
    inline_bytes: int


@dataclass(slots=True)
class Sent:
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


class CreditedSender(ABC):
    """See `connectors.interface.Sender`. All calls on one event loop; sends are served first come, first
    served, so a large chunk is not starved by small ones.

    A transport follows the peer (`_follow`: resets, returned slots), says whether it may be written to, and
    writes a chunk to the slot and span reserved for it.
    """

    def __init__(self, room: Room) -> None:
        self.stats = EdgeStats()
        self._room = room
        self._closed = False
        self._cancelled: set[str] = set()
        self._next_seq: dict[tuple[str, str], int] = {}
        self._broken: set[tuple[str, str]] = set()  # streams that a reset cut
        self._waiting: deque[_Waiting] = deque()
        self._begin(0)

    # --- the transport's ------------------------------------------------------------------------------------

    @abstractmethod
    def _watch(self) -> None:
        """Calls `_follow` and wakes the line, on this loop, whenever the peer or the parent tells
        something."""

    @abstractmethod
    def _follow(self) -> None:
        """Takes notice of resets (`_restart`) and of returned slots (`_take_back`). Call `_look`."""

    def _foretell(self, chunk: Chunk) -> None:
        """May tell a receiver that sleeps that a chunk is coming, before it is packed."""
        return

    @abstractmethod
    def _is_gone(self) -> bool:
        """Whether the receiver of this epoch is gone."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether there is a receiver to write to."""

    @abstractmethod
    def _write(self, slot: int, span: int | None, chunk: Chunk, packed: Packed) -> None:
        """Copies and publishes the chunk."""

    @abstractmethod
    def _cancel_slots(self, slots: Sequence[int]) -> None:
        """Tells the receiver to drop those that it has not handed out."""

    # --- the contract ---------------------------------------------------------------------------------------

    async def send(self, chunk: Chunk) -> None:
        """The tensors are copied before it returns. EngineError for a chunk larger than the whole pool."""
        if not self._closed:
            self._look()
            self._foretell(chunk)
        packed = self._pack(chunk)
        if packed.size > max(self._room.inline_bytes, self._room.pool_bytes):
            raise EngineError(
                f"edge {self._room.name}: a chunk of {packed.size} bytes is larger than the edge's"
                f" {self._room.pool_bytes}; raise its capacity_bytes",
                request_id=chunk.request_id,
            )
        if self._waiting or not self._try_send(chunk, packed):
            await self._send_in_turn(chunk, packed)

    def send_now(self, chunks: Sequence[Chunk]) -> int:
        """None: chunks are packed and written one by one."""
        return 0

    def cancel(self, request_id: str) -> None:
        """Drops what the receiver has not received of the request, as soon as its loop runs."""
        self._cancelled.add(request_id)
        self._forget_streams(request_id)
        if self._closed:
            return
        self._look()
        slots = []
        for slot, sent in self._in_use.items():
            if sent.request_id == request_id and not sent.cancelled:
                sent.cancelled = True
                slots.append(slot)
        if slots:
            self._cancel_slots(slots)
        for waiting in self._waiting:
            if waiting.request_id == request_id:
                waiting.event.set()

    def forget(self, request_id: str) -> None:
        self._cancelled.discard(request_id)
        self._forget_streams(request_id)

    def check(self) -> None:
        """Slots and pool add up."""
        assert len(self._free_slots) + len(self._in_use) == self._room.max_chunks
        self._pool.check()

    # --- epochs and credits ---------------------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._free_slots = list(range(self._room.max_chunks))
        self._in_use: dict[int, Sent] = {}
        self._pool = SpanPool(self._room.pool_bytes)

    def _restart(self, epoch: int) -> None:
        """Streams of the epoch before are cut, and sends that wait in it fail."""
        self._broken |= self._next_seq.keys()
        self._next_seq.clear()
        self._begin(epoch)
        self._wake_all()

    def _pack(self, chunk: Chunk) -> Packed:
        return wire.pack(chunk)

    def _reserve(self, packed: Packed) -> tuple[int, int | None] | None:
        """A slot, and a span of the pool for what does not fit into it; None when there is no credit."""
        if not self._is_ready() or not self._free_slots:
            return None
        span = None
        if packed.size > self._room.inline_bytes:
            span = self._pool.take(packed.size)
            if span is None:
                return None
        return self._free_slots.pop(), span

    def _take_back(self, slot: int) -> None:
        sent = self._in_use.pop(slot)
        self._free_slots.append(slot)
        if sent.span is not None:
            self._pool.give_back(sent.span)

    # --- sending --------------------------------------------------------------------------------------------

    def _try_send(self, chunk: Chunk, packed: Packed) -> bool:
        """True when the chunk was sent or dropped, False when there is no credit."""
        if self._closed or self._is_gone():
            raise PeerLost(f"edge {self._room.name} is closed", request_id=chunk.request_id)
        if chunk.request_id in self._cancelled:
            return True
        self._check_seq(chunk)
        reserved = self._reserve(packed)
        if reserved is None:
            return False
        self._advance_seq(chunk)
        slot, span = reserved
        self._in_use[slot] = Sent(chunk.request_id, span)
        start_ns = time.monotonic_ns()
        self._write(slot, span, chunk, packed)
        self.stats.chunks_total += 1
        self.stats.bytes_total += packed.nbytes
        self.stats.transfer.add((time.monotonic_ns() - start_ns) / 1e9)
        return True

    async def _send_in_turn(self, chunk: Chunk, packed: Packed) -> None:
        waiting = _Waiting(chunk.request_id, self._epoch)
        self._waiting.append(waiting)
        self.stats.waits_total += 1
        start = time.monotonic()
        try:
            while not self._is_served(waiting, chunk, packed):
                await waiting.event.wait()
        finally:
            self._waiting.remove(waiting)
            if self._waiting:
                self._waiting[0].event.set()
            self.stats.wait.add(time.monotonic() - start)

    def _is_served(self, waiting: _Waiting, chunk: Chunk, packed: Packed) -> bool:
        if not self._closed:
            self._watch()  # before the look at the peer: what comes after it is heard
            self._look()
        waiting.event.clear()  # what came until now shows below
        if waiting.epoch != self._epoch:
            raise PeerLost(
                f"edge {self._room.name} was reset while a chunk waited", request_id=chunk.request_id
            )
        first = self._waiting[0] is waiting
        if not first and chunk.request_id not in self._cancelled and not self._closed:
            return False
        return self._try_send(chunk, packed)

    def _look(self) -> None:
        """Whoever looks, for a send or for a cancellation, takes in what the line waits for: it must be
        told."""
        self._follow()
        if self._waiting:
            self._wake_line()

    def _wake_line(self) -> None:
        """What was heard may let the first go, or none ever again."""
        if not self._waiting:
            return
        if self._is_gone():
            self._wake_all()
        else:
            self._waiting[0].event.set()

    def _wake_all(self) -> None:
        for waiting in self._waiting:
            waiting.event.set()

    # --- streams --------------------------------------------------------------------------------------------

    def _check_seq(self, chunk: Chunk) -> None:
        key, name = (chunk.request_id, chunk.stream), self._room.name
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
