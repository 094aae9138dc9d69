"""The resize in C gives Pillow's bytes, whatever the sizes, filters and order of the passes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image

from contracts.compilation import BuildError
from preprocess import resampling
from preprocess.native import RESAMPLE
from preprocess.resampling import (
    PILLOW_FILTERS,
    NativeResize,
    agrees_with_pillow,
    choose_resize,
    compile_resize,
    resize_by_pillow,
)
from tests.preprocess.samples import noise

MACHINE_FLAGS = {"this machine's": ("-march=native",), "plain": ("-O1",)}
SHAPES = [
    ((64, 64), (75, 77)),
    ((90, 120), (45, 40)),
    ((41, 230), (40, 31)),  # loses much height: columns first, since Pillow 13
    ((230, 41), (31, 40)),
    ((50, 64), (50, 20)),  # one axis stays
    ((64, 50), (20, 50)),
    ((1, 1), (9, 5)),
    ((5, 3), (1, 1)),
    ((400, 7), (3, 90)),
    ((33, 32), (32, 33)),
]


@pytest.fixture(scope="module", params=MACHINE_FLAGS)
def native(request, tmp_path_factory) -> NativeResize:
    path = RESAMPLE.build(tmp_path_factory.mktemp("resample"), MACHINE_FLAGS[request.param])
    for columns_first_when_tall in (True, False):
        resize = NativeResize(path, columns_first_when_tall)
        if agrees_with_pillow(resize):
            return resize
    raise AssertionError("no order of the passes is Pillow's")


@pytest.mark.parametrize("resample", PILLOW_FILTERS)
@pytest.mark.parametrize(("before", "after"), SHAPES, ids=str)
def test_every_byte_is_pillows(native, resample, before, after):
    rng = np.random.default_rng(len(resample))
    smooth = rng.integers(0, 256, (before[1], before[0], 3), dtype=np.uint8)
    hard = (smooth > 127).astype(np.uint8) * 255  # overshoots are clipped in both passes
    for pixels in (smooth, hard, smooth[:, :, 0], hard[:, :, 1]):
        image = Image.fromarray(pixels)
        expected = resize_by_pillow(image, after, resample)
        np.testing.assert_array_equal(native(image, after, resample), expected)
        np.testing.assert_array_equal(native(pixels, after, resample), expected)  # also when not contiguous


def test_random_sizes(native):
    rng = random.Random(11)
    for _ in range(60):
        before = (rng.randint(1, 150), rng.randint(1, 150))
        after = (rng.randint(1, 150), rng.randint(1, 150))
        resample = rng.choice(list(PILLOW_FILTERS))
        pixels = noise(*before)
        expected = resize_by_pillow(pixels, after, resample)
        np.testing.assert_array_equal(
            native(pixels, after, resample), expected, f"{before} {after} {resample}"
        )


def test_auto_takes_the_compiled_code_and_pillow_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(resampling, "cache_directory", lambda: tmp_path)
    assert choose_resize("auto") is resize_by_pillow  # nothing is compiled yet
    compile_resize()
    assert isinstance(choose_resize("auto"), NativeResize)
    assert choose_resize("pillow") is resize_by_pillow


def test_code_that_disagrees_with_this_pillow_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(resampling, "cache_directory", lambda: tmp_path)
    compile_resize()
    monkeypatch.setitem(PILLOW_FILTERS, "bicubic", Image.Resampling.BOX)
    assert choose_resize("auto") is resize_by_pillow


def test_without_a_compiler_or_with_another_machines_file_pillow_resizes(tmp_path, monkeypatch):
    monkeypatch.setattr(resampling, "cache_directory", lambda: tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="gcc is not installed"):
        compile_resize()
    RESAMPLE.path(tmp_path).write_bytes(b"not a library")
    assert choose_resize("auto") is resize_by_pillow
