"""The receiving end of a NIXL edge: reads announced chunks into memory of its own, hands out views of it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from connectors import wire
from connectors.link import Link
from connectors.nixl_agent import NixlDriver, process_driver
from connectors.nixl_messages import (
    GRACE_S,
    GREETING_BYTES,
    Announce,
    Begin,
    CancelSlots,
    FromParent,
    Landed,
    NixlDescription,
    Open,
    PeerDead,
    Returned,
    ToReceiver,
    attach,
    from_parent,
    reach_parent,
    same_token,
    tell,
    to_receiver,
)
from connectors.stats import EdgeStats
from connectors.wire import Memory
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost

MAX_STRANGERS = 16


class _Pool:
    """Memory that chunks are read into, laid out as the sender's. Retired while a view or a read of it is
    left, it is deregistered with the last of them."""

    def __init__(self, driver: NixlDriver, nbytes: int) -> None:
        self._driver = driver
        self.memory = Memory(memoryview(mmap.mmap(-1, nbytes)))
        self._registration = driver.register(self.memory)
        self.num_users = 0
        self._retired = False

    def drop_user(self) -> None:
        self.num_users -= 1
        self._end_if_unused()

    def retire(self) -> None:
        self._retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._retired and not self.num_users:
            self._driver.deregister(self._registration)
            self.memory.unpin()


@dataclass
class _Arrival:
    """An announced chunk, not handed out. `chunk` is None until it is read."""

    announced: Announce
    chunk: Chunk | None = None
    cancelled: bool = False


@dataclass(frozen=True)
class _Held:
    chunk: Chunk
    slot: int
    pool: _Pool | None  # whose memory it shows
    epoch: int


class NixlReceiver:
    """See `connectors.interface.Receiver`. All calls on one event loop."""

    hands_over = False

    def __init__(self, description: NixlDescription) -> None:
        self.stats = EdgeStats()
        self._description = description
        self._driver = process_driver()
        self._parent = reach_parent(description)
        self._listener = socket.create_server((self._parent.local_host, 0))
        self._listener.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._closed = False
        self._strangers: list[Link] = []
        self._held: dict[int, _Held] = {}  # by id(chunk)
        self._landed: deque[tuple[_Pool, _Arrival, bool]] = deque()  # filled by the agent's thread
        self._dead_epoch = 0
        try:
            epoch, more = attach(description, self._parent, "receiver", self._listener.getsockname()[1])
        except EngineError:
            self._listener.close()
            raise
        self._pool = _Pool(self._driver, description.pool_bytes)
        self._link: Link | None = None
        self._begin(epoch)
        self._obey(more)

    async def receive(self) -> Chunk:
        """What has arrived before the sender was gone is still delivered. EngineError when the link broke
        and the parent does not know of a death."""
        waited = False
        while True:
            if self._closed:
                raise PeerLost(f"edge {self._description.name} is closed")
            self._news.clear()
            self._follow()
            if (arrival := self._first_ready()) is not None:
                return self._deliver(arrival)
            self._check_peer()
            self.stats.waits_total += not waited
            waited = True
            await self._news.wait()

    def receive_now(self) -> list[Chunk]:
        return []

    async def renewed(self) -> None:
        lost = self._epoch
        while self._epoch == lost:
            if self._closed:
                raise PeerLost(f"edge {self._description.name} is closed")
            self._news.clear()
            self._follow()
            if self._epoch == lost:
                await self._news.wait()

    def release(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            self._release(chunk)

    def _release(self, chunk: Chunk) -> None:
        held = self._held.pop(id(chunk), None)
        assert held is not None, f"edge {self._description.name}: released a chunk that is not held"
        assert held.chunk is chunk
        if held.pool is not None:
            held.pool.drop_user()
        if not self._closed and held.epoch == self._epoch:
            self._give_back(held.slot)

    def cancel(self, request_id: str) -> None:
        if self._closed:
            return
        self._follow()
        self._news.set()  # a `receive` may wait for what this look took in
        for slot, arrival in list(self._queue.items()):
            if arrival.announced.request_id == request_id:
                self._drop(slot)
        for key in [key for key in self._next_seq if key[0] == request_id]:
            del self._next_seq[key]

    def close(self) -> None:
        """Every view handed out ends here. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._hang_up()
        for link in (*self._strangers, self._parent):
            link.close()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._listener)
        self._listener.close()
        self._drop_all()
        self._pool.retire()
        self._news.set()

    # --- what is heard --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._listener, self._heard)
        self._parent.watch(self._heard)
        for link in (*self._strangers, *([] if self._link is None else [self._link])):
            link.watch(self._heard)

    def _heard(self) -> None:
        if self._closed:
            while self._landed:
                self._landed.popleft()[0].drop_user()
        else:
            self._follow()
            self._news.set()

    def _follow(self) -> None:
        """Watches at its end: that hears of whatever is not taken in here, over a link that is new, too."""
        self._obey(from_parent(self._parent))
        self._meet_strangers()
        if self._link is not None:
            self._attend(self._link)
        while self._landed:
            self._land(*self._landed.popleft())
        self._watch()

    def _obey(self, messages: Sequence[FromParent]) -> None:
        for message in messages:
            match message:
                case Begin(epoch):
                    self._follow_epoch(epoch)
                case PeerDead(epoch):
                    self._dead_epoch = epoch

    def _follow_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._hang_up()
            self._drop_all()
            self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        """What an earlier epoch has left in the pool stays there; then there is a new one."""
        self._epoch = epoch
        self._queue: OrderedDict[int, _Arrival] = OrderedDict()
        self._next_seq: dict[tuple[str, str], int] = {}
        self._broken_s: float | None = None  # when the link broke
        if self._pool.num_users:
            self._pool.retire()
            self._pool = _Pool(self._driver, self._description.pool_bytes)

    def _meet_strangers(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                stream, _ = self._listener.accept()
                self._strangers.append(Link(stream, GREETING_BYTES))
        for link in self._strangers[:-MAX_STRANGERS]:
            self._strangers.remove(link)
            link.close()
        for link in list(self._strangers):
            self._listen_to(link)

    def _listen_to(self, link: Link) -> None:
        """The first to prove itself as this epoch's sender is it."""
        try:
            messages = to_receiver(link)
        except msgspec.DecodeError:
            messages = []
            link.close()
        if messages:
            self._strangers.remove(link)
            if not self._is_sender(messages[0]):
                link.close()
                return
            self._link = link
            self._take(messages[1:])
        elif link.is_ended:
            self._strangers.remove(link)
            link.close()

    def _is_sender(self, first: ToReceiver) -> bool:
        if not isinstance(first, Open) or not same_token(self._description.token, first.token):
            return False
        self._follow_epoch(first.epoch)  # the sender may have heard of it before us
        if first.epoch != self._epoch or self._link is not None:
            return False
        self._peer, self._pool_address = first.agent, first.pool_address
        self._driver.meet(first.agent, first.metadata)
        return True

    def _attend(self, link: Link) -> None:
        try:
            self._take(to_receiver(link))
        except msgspec.DecodeError:
            link.close()
        if link.is_ended:
            self._break()

    def _break(self) -> None:
        """The link is of no more use in this epoch."""
        self._hang_up()
        self._broken_s = time.monotonic()
        if self._loop is not None:
            self._loop.call_later(GRACE_S, self._news.set)

    def _check_peer(self) -> None:
        """Called with nothing left to deliver."""
        name = self._description.name
        reading = any(arrival.announced.span is not None for arrival in self._queue.values())
        if (self._dead_epoch == self._epoch and self._link is None and not reading) or self._parent.is_ended:
            raise PeerLost(f"edge {name} has lost its sender")
        if self._broken_s is not None and time.monotonic() - self._broken_s >= GRACE_S:
            raise EngineError(f"edge {name} lost its connection while both its ends live")

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
            self._driver.part(self._peer)

    # --- chunks ---------------------------------------------------------------------------------------------

    def _take(self, messages: Sequence[ToReceiver]) -> None:
        for message in messages:
            match message:
                case Announce(slot=slot):
                    self._queue[slot] = _Arrival(message)
                    self._fetch(self._queue[slot])
                case CancelSlots(slots):
                    for slot in slots:
                        if slot in self._queue:
                            self._drop(slot)

    def _fetch(self, arrival: _Arrival) -> None:
        announced, pool = arrival.announced, self._pool
        if announced.span is None:
            memory = Memory(memoryview(bytearray(announced.body)))
            arrival.chunk = wire.read(memory, 0, announced.header_nbytes)
            return
        pool.num_users += 1
        source, target = self._pool_address + announced.span, pool.memory.address + announced.span

        def done(ok: bool) -> None:
            self._landed.append((pool, arrival, ok))
            loop = self._loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(self._heard)

        self._driver.read(self._peer, source, target, announced.size, done)

    def _land(self, pool: _Pool, arrival: _Arrival, ok: bool) -> None:
        slot = arrival.announced.slot
        if self._queue.get(slot) is not arrival:  # of an earlier epoch
            pool.drop_user()
            return
        if ok and self._link is not None:
            tell(self._link, Landed(slot))
        if not ok:
            del self._queue[slot]
            pool.drop_user()
            self._break()  # the stream has a hole
        elif arrival.cancelled:
            del self._queue[slot]
            pool.drop_user()
            self._give_back(slot)
        else:
            announced = arrival.announced
            assert announced.span is not None
            arrival.chunk = wire.read(pool.memory, announced.span, announced.header_nbytes)

    def _first_ready(self) -> _Arrival | None:
        for arrival in self._queue.values():
            if not arrival.cancelled:
                return arrival if arrival.chunk is not None else None
        return None

    def _deliver(self, arrival: _Arrival) -> Chunk:
        announced, chunk = arrival.announced, arrival.chunk
        assert chunk is not None
        del self._queue[announced.slot]
        self._check_seq(chunk)
        pool = None if announced.span is None else self._pool
        self._held[id(chunk)] = _Held(chunk, announced.slot, pool, self._epoch)
        self.stats.chunks_total += 1
        self.stats.bytes_total += chunk.nbytes
        self.stats.wait.add(max(time.time_ns() - announced.sent_ns, 0) / 1e9)
        return chunk

    def _check_seq(self, chunk: Chunk) -> None:
        """As in the shared-memory edge: a stream starts at 0 and has no gap, but for what a cancellation on
        this side leaves out."""
        key = (chunk.request_id, chunk.stream)
        expected = self._next_seq.get(key, chunk.seq)
        assert chunk.seq in (expected, 0), (
            f"edge {self._description.name}: {key} brings {chunk.seq}, expected {expected}"
        )
        if chunk.last:
            self._next_seq.pop(key, None)
        else:
            self._next_seq[key] = chunk.seq + 1

    def _drop(self, slot: int) -> None:
        """A chunk that is being read keeps its slot until the read has ended."""
        arrival = self._queue[slot]
        if arrival.chunk is None:
            arrival.cancelled = True
            return
        del self._queue[slot]
        self._next_seq.pop((arrival.chunk.request_id, arrival.chunk.stream), None)
        if arrival.announced.span is not None:
            self._pool.drop_user()
        self._give_back(slot)

    def _drop_all(self) -> None:
        """What was not handed out; reads under way end in `_land`."""
        for arrival in self._queue.values():
            if arrival.chunk is not None and arrival.announced.span is not None:
                self._pool.drop_user()
        self._queue.clear()

    def _give_back(self, slot: int) -> None:
        if self._link is not None:
            tell(self._link, Returned((slot,)))
