"""The sending end of a NIXL edge: copies into registered memory, announces, lets the receiver read."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Sequence

import msgspec

from connectors import wire
from connectors.link import Link, connect
from connectors.nixl_agent import process_driver
from connectors.nixl_messages import (
    GRACE_S,
    Announce,
    Begin,
    CancelSlots,
    FromParent,
    Landed,
    Meet,
    NixlDescription,
    Open,
    PeerDead,
    Returned,
    attach,
    from_parent,
    reach_parent,
    tell,
    to_sender,
)
from connectors.sending import CreditedSender, Room
from connectors.wire import Memory, Packed
from contracts.chunks import Chunk
from contracts.errors import EngineError

INLINE_BYTES = 8 * 1024


class NixlSender(CreditedSender):
    """See `connectors.interface.Sender`. The receiver's memory has the same layout, so a span that is free
    here is free there."""

    def __init__(self, description: NixlDescription) -> None:
        super().__init__(Room(description.name, description.max_chunks, description.pool_bytes, INLINE_BYTES))
        self._description = description
        self._driver = process_driver()
        self._parent = reach_parent(description)
        epoch, self._unheard = attach(description, self._parent, "sender")
        self._memory = Memory(memoryview(mmap.mmap(-1, description.pool_bytes)))
        self._registration = self._driver.register(self._memory)
        self._link: Link | None = None
        self._serving: set[int] = set()  # slots that the receiver reads
        self._dead_epoch = 0
        self._broken_s: float | None = None  # when the link broke, while nobody has said why
        self._problem = ""
        self._begin(epoch)

    def close(self) -> None:
        """What the receiver has not read yet is lost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        is_read = bool(self._serving)
        self._hang_up()
        self._parent.close()
        self._driver.deregister(self._registration, keep=is_read)
        self._memory.unpin()
        self._wake_all()

    # --- what is heard --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._parent.watch(self._look)
        if self._link is not None:
            self._link.watch(self._look)

    def _follow(self) -> None:
        """Watches at its end: that hears of whatever is not taken in here, over a link that is new, too."""
        unheard, self._unheard = self._unheard, []
        self._obey(unheard)
        self._obey(from_parent(self._parent))
        if self._link is not None:
            self._attend(self._link)
        self._watch()

    def _attend(self, link: Link) -> None:
        try:
            messages = to_sender(link)
        except msgspec.DecodeError as error:
            self._break(f"the receiver sends what cannot be read: {error}")
            return
        for message in messages:
            match message:
                case Landed(slot):
                    self._end_serving(slot)
                case Returned(slots):
                    for slot in slots:
                        self._take_back(slot)
        if link.is_ended:
            self._break("the connection broke")

    def _obey(self, messages: Sequence[FromParent]) -> None:
        for message in messages:
            match message:
                case Begin(epoch):
                    self._hang_up()
                    self._broken_s = None
                    self._restart(epoch)
                case Meet(epoch, host, port) if epoch == self._epoch:
                    self._reach(host, port)
                case PeerDead(epoch):
                    self._dead_epoch = epoch

    def _reach(self, host: str, port: int) -> None:
        self._hang_up()
        try:
            link = connect(host, port)
        except OSError as error:
            self._break(f"nobody answers at {host}:{port}: {error}")
            return
        metadata, token = self._registration.metadata, self._description.token
        tell(link, Open(token, self._epoch, self._driver.name, metadata, self._memory.address))
        self._link = link

    def _break(self, problem: str) -> None:
        """The link is of no more use in this epoch."""
        self._hang_up()
        self._broken_s, self._problem = time.monotonic(), problem
        asyncio.get_running_loop().call_later(GRACE_S, self._wake_all)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        for slot in list(self._serving):
            self._end_serving(slot)

    def _end_serving(self, slot: int) -> None:
        if slot in self._serving:
            self._serving.discard(slot)
            self._driver.serve(-1)

    # --- what is sent ---------------------------------------------------------------------------------------

    def _is_gone(self) -> bool:
        return self._dead_epoch == self._epoch or self._parent.is_ended

    def _is_ready(self) -> bool:
        return self._link is not None

    def _reserve(self, packed: Packed) -> tuple[int, int | None] | None:
        """Waits with a broken link until the parent has said who died; EngineError when nobody has."""
        if self._broken_s is not None and time.monotonic() - self._broken_s >= GRACE_S:
            raise EngineError(f"edge {self._room.name}, both its ends living: {self._problem}")
        return super()._reserve(packed)

    def _write(self, slot: int, span: int | None, chunk: Chunk, packed: Packed) -> None:
        assert self._link is not None
        if span is None:
            small = bytearray(packed.size)
            wire.write(Memory(memoryview(small)), 0, packed)
            body = bytes(small)
        else:
            wire.write(self._memory, span, packed)
            body = b""
            self._serving.add(slot)
            self._driver.serve(1)
        announced = Announce(
            slot, chunk.request_id, len(packed.header), packed.size, span, time.time_ns(), body
        )
        tell(self._link, announced)

    def _cancel_slots(self, slots: Sequence[int]) -> None:
        if self._link is not None:
            tell(self._link, CancelSlots(tuple(slots)))
