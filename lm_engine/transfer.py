"""Small host arrays to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from contracts.capture import synchronize


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """On CUDA through pinned memory, which the allocator reuses only once the copy is done."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, the host not waiting for the copy. One of the device was made on its default
    stream, by another stage."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        if tensor.device.type == "cuda":
            current = torch.cuda.current_stream(tensor.device)
            current.wait_stream(torch.cuda.default_stream(tensor.device))
            tensor.record_stream(current)
        return tensor.to(device, non_blocking=True)
    return tensor.pin_memory().to(device, non_blocking=True)


def stream_entry(device: torch.device, priority: int = -1) -> Callable[[], None]:
    """What a thread calls first to have a stream of its own on a GPU, of high priority (-1) or none (0):
    other streams' kernels run beside its kernels. Weights and tables made until now are complete."""
    if device.type != "cuda":
        return lambda: None
    synchronize(device)
    stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return lambda: torch.cuda.set_stream(stream)
