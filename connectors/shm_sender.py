"""The sending end of a shared-memory edge: copies in, publishes, collects what was returned."""

from __future__ import annotations

import time
from collections.abc import Sequence

from connectors import wire
from connectors.ring import CANCELLATION, INLINE_BYTES, Bell, Ring, ShmDescription, Word
from connectors.sending import CreditedSender, Room
from connectors.wire import Packed
from contracts.chunks import Chunk


class ShmSender(CreditedSender):
    """See `connectors.interface.Sender`."""

    def __init__(self, description: ShmDescription) -> None:
        self._ring = Ring(description)
        epoch = self._ring.attach("sender")
        super().__init__(Room(description.name, description.max_chunks, description.pool_bytes, INLINE_BYTES))
        self._bell = Bell(description.to_sender_fd, description.to_receiver_fd)
        self._begin(epoch)

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

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._num_messages = 0
        self._num_returned = 0
        self._receiver_ready = False  # has come to this epoch

    def _watch(self) -> None:
        self._bell.watch(self._heard)
        self._ring.say(Word.SENDER_WAITS, self._epoch)

    def _heard(self) -> None:
        self._bell.answer()
        self._look()
        if not self._waiting:
            self._ring.say(Word.SENDER_WAITS, 0)
            self._bell.unwatch()

    def _follow(self) -> None:
        epoch = self._ring.epoch
        if epoch != self._epoch:
            self._restart(epoch)
            self._ring.follow("sender", epoch)
        returned = self._ring.count(Word.RETURNED, epoch)
        self._receiver_ready = returned is not None
        while returned is not None and self._num_returned < returned:
            slot = self._ring.returned_slot(self._num_returned)
            self._num_returned += 1
            self._take_back(slot)

    def _is_gone(self) -> bool:
        return self._ring.is_gone("receiver", self._epoch)

    def _is_ready(self) -> bool:
        return self._receiver_ready

    def _foretell(self, chunk: Chunk) -> None:
        if not self._in_use and self._receiver_ready and chunk.nbytes <= INLINE_BYTES:
            self._ring.publish(Word.COMING, self._epoch, self._num_messages + 1)
            self._bell.ring()

    def _write(self, slot: int, span: int | None, chunk: Chunk, packed: Packed) -> None:
        offset = self._head(slot, span, packed)
        self._put_message(slot)
        self._ring.publish(Word.SHOWN, self._epoch, self._num_messages)
        try:
            self._fill(slot, offset, packed)
        except BaseException:
            self._in_use[slot].cancelled = True
            self._put_message(slot | CANCELLATION)
            raise
        finally:
            self._publish()

    def _head(self, slot: int, span: int | None, packed: Packed) -> int:
        """Writes all but the tensors; where those lie."""
        offset = self._ring.body_offset(slot, span)
        self._ring.put_preamble(slot, offset, len(packed.header))
        return wire.write_header(self._ring.memory, offset, packed)

    def _fill(self, slot: int, offset: int, packed: Packed) -> None:
        wire.write_tensors(self._ring.memory, offset, packed)
        self._ring.put_time(slot, time.monotonic_ns())

    def _announce(self, slot: int) -> None:
        """Shows a filled slot to the receiver."""
        self._put_message(slot)
        self._publish()

    def _cancel_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._put_message(slot | CANCELLATION)
        self._publish()

    def _put_message(self, entry: int) -> None:
        self._ring.put_message(self._num_messages, entry)
        self._num_messages += 1

    def _publish(self) -> None:
        self._ring.publish(Word.SENT, self._epoch, self._num_messages)
        if not self._ring.is_said(Word.RECEIVER_LOOKS, self._epoch):
            self._bell.ring()
