"""Small host arrays to the device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """On CUDA through pinned memory, which the allocator reuses only once the copy is done."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, the host not waiting for the copy."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    return tensor.pin_memory().to(device, non_blocking=True)
