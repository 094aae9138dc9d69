"""The CUDA IPC connector: device tensors go from GPU to GPU of one host, the rest of a chunk through shared
memory.

The ring of `connectors.shm` carries everything but the values of device tensors: order, credits,
cancellation, epochs and death are its own. Beside it the sender's process owns a pool of device memory,
exported once, from which a span is taken for each chunk that has device tensors. Events order the copies, a
pair for each slot:

    sender's stream      copy in ── written[slot]                       wait read[slot] ── next copy in
    host                          └ message ─▶                 ◀─ slot returned ┘
    receiver's stream                  wait written[slot] ── copy out ── read[slot]

Neither host waits for a GPU. Handles cross in a second memfd, each end's written before the first word of its
epoch.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from connectors import wire
from connectors.ring import End, sealed_memfd
from connectors.shm import ShmDescription, ShmEdge, ShmReceiver, ShmSender
from connectors.spans import SpanPool
from connectors.wire import Packed
from contracts.chunks import Chunk, TensorHeader
from contracts.errors import EngineError, PeerLost

EXPORT_BYTES = 64 << 10  # of each end
DEVICE_ALIGNMENT = 256
HOST_POOL_BYTES = 4 << 20  # for tensors of the host, which are small beside those of a device
_PLACES: dict[End, int] = {"sender": 0, "receiver": EXPORT_BYTES}


class CudaIpcDescription(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an end needs to open an edge. `device_bytes`: of the pool in the sender's GPU."""

    ring: ShmDescription
    exports_fd: int
    device_bytes: int
    sender_device: str
    receiver_device: str


class SendLane(Protocol):
    """The sender's device: its pool, and events by slot. All in the order of one stream."""

    def carries(self, tensor: Tensor) -> bool:
        """Whether it is a tensor of the device, and not of the host."""
        ...

    def export(self) -> bytes: ...

    def meet(self, export: bytes) -> None:
        """The receiver's events."""
        ...

    def write(self, slot: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Copies to offsets of the pool what the current stream has computed, then records written[slot]."""
        ...

    def await_read(self, slot: int) -> None:
        """Later writes come after read[slot]."""
        ...

    def close(self) -> None: ...


class ReceiveLane(Protocol):
    """The receiver's device, in the order of its current stream."""

    def export(self) -> bytes: ...

    def meet(self, export: bytes) -> None:
        """The sender's pool and events; forgets those of a sender before."""
        ...

    def read(self, slot: int, parts: Sequence[tuple[int, TensorHeader]]) -> list[Tensor]:
        """After written[slot], copies out of the pool, then records read[slot]."""
        ...

    def close(self) -> None: ...


class CudaIpcEdge:
    """The parent's; see `ShmEdge`."""

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
            exports_fd=sealed_memfd(f"{name}-exports", len(_PLACES) * EXPORT_BYTES),
            device_bytes=_aligned(capacity_bytes),
            sender_device=sender_device,
            receiver_device=receiver_device,
        )
        return cls(description, ring)

    @property
    def fds(self) -> tuple[int, ...]:
        return (*self._ring.fds, self._description.exports_fd)

    def description(self) -> CudaIpcDescription:
        return self._description

    def close(self) -> None:
        self._ring.close()
        os.close(self._description.exports_fd)


class _Export(msgspec.Struct, frozen=True, array_like=True):
    """`holder` tells one holder of an end from the next."""

    holder: int
    content: bytes


class _Exports:
    """Both ends' handles, in memory that both map: length, then an `_Export`."""

    def __init__(self, fd: int) -> None:
        self._pages = memoryview(mmap.mmap(fd, len(_PLACES) * EXPORT_BYTES))

    def put(self, end: End, content: bytes) -> None:
        data = msgspec.msgpack.encode(_Export(secrets.randbits(63), content))
        assert len(data) + 4 <= EXPORT_BYTES, "too many chunks for the handles' place"
        place = _PLACES[end]
        self._pages[place + 4 : place + 4 + len(data)] = data
        self._pages[place : place + 4] = len(data).to_bytes(4, "little")

    def get(self, end: End) -> _Export:
        place = _PLACES[end]
        nbytes = int.from_bytes(self._pages[place : place + 4], "little")
        return msgspec.msgpack.decode(self._pages[place + 4 : place + 4 + nbytes], type=_Export)


class _PackedForDevice(Packed, frozen=True):
    on_device: tuple[Tensor, ...] = ()
    device_nbytes: int = 0


class CudaIpcSender(ShmSender):
    """See `connectors.interface.Sender`. Device tensors may be freed or written to after `send` returns: the
    allocator is told, and the stream orders it."""

    def __init__(self, description: CudaIpcDescription, lane: SendLane) -> None:
        self._lane = lane
        self._exports = _Exports(description.exports_fd)
        self._device_bytes = description.device_bytes
        self._device_span: dict[int, int] = {}
        self._met = 0
        super().__init__(description.ring)
        self._exports.put("sender", lane.export())

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._lane.close()

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._device_pool = SpanPool(self._device_bytes)
        self._device_span.clear()

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
            packed.tensor_nbytes,
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
        if isinstance(packed, _PackedForDevice):
            offset = self._device_span.get(slot, 0)
            self._ring.put_device_offset(slot, offset)
            places = _places(offset, [tensor.nbytes for tensor in packed.on_device])
            self._lane.write(slot, list(zip(places, packed.on_device, strict=True)))
        super()._write(slot, span, chunk, packed)

    def _take_back(self, slot: int) -> None:
        super()._take_back(slot)
        if slot in self._device_span:
            export = self._exports.get("receiver")
            if export.holder != self._met:
                self._lane.meet(export.content)
                self._met = export.holder
            self._lane.await_read(slot)
            self._device_pool.give_back(self._device_span.pop(slot))


class CudaIpcReceiver(ShmReceiver):
    """See `connectors.interface.Receiver`. Device tensors arrive as copies on the receiver's device, ready in
    its current stream; all tensors are the caller's to keep."""

    hands_over = True

    def __init__(self, description: CudaIpcDescription, lane: ReceiveLane) -> None:
        self._lane = lane
        self._exports = _Exports(description.exports_fd)
        self._exports.put("receiver", lane.export())  # before the first word that shows an end here
        self._met = 0
        super().__init__(description.ring)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._lane.close()

    def _complete(self, slot: int, chunk: Chunk) -> Chunk:
        tensors = {name: tensor.clone() for name, tensor in chunk.tensors.items()}
        described = self._device_headers(slot)
        if described:
            export = self._exports.get("sender")
            if export.holder != self._met:
                self._meet(export)
            places = _places(self._ring.device_offset(slot), [wire.nbytes_of(t) for t in described])
            read = self._lane.read(slot, list(zip(places, described, strict=True)))
            tensors |= {header.name: tensor for header, tensor in zip(described, read, strict=True)}
        return msgspec.structs.replace(chunk, tensors=tensors)

    def _meet(self, export: _Export) -> None:
        try:
            self._lane.meet(export.content)
        except EngineError as error:
            if self._ring.is_gone("sender", self._epoch):
                raise PeerLost(f"edge {self._ring.description.name} has lost its sender") from error
            raise
        self._met = export.holder

    def _device_headers(self, slot: int) -> tuple[TensorHeader, ...]:
        body_offset, header_nbytes, _ = self._ring.preamble(slot)
        return wire.read_header(self._ring.memory, body_offset, header_nbytes).device_tensors


def _places(offset: int, sizes: Sequence[int]) -> list[int]:
    """One behind the other."""
    places = []
    for nbytes in sizes:
        places.append(offset)
        offset += _aligned(nbytes)
    return places


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT
