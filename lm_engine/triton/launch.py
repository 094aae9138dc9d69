"""How kernels are launched here: the interpreter, programmatic dependent launch, block sizes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, Protocol

import torch
import triton
from torch import Tensor

from contracts.triton_cache import keep_launchers
from lm_engine.gpu_target import is_gpu, target_of

keep_launchers()
Precision = Literal["tf32", "ieee"]
_GLUON_VERSION = (3, 6)  # of Triton: the first whose warps specialise as kernels here have them


class Descriptor(Protocol):
    """Of a tensor for the copy engine, Triton's or Gluon's."""

    base: Tensor
    block_shape: list[int]


Value = Tensor | Descriptor | int | float | bool | str | None


class _Parameter(Protocol):
    @property
    def do_not_specialize(self) -> bool: ...


class Kernel(Protocol):
    """A Triton function."""

    fn: FunctionType
    params: Sequence[_Parameter]

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


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Value, ...]
    options: dict[str, Value]

    def compile(self) -> Any:
        """Into Triton's cache, for its active driver's GPU; Triton's compiled kernel. Nothing is launched."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


class _Recording:
    def __init__(self) -> None:
        self.launches: dict[object, Launch] | None = None


_recording = _Recording()


@contextmanager
def recording() -> Iterator[dict[object, Launch]]:
    """Within it nothing is launched, by any thread: the first launch of each variant is kept."""
    assert _recording.launches is None
    launches = _recording.launches = {}
    try:
        yield launches
    finally:
        _recording.launches = None


def launch(kernel: Kernel, grid: tuple[int, ...], *args: Value, **options: Value) -> None:
    """Launches on the current stream, compiling first what is new."""
    if _recording.launches is not None:
        _recording.launches.setdefault(_variant(kernel, args, options), Launch(kernel, grid, args, options))
        return
    if _compiling.num_threads and not interpreted():
        with _compiling.alone_with(_variant(kernel, args, options)):
            kernel.warmup(*args, grid=grid, **options)
    with _compiling.launching:
        kernel[grid](*args, **options)


def _variant(kernel: Kernel, args: tuple[Value, ...], options: dict[str, Value]) -> object:
    """What Triton compiles once: never finer than that, or two threads would compile the same."""
    kinds = (
        type(arg) if parameter.do_not_specialize else _kind(arg)
        for arg, parameter in zip(args, kernel.params, strict=False)  # the others are options
    )
    return id(kernel), *kinds, *options.items()


def _kind(value: Value) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    if value is None or isinstance(value, float | str):
        return type(value)
    return value.base.dtype, *value.block_shape


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before its import), on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def uses_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch needs Hopper or newer."""
    return not interpreted() and target_of(device).capability >= (9, 0)


def has_gluon(device: torch.device) -> bool:
    """Whether kernels written in Gluon for Hopper run here."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    hopper = not interpreted() and is_gpu(device) and target_of(device).capability == (9, 0)
    return hopper and version >= _GLUON_VERSION


def num_multiprocessors(device: torch.device) -> int:
    """Of a tensor's that stands for a GPU's: any, for which no kernel is compiled anew."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_fp8(device: torch.device) -> bool:
    """Whether e4m3 is read and written here."""
    return interpreted() or (is_gpu(device) and target_of(device).capability >= (8, 9))


def launch_options(device: torch.device) -> dict[str, bool]:
    """To be given to every launch of a kernel that takes PDL, as keywords."""
    return {"PDL": True, "launch_pdl": True} if uses_pdl(device) else {"PDL": False}


def shared_memory_bytes(device: torch.device) -> int:
    """The most one program may have."""
    return target_of(device).shared_bytes


def dot_precision(dtype: torch.dtype) -> Precision:
    """float32 products are exact; of no matter for 16-bit operands."""
    return "ieee" if dtype is torch.float32 else "tf32"


def next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
