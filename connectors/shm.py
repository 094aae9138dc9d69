"""The shared-memory connector: an edge made by the parent, a sender and a receiver in any two processes."""

from __future__ import annotations

import os
from mmap import PAGESIZE

from connectors.ring import FIRST_EPOCH, End, Ring, ShmDescription, Word, sealed_memfd
from connectors.shm_receiver import ShmReceiver
from connectors.shm_sender import ShmSender

__all__ = ["ShmDescription", "ShmEdge", "ShmReceiver", "ShmSender"]


class ShmEdge:
    """The parent's: owns the memory and the bells, and outlives both ends.

    When a process that holds an end has died: `mark_dead` tells the other end at once, `reset` makes the edge
    as new for the next holder. The end that lives on takes part in the new epoch by itself:

    - sender: waiting sends raise PeerLost, streams begun before the reset too, at their next send; a stream
      that starts at 0 goes through (into the edge until it is full, when the receiver was marked dead; else
      as soon as the next receiver is there).
    - receiver: what it had not received yet is dropped, `receive` waits for the next sender. Chunks it holds
      stay valid until their release; the next sender waits for that.

    The dead process must be gone, not merely hung: it could go on writing.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    @classmethod
    def create(cls, name: str, capacity_bytes: int, max_chunks: int) -> ShmEdge:
        """Room for `max_chunks` chunks not yet released, and for `capacity_bytes` of those among them that
        are over 4 KiB."""
        assert capacity_bytes > 0, f"edge {name}: {capacity_bytes} bytes"
        assert max_chunks > 0, f"edge {name}: {max_chunks} chunks"
        sizes = ShmDescription(
            name=name,
            memory_fd=-1,
            to_sender_fd=-1,
            to_receiver_fd=-1,
            pool_bytes=-(-capacity_bytes // PAGESIZE) * PAGESIZE,
            max_chunks=max_chunks,
        )
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        description = ShmDescription(
            name=name,
            memory_fd=sealed_memfd(name, sizes.total_bytes),
            to_sender_fd=os.eventfd(0, flags),
            to_receiver_fd=os.eventfd(0, flags),
            pool_bytes=sizes.pool_bytes,
            max_chunks=max_chunks,
        )
        ring = Ring(description)
        ring.publish(Word.RETURNED, FIRST_EPOCH, 0)
        ring.start_epoch(FIRST_EPOCH)
        return cls(ring)

    @property
    def fds(self) -> tuple[int, int, int]:
        """What a process that holds an end must inherit (`pass_fds`)."""
        description = self._ring.description
        return description.memory_fd, description.to_sender_fd, description.to_receiver_fd

    def description(self) -> ShmDescription:
        return self._ring.description

    def mark_dead(self, end: End) -> None:
        """The peer's waits end in PeerLost now, and so do its later ones until a reset. A receiver is given
        what was sent before."""
        self._ring.mark_dead(end)
        self._ring_bells()

    def reset(self) -> None:
        ring, old = self._ring, self._ring.epoch
        if ring.is_gone("receiver", old) or not ring.was_attached("receiver"):
            ring.publish(Word.RETURNED, old + 1, 0)  # nobody holds a view, so nobody else will say so
        ring.start_epoch(old + 1)
        self._ring_bells()

    def close(self) -> None:
        """Ends that are still there get PeerLost. The memory goes with the last process that maps it."""
        self.mark_dead("sender")
        self.mark_dead("receiver")
        for fd in self.fds:
            os.close(fd)

    def _ring_bells(self) -> None:
        _, to_sender_fd, to_receiver_fd = self.fds
        os.eventfd_write(to_sender_fd, 1)
        os.eventfd_write(to_receiver_fd, 1)
