"""How kernels are launched here: the interpreter, programmatic dependent launch, block sizes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, Protocol

import torch
import triton
from torch import Tensor

from contracts.triton_cache import keep_launchers

keep_launchers()
Precision = Literal["tf32", "ieee"]
Value = Tensor | int | float | bool | str | None


class Kernel(Protocol):
    """A Triton function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def warmup(self, *args: Value, grid: tuple[int, ...], **options: Value) -> object:
        """Compiles without launching."""
        ...


class _Compiling:
    """How many of this process's threads compile ahead, and what makes that safe: Triton compiles a variant
    in every thread that misses it, keeps the last one (newer versions unload the others, which may be
    running), and shows a kernel before its code is loaded."""

    def __init__(self) -> None:
        self.num_threads = 0
        self.launching = threading.Lock()
        self._guard = threading.Lock()
        self._variants: defaultdict[object, threading.Lock] = defaultdict(threading.Lock)

    def count(self, change: int) -> None:
        with self._guard:
            self.num_threads += change

    def alone_with(self, variant: object) -> threading.Lock:
        with self._guard:
            return self._variants[variant]


_compiling = _Compiling()


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """While any thread is in here, kernels are compiled by all threads at once and launched one by one."""
    _compiling.count(1)
    try:
        yield
    finally:
        _compiling.count(-1)


def launch(kernel: Kernel, grid: tuple[int, ...], *args: Value, **options: Value) -> None:
    """Launches on the current stream, compiling first what is new."""
    if _compiling.num_threads and not interpreted():
        with _compiling.alone_with((id(kernel), *map(_kind, args), *options.items())):
            kernel.warmup(*args, grid=grid, **options)
    with _compiling.launching:
        kernel[grid](*args, **options)


def _kind(value: Value) -> object:
    """What Triton compiles a variant for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before its import), on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


@cache
def uses_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch needs Hopper or newer."""
    return not interpreted() and torch.cuda.get_device_capability(device) >= (9, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether e4m3 is read and written here."""
    return interpreted() or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))


def launch_options(device: torch.device) -> dict[str, bool]:
    """To be given to every launch of a kernel that takes PDL, as keywords."""
    return {"PDL": True, "launch_pdl": True} if uses_pdl(device) else {"PDL": False}


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """The most one program may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def dot_precision(dtype: torch.dtype) -> Precision:
    """float32 products are exact; of no matter for 16-bit operands."""
    return "ieee" if dtype is torch.float32 else "tf32"


def next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
