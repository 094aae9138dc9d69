"""The lanes of a CUDA IPC edge on real GPUs: a pool of the driver's, torch's streams and events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from connectors.cuda_driver import DeviceContext
from connectors.cuda_ipc import CudaIpcDescription, CudaIpcReceiver, CudaIpcSender
from connectors.wire import DTYPES
from contracts.chunks import TensorHeader


class _Handles(msgspec.Struct, frozen=True, array_like=True):
    """`memory` is empty from a receiver, which shares none."""

    memory: bytes
    events: tuple[bytes, ...]


def _make_events(device: torch.device, count: int) -> list[torch.cuda.Event]:
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=False, interprocess=True) for _ in range(count)]  # type: ignore[no-untyped-call]
        for event in events:  # it exists from its first record on
            event.record(torch.cuda.current_stream(device))
    return events


def _open_events(device: torch.device, handles: Sequence[bytes]) -> list[torch.cuda.Event]:
    return [torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles]  # type: ignore[no-untyped-call]


def _export(memory: bytes, events: Sequence[torch.cuda.Event]) -> bytes:
    return msgspec.msgpack.encode(_Handles(memory, tuple(bytes(event.ipc_handle()) for event in events)))  # type: ignore[no-untyped-call]


class CudaSendLane:
    """Copies on a stream of its own, so that what the producer computes next need not wait."""

    def __init__(self, device: torch.device, nbytes: int, max_chunks: int) -> None:
        self._device = device
        self._context = DeviceContext(device.index)
        self._pool = self._context.allocate(nbytes)
        self._written = _make_events(device, max_chunks)
        self._read: list[torch.cuda.Event] = []
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def carries(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def export(self) -> bytes:
        return _export(self._context.handle_of(self._pool), self._written)

    def meet(self, export: bytes) -> None:
        self._read = _open_events(self._device, msgspec.msgpack.decode(export, type=_Handles).events)

    def write(self, slot: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        plain = [
            (offset, tensor.detach().resolve_conj().resolve_neg().contiguous()) for offset, tensor in parts
        ]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for offset, tensor in plain:
            tensor.record_stream(self._stream)
            if tensor.nbytes:
                target, stream = self._pool + offset, self._stream.cuda_stream
                self._context.copy(target, tensor.data_ptr(), tensor.nbytes, stream)
        self._written[slot].record(self._stream)

    def await_read(self, slot: int) -> None:
        self._stream.wait_event(self._read[slot])

    def close(self) -> None:
        """A receiver that still copies would read freed memory, so this waits for nothing but its own; the
        edge is closed only once both sides have no more requests."""
        self._stream.synchronize()
        self._context.free(self._pool)


class CudaReceiveLane:
    def __init__(self, device: torch.device, max_chunks: int) -> None:
        self._device = device
        self._context = DeviceContext(device.index)
        self._read = _make_events(device, max_chunks)
        self._written: list[torch.cuda.Event] = []
        self._pool: int | None = None

    def export(self) -> bytes:
        return _export(b"", self._read)

    def meet(self, export: bytes) -> None:
        handles = msgspec.msgpack.decode(export, type=_Handles)
        self._part()
        self._pool = self._context.open(handles.memory)
        self._written = _open_events(self._device, handles.events)

    def read(self, slot: int, parts: Sequence[tuple[int, TensorHeader]]) -> list[Tensor]:
        assert self._pool is not None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._written[slot])
        tensors = []
        for offset, header in parts:
            tensor = torch.empty(header.shape, dtype=DTYPES[header.dtype], device=self._device)
            if tensor.nbytes:
                source = self._pool + offset
                self._context.copy(tensor.data_ptr(), source, tensor.nbytes, stream.cuda_stream)
            tensors.append(tensor)
        self._read[slot].record(stream)
        return tensors

    def close(self) -> None:
        self._part()

    def _part(self) -> None:
        """From a sender's memory, once what was copied out of it is there."""
        if self._pool is not None:
            torch.cuda.synchronize(self._device)
            self._context.shut(self._pool)
            self._pool = None


def open_cuda_sender(description: CudaIpcDescription) -> CudaIpcSender:
    device = _device(description.sender_device)
    lane = CudaSendLane(device, description.device_bytes, description.ring.max_chunks)
    return CudaIpcSender(description, lane)


def open_cuda_receiver(description: CudaIpcDescription) -> CudaIpcReceiver:
    lane = CudaReceiveLane(_device(description.receiver_device), description.ring.max_chunks)
    return CudaIpcReceiver(description, lane)


def _device(name: str) -> torch.device:
    """With its index, as tensors have it."""
    device = torch.device(name)
    return torch.device(device.type, device.index or 0)
