"""The lanes of a CUDA IPC edge on real GPUs: a pool of the driver's, torch's streams and events."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from connectors.cuda_driver import DeviceContext
from connectors.cuda_ipc import CudaIpcDescription, CudaIpcReceiver, CudaIpcSender
from connectors.wire import DTYPES
from contracts.chunks import TensorHeader


class CopyEvent:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def is_complete(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._done.synchronize()


class CudaSendLane:
    """The pool is the driver's and not torch's: a handle opens a whole allocation, and torch cuts its own
    into
    tensors, or maps them piece by piece (expandable segments), which has no handle."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._context = DeviceContext(device.index)
        self._pool = self._context.allocate(nbytes)

    def carries(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def export(self) -> bytes:
        return self._context.handle_of(self._pool)

    def write(self, parts: Sequence[tuple[int, Tensor]]) -> CopyEvent:
        stream = torch.cuda.current_stream(self._device)
        for offset, tensor in parts:
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            if plain.nbytes:
                target = self._pool + offset
                self._context.copy(target, plain.data_ptr(), plain.nbytes, stream.cuda_stream)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # whoever waits sleeps
        done.record(stream)
        return CopyEvent(done)

    def close(self, *, is_read: bool) -> None:
        if not is_read:  # else the memory goes with this process, as the receiver's mapping does with it
            self._context.free(self._pool)


class CudaReceiveLane:
    """Copies on a stream of its own, so that a copy waits for no step of the stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._context = DeviceContext(device.index)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: int | None = None

    def meet(self, export: bytes) -> None:
        self.close()
        self._pool = self._context.open(export)

    def read(self, parts: Sequence[tuple[int, TensorHeader]]) -> list[Tensor]:
        assert self._pool is not None
        reader = torch.cuda.current_stream(self._device)
        tensors = []
        with torch.cuda.stream(self._stream):  # what is allocated here was last used here
            for offset, header in parts:
                tensor = torch.empty(header.shape, dtype=DTYPES[header.dtype], device=self._device)
                tensor.record_stream(reader)
                if tensor.nbytes:
                    source = self._pool + offset
                    self._context.copy(tensor.data_ptr(), source, tensor.nbytes, self._stream.cuda_stream)
                tensors.append(tensor)
        self._stream.synchronize()
        return tensors

    def close(self) -> None:
        """No copy is under way: `read` has waited for each."""
        if self._pool is not None:
            self._context.shut(self._pool)
            self._pool = None


def open_cuda_sender(description: CudaIpcDescription) -> CudaIpcSender:
    device = _device(description.sender_device)
    lane = CudaSendLane(device, description.device_bytes)
    return CudaIpcSender(description, lane)


def open_cuda_receiver(description: CudaIpcDescription) -> CudaIpcReceiver:
    return CudaIpcReceiver(description, CudaReceiveLane(_device(description.receiver_device)))


def _device(name: str) -> torch.device:
    """With its index, as tensors have it."""
    device = torch.device(name)
    return torch.device(device.type, device.index or 0)
