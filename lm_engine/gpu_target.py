"""What kernels are made for: a kind of GPU, this machine's or one assumed for tensors that hold no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GpuTarget:
    """`shared_bytes`: of shared memory that a program may have."""

    capability: tuple[int, int]
    shared_bytes: int


class _Assumed:
    def __init__(self) -> None:
        self.target: GpuTarget | None = None


_assumed = _Assumed()


@contextmanager
def assuming(target: GpuTarget) -> Iterator[None]:
    """Within it tensors on the device "meta" stand for such a GPU's, in all threads."""
    before, _assumed.target = _assumed.target, target
    try:
        yield
    finally:
        _assumed.target = before


def stands_for_gpu(device: torch.device) -> bool:
    """What is built there is built to see what it launches, so nothing need be there twice."""
    return device.type == "meta" and _assumed.target is not None


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" or stands_for_gpu(device)


def target_of(device: torch.device) -> GpuTarget:
    """Asks CUDA, unless the device stands for another."""
    if device.type == "meta" and _assumed.target is not None:
        return _assumed.target
    return _ask(device)


@cache
def _ask(device: torch.device) -> GpuTarget:
    import torch  # options name targets before torch loads

    found = torch.cuda.get_device_properties(device)
    return GpuTarget((found.major, found.minor), int(found.shared_memory_per_block_optin))  # type: ignore[attr-defined]
