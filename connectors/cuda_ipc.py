"""The CUDA IPC connector: device tensors go from GPU to GPU of one host, the rest of a chunk through shared
memory.

The ring of `connectors.shm` carries everything but the values of device tensors: order, credits,
cancellation, epochs and death are its own. Beside it the sender's process owns a pool of device memory,
exported once, from which a span is taken for each chunk that has device tensors:

    sender's stream     ... computed ── copy in ─ done
    sender's host       send ─▶ returns          └─ a thread hears it ── message ─▶
    receiver's stream                                                        copy out ─ done
    receiver's host                                              receive ─▶             └─▶ slot returned

A GPU waits for nothing that another process does: a process may be killed at any moment, and what it would
have
signalled never comes. So a message is shown once its copy is complete, and a slot returned once it is
copied out.
The pool's handle crosses in a second memfd, written before the first message.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from connectors import wire
from connectors.ring import sealed_memfd
from connectors.shm import ShmDescription, ShmEdge, ShmReceiver, ShmSender
from connectors.spans import SpanPool
from connectors.wire import Packed
from contracts.chunks import Chunk, TensorHeader
from contracts.errors import EngineError, PeerLost

EXPORT_BYTES = 4 << 10
DEVICE_ALIGNMENT = 256
SOON_NS = 50_000  # less than waking a thread takes
POOL_GRANULE = 2 << 20  # what the driver shares memory by: nothing else of the process lies in a pool's pages
HOST_POOL_BYTES = 4 << 20  # for tensors of the host, which are small beside those of a device


class CudaIpcDescription(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an end needs to open an edge. `device_bytes`: of the pool in the sender's GPU."""

    ring: ShmDescription
    export_fd: int
    device_bytes: int
    sender_device: str
    receiver_device: str


class Copying(Protocol):
    """Copies under way on a device; may be asked by any thread."""

    def is_complete(self) -> bool: ...

    def wait(self) -> None:
        """Blocks until they are complete."""
        ...


class SendLane(Protocol):
    """The sender's device, and its pool there."""

    def carries(self, tensor: Tensor) -> bool:
        """Whether it is a tensor of the device, and not of the host."""
        ...

    def export(self) -> bytes: ...

    def write(self, parts: Sequence[tuple[int, Tensor]]) -> Copying:
        """Copies to offsets of the pool, in the order of the current stream."""
        ...

    def close(self, *, is_read: bool) -> None:
        """`is_read`: the receiver may have the pool open, and be copying."""
        ...


class ReceiveLane(Protocol):
    """The receiver's device."""

    def meet(self, export: bytes) -> None:
        """The sender's pool; forgets that of a sender before."""
        ...

    def read(self, parts: Sequence[tuple[int, TensorHeader]]) -> list[Tensor]:
        """Copies out of the pool, complete on return, whatever the device is computing."""
        ...

    def close(self) -> None: ...


class CudaIpcEdge:
    """The parent's; see `ShmEdge`. Both ends must see the same GPUs under the same numbers."""

    def __init__(self, description: CudaIpcDescription, ring: ShmEdge) -> None:
        self._description = description
        self._ring = ring
        self.mark_dead, self.reset = ring.mark_dead, ring.reset

    @classmethod
    def create(
        cls, name: str, capacity_bytes: int, max_chunks: int, sender_device: str, receiver_device: str
    ) -> CudaIpcEdge:
        """`capacity_bytes`: of device tensors under way."""
        ring = ShmEdge.create(name, HOST_POOL_BYTES, max_chunks)
        description = CudaIpcDescription(
            ring=ring.description(),
            export_fd=sealed_memfd(f"{name}-export", EXPORT_BYTES),
            device_bytes=device_pool_bytes(capacity_bytes),
            sender_device=sender_device,
            receiver_device=receiver_device,
        )
        return cls(description, ring)

    @property
    def fds(self) -> tuple[int, ...]:
        return (*self._ring.fds, self._description.export_fd)

    def description(self) -> CudaIpcDescription:
        return self._description

    def close(self) -> None:
        self._ring.close()
        os.close(self._description.export_fd)


class _Export(msgspec.Struct, frozen=True, array_like=True):
    """`holder` tells one holder of the sending end from the next."""

    holder: int
    content: bytes


class _Exported:
    """The sender's handle, in memory that both ends map: length, then an `_Export`."""

    def __init__(self, fd: int) -> None:
        self._pages = memoryview(mmap.mmap(fd, EXPORT_BYTES))

    def put(self, content: bytes) -> None:
        data = msgspec.msgpack.encode(_Export(secrets.randbits(63), content))
        assert len(data) + 4 <= EXPORT_BYTES
        self._pages[4 : 4 + len(data)] = data
        self._pages[:4] = len(data).to_bytes(4, "little")

    def get(self) -> _Export:
        nbytes = int.from_bytes(self._pages[:4], "little")
        return msgspec.msgpack.decode(self._pages[4 : 4 + nbytes], type=_Export)


class _PackedForDevice(Packed, frozen=True):
    on_device: tuple[Tensor, ...] = ()
    device_nbytes: int = 0


@dataclass(frozen=True)
class _Copy:
    """Under way on the device, for the thread that waits for it."""

    copying: Copying
    held: _Held
    loop: asyncio.AbstractEventLoop


@dataclass(eq=False)
class _Held:
    """A filled slot that is not shown yet: its copy, or one before it, is not complete."""

    slot: int
    is_complete: bool


class CudaIpcSender(ShmSender):
    """See `connectors.interface.Sender`. `send` waits for credits and not for the device; device tensors
    may be
    freed, and be written to in the order of the stream, once it has returned."""

    def __init__(self, description: CudaIpcDescription, lane: SendLane) -> None:
        self._lane = lane
        self._device_bytes = description.device_bytes
        self._device_span: dict[int, int] = {}
        self._held: deque[_Held] = deque()
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        super().__init__(description.ring)
        _Exported(description.export_fd).put(lane.export())

    def close(self) -> None:
        """Waits for the device: what was sent is still there for the receiver. Idempotent."""
        if self._closed:
            return
        if self._thread is not None:
            self._copies.put(None)
            self._thread.join()
        if self._ring.epoch == self._epoch:
            for held in self._held:
                held.is_complete = True
            self._show_complete()
        is_read = not self._is_gone()
        super().close()
        self._lane.close(is_read=is_read)

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._device_pool = SpanPool(self._device_bytes)
        self._device_span.clear()
        self._held.clear()

    def _foretell(self, chunk: Chunk) -> None:
        if not any(map(self._lane.carries, chunk.tensors.values())):  # else it waits for the device first
            super()._foretell(chunk)

    def _pack(self, chunk: Chunk) -> Packed:
        on_device = {name: tensor for name, tensor in chunk.tensors.items() if self._lane.carries(tensor)}
        if not on_device:
            return wire.pack(chunk)
        on_host = {name: tensor for name, tensor in chunk.tensors.items() if name not in on_device}
        packed = wire.pack(msgspec.structs.replace(chunk, tensors=on_host), on_device)
        size = sum(_aligned(tensor.nbytes) for tensor in on_device.values())
        if size > self._device_bytes:
            raise EngineError(
                f"edge {self._room.name}: {size} bytes of device tensors are more than the edge's"
                f" {self._device_bytes}; raise its capacity_bytes",
                request_id=chunk.request_id,
            )
        nbytes = packed.nbytes + sum(tensor.nbytes for tensor in on_device.values())
        return _PackedForDevice(
            packed.header,
            packed.tensors,
            packed.layout,
            nbytes,
            packed.size,
            tuple(on_device.values()),
            size,
        )

    def _reserve(self, packed: Packed) -> tuple[int, int | None] | None:
        device_nbytes = packed.device_nbytes if isinstance(packed, _PackedForDevice) else 0
        span = self._device_pool.take(device_nbytes) if device_nbytes else None
        if device_nbytes and span is None:
            return None
        reserved = super()._reserve(packed)
        if span is not None and reserved is None:
            self._device_pool.give_back(span)
        elif span is not None and reserved is not None:
            self._device_span[reserved[0]] = span
        return reserved

    def _write(self, slot: int, span: int | None, chunk: Chunk, packed: Packed) -> None:
        self._fill(slot, self._head(slot, span, packed), packed)
        if not isinstance(packed, _PackedForDevice):
            if not self._held:
                self._announce(slot)
                return
            self._held.append(_Held(slot, is_complete=True))  # a stream stays in order
            return
        offset = self._device_span.get(slot, 0)
        self._ring.put_device_offset(slot, offset)
        places = _places(offset, [tensor.nbytes for tensor in packed.on_device])
        copying = self._lane.write(list(zip(places, packed.on_device, strict=True)))
        if not self._held and _completes_soon(copying):
            self._announce(slot)
            return
        self._held.append(_Held(slot, is_complete=False))
        if self._thread is None:
            self._thread = threading.Thread(target=self._await_copies, name=f"edge {self._room.name}")
            self._thread.start()
        self._copies.put(_Copy(copying, self._held[-1], asyncio.get_running_loop()))

    def _await_copies(self) -> None:
        """The thread."""
        while (copy := self._copies.get()) is not None:
            copy.copying.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended: `close` sees to the rest
                copy.loop.call_soon_threadsafe(self._completed, copy.held)

    def _completed(self, held: _Held) -> None:
        held.is_complete = True
        if not self._closed:
            self._follow()
            self._show_complete()
            self._wake_line()

    def _show_complete(self) -> None:
        while self._held and self._held[0].is_complete:
            slot = self._held.popleft().slot
            if self._in_use[slot].cancelled:
                self._take_back(slot)
            else:
                self._announce(slot)

    def _cancel_slots(self, slots: Sequence[int]) -> None:
        held = {held.slot for held in self._held}
        super()._cancel_slots([slot for slot in slots if slot not in held])

    def _take_back(self, slot: int) -> None:
        super()._take_back(slot)
        if slot in self._device_span:
            self._device_pool.give_back(self._device_span.pop(slot))


class CudaIpcReceiver(ShmReceiver):
    """See `connectors.interface.Receiver`. Device tensors arrive as complete copies on the receiver's
    device; all
    tensors are the caller's to keep."""

    hands_over = True

    def __init__(self, description: CudaIpcDescription, lane: ReceiveLane) -> None:
        self._lane = lane
        self._exported = _Exported(description.export_fd)
        self._met = 0
        super().__init__(description.ring)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._lane.close()

    def _complete(self, slot: int, chunk: Chunk, nbytes: int) -> tuple[Chunk, int]:
        tensors = {name: tensor.clone() for name, tensor in chunk.tensors.items()}
        described = self._device_headers(slot)
        if described:
            self._meet()
            places = _places(self._ring.device_offset(slot), [wire.nbytes_of(t) for t in described])
            read = self._lane.read(list(zip(places, described, strict=True)))
            tensors |= {header.name: tensor for header, tensor in zip(described, read, strict=True)}
        chunk = msgspec.structs.replace(chunk, tensors=tensors)
        return chunk, chunk.nbytes

    def _meet(self) -> None:
        """The holder of the sending end, if it is another than before."""
        export = self._exported.get()
        if export.holder == self._met:
            return
        lost = PeerLost(f"edge {self._ring.description.name} has lost its sender")
        if self._ring.epoch != self._epoch:
            raise lost  # the next holder is there already, and the chunk lies in the pool of the one before
        try:
            self._lane.meet(export.content)
        except EngineError as error:
            if self._ring.is_gone("sender", self._epoch):
                raise lost from error
            raise
        self._met = export.holder

    def _device_headers(self, slot: int) -> tuple[TensorHeader, ...]:
        body_offset, header_nbytes = self._ring.preamble(slot)
        return wire.read_header(self._ring.memory, body_offset, header_nbytes)[1].elsewhere


def device_pool_bytes(capacity_bytes: int) -> int:
    """What an edge of this capacity takes of its sender's GPU."""
    return _aligned(capacity_bytes, POOL_GRANULE)


def _completes_soon(copying: Copying) -> bool:
    """What was computed long ago is copied sooner than a thread is woken."""
    end_ns = time.monotonic_ns() + SOON_NS
    while not copying.is_complete():
        if time.monotonic_ns() > end_ns:
            return False
    return True


def _places(offset: int, sizes: Sequence[int]) -> list[int]:
    """One behind the other."""
    places = []
    for nbytes in sizes:
        places.append(offset)
        offset += _aligned(nbytes)
    return places


def _aligned(nbytes: int, granule: int = DEVICE_ALIGNMENT) -> int:
    return -(-nbytes // granule) * granule
