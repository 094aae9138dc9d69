"""Resizes pictures: by Pillow, or in C with Pillow's own fixed-point arithmetic, equal to the last bit.

Shapes: H rows, W columns, C channels (3, or none for grey), N outputs of an axis, T taps.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from contracts.compilation import BuildError, cache_directory
from contracts.specs import Resample
from preprocess.native import RESAMPLE
from preprocess.pillow_memory import PIXEL_BYTES, pixels_of

UInt8: TypeAlias = npt.NDArray[np.uint8]
Float64: TypeAlias = npt.NDArray[np.float64]
ResizeChoice = Literal["auto", "pillow"]


class Resize(Protocol):
    def __call__(
        self,
        image: Image.Image | UInt8,
        size: tuple[int, int],
        resample: Resample,
        out: UInt8 | None = None,
    ) -> UInt8:
        """Image of mode RGB or L → [H, W, C] of `size` (width, height), in `out` if that is given."""
        ...


PILLOW_FILTERS: dict[Resample, Image.Resampling] = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}
BAND_ROWS = 128  # of the result at least, for a thread of its own to be worth its wake
PRECISION_BITS = 22  # of a weight; bytes and signs take the other ten


def resize_by_pillow(
    image: Image.Image | UInt8, size: tuple[int, int], resample: Resample, out: UInt8 | None = None
) -> UInt8:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    resized = np.asarray(image.resize(size, PILLOW_FILTERS[resample]))
    if out is None:
        return resized
    out[...] = resized
    return out


def compile_resize() -> None:
    """Raises BuildError where it cannot be done."""
    RESAMPLE.build(cache_directory())


def choose_resize(choice: ResizeChoice, threads: int = 1) -> Resize:
    """The C code where "auto" is asked, it has been compiled (nothing is here) and it agrees with this
    Pillow."""
    path = RESAMPLE.path(cache_directory())
    if choice == "pillow" or not path.exists():
        return resize_by_pillow
    for columns_first_when_tall in (True, False):
        try:
            resize = NativeResize(path, columns_first_when_tall, threads)
        except BuildError:  # of another C library: the folder is shared between machines
            break
        if agrees_with_pillow(resize):
            return resize
    return resize_by_pillow


def agrees_with_pillow(resize: Resize) -> bool:
    """On a few small pictures, in either order of the passes and with every filter."""
    noise = np.random.default_rng(0).integers(0, 256, (61, 47, 3), dtype=np.uint8)
    return all(
        np.array_equal(resize(image, size, resample), resize_by_pillow(noise, size, resample))
        for size in ((52, 67), (20, 34), (44, 20))
        for resample in PILLOW_FILTERS
        for image in (noise, Image.fromarray(noise))
    )


class _Image(ctypes.Structure):
    _fields_ = (
        ("pixels", c_void_p),
        ("height", c_int64),
        ("width", c_int64),
        ("channels", c_int64),
        ("pixel_bytes", c_int64),
    )


class _Axis(ctypes.Structure):
    _fields_ = (
        ("first", c_void_p),
        ("count", c_void_p),
        ("weights", c_void_p),
        ("size", c_int64),
        ("taps", c_int64),
    )

    def rows(self, first: int, last: int) -> _Axis:
        """Its outputs [first, last). Valid as long as this one."""
        skip = 4 * first  # of 32-bit numbers
        weights = self.weights + skip * self.taps
        return _Axis(self.first + skip, self.count + skip, weights, last - first, self.taps)


def _source_of(image: Image.Image | UInt8, in_place: bool) -> tuple[_Image, tuple[int, ...], object]:
    """With the shape of a pixel, and who owns the memory. `in_place`: where Pillow has it, if that can be."""
    if in_place and isinstance(image, Image.Image) and (found := pixels_of(image)) is not None:
        return _Image(found.address, image.height, image.width, 3, PIXEL_BYTES), (3,), found
    pixels = np.ascontiguousarray(np.asarray(image))
    assert pixels.dtype == np.uint8
    height, width, *channels = pixels.shape
    assert channels in ([], [1], [3])
    num_channels = math.prod(channels)
    return (
        _Image(pixels.ctypes.data, height, width, num_channels, num_channels),
        tuple(channels),
        pixels,
    )


def _rows_of(image: _Image, first: int, last: int) -> _Image:
    skip = first * image.width * image.channels
    return _Image(image.pixels + skip, last - first, image.width, image.channels, image.pixel_bytes)


def resize_threads() -> int:
    """Of a worker that may have the machine for itself: a picture alone waits for little else."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


class NativeResize:
    """A `Resize`. Raises BuildError for a file that is no library this machine can load.

    The order of the passes shows in the last bit: rows first, but for what Pillow 13 calls tall, a height
    that
    loses more than twice as many pixels as the width.
    """

    def __init__(self, path: Path, columns_first_when_tall: bool = True, threads: int = 1) -> None:
        self._threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "resize") if threads > 1 else None
        self._columns_first_when_tall = columns_first_when_tall
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"the resize could not be loaded: {error}") from error
        self._resample = library.resample
        self._resample.restype = ctypes.c_int32
        self._resample.argtypes = [c_void_p, c_void_p, c_void_p, ctypes.c_int32, c_void_p]

    def __call__(
        self,
        image: Image.Image | UInt8,
        size: tuple[int, int],
        resample: Resample,
        out: UInt8 | None = None,
    ) -> UInt8:
        width, height = image.size if isinstance(image, Image.Image) else image.shape[1::-1]
        across, down = (
            _Axis() if before == after else make_weights(before, after, resample).descriptor
            for before, after in zip((width, height), size, strict=True)
        )
        lost = height - size[1]
        columns_first = self._columns_first_when_tall and lost > 0 and lost > 2 * (width - size[0])
        in_place = bool(across.taps and down.taps) and not columns_first
        source, channels, owner = _source_of(image, in_place)
        result = np.empty((size[1], size[0], *channels), np.uint8) if out is None else out
        assert result.shape == (size[1], size[0], *channels)
        assert result.flags.c_contiguous
        assert result.dtype == np.uint8

        def make(band: tuple[int, int]) -> int:
            """Rows [first, last) of the result: the same source and weights, so the same bytes."""
            first, last = band
            rows = down.rows(first, last) if down.taps else down
            part = source if down.taps else _rows_of(source, first, last)
            addresses = map(ctypes.addressof, (part, across, rows))
            failed: int = self._resample(*addresses, columns_first, result[first:last].ctypes.data)
            return failed

        if any(self._make_bands(make, size[1])):
            raise MemoryError
        del owner  # until here
        return result

    def _make_bands(self, make: Callable[[tuple[int, int]], int], num_rows: int) -> list[int]:
        """Bands of rows side by side; the C code holds no interpreter lock."""
        num_bands = max(1, min(self._threads, num_rows // BAND_ROWS))
        ends = [num_rows * index // num_bands for index in range(num_bands + 1)]
        first, *others = itertools.pairwise(ends)
        if self._others is None or not others:
            return [make((0, num_rows))]
        waiting = [self._others.submit(make, band) for band in others]
        return [make(first), *(future.result() for future in waiting)]


class Weights:
    """What every output of an axis sums: `count` inputs from `first` on, with `weights_NT`."""

    def __init__(
        self, first_N: npt.NDArray[np.int32], count_N: npt.NDArray[np.int32], weights_NT: Float64
    ) -> None:
        taps = -(-int(count_N.max()) // 4) * 4
        scaled_NT = weights_NT * (1 << PRECISION_BITS)
        rounded_NT = np.trunc(np.where(scaled_NT < 0, scaled_NT - 0.5, scaled_NT + 0.5)).astype(np.int32)
        self.first_N, self.count_N = first_N, count_N
        self.weights_NT = np.zeros((len(first_N), taps), np.int32)
        used = min(taps, weights_NT.shape[1])
        self.weights_NT[:, :used] = rounded_NT[:, :used]
        pointers = (array.ctypes.data for array in (self.first_N, self.count_N, self.weights_NT))
        self.descriptor = _Axis(*pointers, len(first_N), taps)


@functools.lru_cache(maxsize=256)
def make_weights(before: int, after: int, resample: Resample) -> Weights:
    """An output lies at its centre in the input; shrinking widens the filter by the same factor. Weights are
    those of the inputs' centres, made to add up to one in the order of the inputs."""
    kernel, radius = _KERNELS[resample]
    scale = before / after
    stretch = max(scale, 1.0)
    reach = radius * stretch
    centre_N = (np.arange(after) + 0.5) * scale
    first_N = np.maximum(np.trunc(centre_N - reach + 0.5), 0).astype(np.int32)
    count_N = np.minimum(np.trunc(centre_N + reach + 0.5), before).astype(np.int32) - first_N
    tap_T = np.arange(math.ceil(reach) * 2 + 1)
    weights_NT = kernel((tap_T + first_N[:, None] - centre_N[:, None] + 0.5) * (1.0 / stretch))
    weights_NT[tap_T >= count_N[:, None]] = 0.0
    total_N1 = np.add.accumulate(weights_NT, axis=1)[:, -1:]
    return Weights(first_N, count_N, weights_NT / np.where(total_N1 == 0, 1.0, total_N1))


def _triangle(x: Float64) -> Float64:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _keys_cubic(x: Float64) -> Float64:
    """Keys' cubic convolution with a = -1/2."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos3(x: Float64) -> Float64:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Float64) -> Float64:
    """By the C library's sine, as Pillow does: NumPy's own may differ in the last bit."""
    angle = x * math.pi
    sines = np.array([math.sin(value) for value in angle.flat]).reshape(x.shape)
    return np.where(x == 0.0, 1.0, sines / np.where(x == 0.0, 1.0, angle))


_KERNELS: dict[Resample, tuple[Callable[[Float64], Float64], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_keys_cubic, 2.0),
    "lanczos": (_lanczos3, 3.0),
}
