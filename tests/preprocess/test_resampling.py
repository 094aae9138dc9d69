"""The resize in C gives Pillow's bytes, whatever the sizes, filters and order of the passes."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from PIL import Image

from contracts.compilation import BuildError
from preprocess import resampling
from preprocess.native import RESAMPLE
from preprocess.pillow_memory import CAN_EXPORT, pixels_of
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
        for image in (pixels, Image.fromarray(pixels)):
            np.testing.assert_array_equal(
                native(image, after, resample), expected, f"{before} {after} {resample}"
            )


@pytest.mark.skipif(not CAN_EXPORT, reason="this Pillow does not tell where its pixels are")
def test_pixels_are_read_where_pillow_has_them(native, monkeypatch):
    pixels = noise(70, 50)
    image = Image.fromarray(pixels)
    found = pixels_of(image)
    seen = np.ctypeslib.as_array((ctypes.c_uint8 * (50 * 70 * 4)).from_address(found.address))
    np.testing.assert_array_equal(seen.reshape(50, 70, 4)[:, :, :3], pixels)
    assert pixels_of(image.convert("L")) is None
    expected = resize_by_pillow(image, (33, 44), "bicubic")
    monkeypatch.setattr(Image.Image, "__array_interface__", property(lambda image: pytest.fail("copied")))
    np.testing.assert_array_equal(native(image, (33, 44), "bicubic"), expected)


def test_a_picture_in_several_pieces_is_copied_out_of_pillow(native):
    before = Image.core.get_block_size()
    Image.core.set_block_size(1 << 12)
    try:
        image = Image.fromarray(noise(200, 100))
    finally:
        Image.core.set_block_size(before)
    assert pixels_of(image) is None
    expected = resize_by_pillow(image, (120, 130), "bicubic")
    np.testing.assert_array_equal(native(image, (120, 130), "bicubic"), expected)


@pytest.mark.parametrize("resample", PILLOW_FILTERS)
def test_bands_of_rows_side_by_side_give_the_same_bytes(tmp_path, monkeypatch, resample):
    monkeypatch.setattr(resampling, "BAND_ROWS", 5)
    path = RESAMPLE.build(tmp_path)
    alone, together = NativeResize(path), NativeResize(path, threads=3)
    rng = random.Random(len(resample))
    sizes = [
        ((rng.randint(1, 90), rng.randint(1, 90)), (rng.randint(1, 90), rng.randint(1, 90)))
        for _ in range(40)
    ]
    for before, after in SHAPES + sizes:
        pixels = noise(*before)
        for image in (pixels, pixels[:, :, 0]):
            expected = alone(image, after, resample)
            np.testing.assert_array_equal(together(image, after, resample), expected, f"{before} {after}")


def test_small_pictures_are_resized_by_one_thread(tmp_path):
    resize = NativeResize(RESAMPLE.build(tmp_path), threads=4)
    bands: list[tuple[int, int]] = []

    def make(band: tuple[int, int]) -> int:
        bands.append(band)
        return 0

    for num_rows in (1, 255, 256, 1036):
        resize._make_bands(make, num_rows)
    assert bands[:2] == [(0, 1), (0, 255)]
    assert sorted(bands[2:4]) == [(0, 128), (128, 256)]
    assert sorted(bands[4:]) == [(0, 259), (259, 518), (518, 777), (777, 1036)]


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
