"""The resizing rule equals transformers' on every rounding edge; overrides are honoured or refused."""

from __future__ import annotations

import io
import itertools
import warnings

import msgspec
import numpy as np
import pytest
from PIL import Image

from contracts.errors import BadRequest, MediaError
from contracts.media import MediaOptions
from contracts.specs import ImageSpec
from preprocess.images import decode_image, open_image
from preprocess.patches import patchify
from preprocess.resize import LOW_DETAIL_TOKENS, pixel_budget, resized_shape
from tests.preprocess.samples import QWEN2, QWEN3, TINY, encode, noise, picture

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


def reference(spec: ImageSpec) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=spec.patch_size,
        merge_size=spec.merge_size,
        temporal_patch_size=spec.temporal_patch_size,
        size={"shortest_edge": spec.min_pixels, "longest_edge": spec.max_pixels},
        image_mean=list(spec.image_mean),
        image_std=list(spec.image_std),
    )


def decode(data: bytes, spec: ImageSpec, options: MediaOptions | None = None) -> np.ndarray:
    opened = open_image(data, 100_000_000)
    shape = resized_shape(*opened.size, spec, pixel_budget(spec, options or MediaOptions()))
    return decode_image(opened, shape, spec)


def edges(spec: ImageSpec) -> list[int]:
    patch, factor = spec.patch_size, spec.factor
    return sorted({max(1, n * patch + d) for n in (1, 2, 3, 5) for d in (-1, 0, 1)} | {1, factor * 5 // 2})


@pytest.mark.parametrize("spec", [QWEN2, QWEN3, TINY], ids=["qwen2", "qwen3", "tiny"])
def test_token_counts_equal_the_reference_over_a_sweep(spec: ImageSpec) -> None:
    processor = reference(spec)
    side = int(spec.max_pixels**0.5)
    boundary = [side - 1, side, side + 1, side + spec.factor, int(spec.min_pixels**0.5), 2 * side]
    budget = pixel_budget(spec, MediaOptions())
    for width, height in itertools.product(edges(spec) + boundary, repeat=2):
        if max(width, height) > 200 * min(width, height):
            continue
        shape = resized_shape(width, height, spec, budget)
        patches = processor.get_number_of_image_patches(height, width)
        assert shape.num_tokens * spec.merge_size**2 == patches, (width, height)
        assert shape.grid_thw[1] * shape.grid_thw[2] == patches
        assert shape.height == shape.grid_thw[1] * spec.patch_size
        assert shape.width == shape.grid_thw[2] * spec.patch_size


SIZES = [(1, 1), (100, 1), (1, 100), (3, 3), (27, 26), (28, 28), (29, 43), (257, 27), (500, 19), (15, 53)]
SIZES += [(500, 1000), (1000, 500), (42, 70), (70, 42), (98, 99), (640, 480)]


@pytest.mark.parametrize("spec", [QWEN2, QWEN3, TINY], ids=["qwen2", "qwen3", "tiny"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_patches_equal_the_reference(spec: ImageSpec, size: tuple[int, int]) -> None:
    data = encode(noise(*size))
    expected = reference(spec)(Image.open(io.BytesIO(data)), return_tensors="np")
    pixels = decode(data, spec)
    patches = patchify(pixels, spec)
    grid = [1, pixels.shape[0] // spec.patch_size, pixels.shape[1] // spec.patch_size]
    assert expected["image_grid_thw"].tolist() == [grid]
    assert patches.shape == expected["pixel_values"].shape
    np.testing.assert_allclose(patches, expected["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_decoding_equals_the_reference_for_every_format(format_name: str, mode: str) -> None:
    data = encode(picture(150, 97).convert(mode), format_name)
    expected = reference(QWEN2)(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(patchify(decode(data, QWEN2), QWEN2), expected, rtol=0, atol=1e-6)


def test_alpha_is_composited_as_in_the_reference() -> None:
    data = encode(noise(90, 60, channels=4))
    expected = reference(QWEN2)(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(patchify(decode(data, QWEN2), QWEN2), expected, rtol=0, atol=1e-6)


def test_per_request_limits_equal_the_reference_with_that_size() -> None:
    data = encode(picture(1362, 1724), "JPEG")
    for minimum, maximum in ((None, 3136), (3136, 200_000), (900_000, None)):
        options = MediaOptions(min_pixels=minimum, max_pixels=maximum)
        spec = msgspec.structs.replace(
            QWEN2,
            min_pixels=minimum or min(QWEN2.min_pixels, maximum or QWEN2.max_pixels),
            max_pixels=maximum or QWEN2.max_pixels,
        )
        expected = reference(spec)(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"]
        actual = patchify(decode(data, QWEN2, options), QWEN2)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    assert decode(data, QWEN2, MediaOptions(max_pixels=3136)).size <= 3 * 3136


def test_portrait_and_landscape_keep_their_grid_order() -> None:
    budget = pixel_budget(QWEN2, MediaOptions())
    portrait, landscape = (resized_shape(*size, QWEN2, budget) for size in ((500, 1000), (1000, 500)))
    assert portrait.grid_thw == (1, landscape.grid_thw[2], landscape.grid_thw[1])
    assert portrait.grid_thw[1] > portrait.grid_thw[2]
    assert portrait.num_tokens == landscape.num_tokens


def test_aspect_ratio_of_exactly_200_passes_and_more_does_not() -> None:
    budget = pixel_budget(QWEN2, MediaOptions())
    resized_shape(1000, 5, QWEN2, budget)
    resized_shape(5, 1000, QWEN2, budget)
    for size in ((1093, 5), (5, 1093), (1001, 5)):
        with pytest.raises(MediaError, match="aspect ratio") as caught:
            resized_shape(*size, QWEN2, budget)
        assert caught.value.status == 400


def test_detail_levels_and_the_load_policy() -> None:
    low = pixel_budget(QWEN2, MediaOptions(detail="low"))
    assert low.max_pixels == LOW_DETAIL_TOKENS * 28 * 28
    assert resized_shape(4000, 3000, QWEN2, low).num_tokens <= LOW_DETAIL_TOKENS
    full = (QWEN2.min_pixels, QWEN2.max_pixels)
    assert pixel_budget(QWEN2, MediaOptions()) == full
    assert pixel_budget(QWEN2, MediaOptions(), 500_000).max_pixels == 500_000
    assert pixel_budget(QWEN2, MediaOptions(), 1).max_pixels == 28 * 28
    assert pixel_budget(QWEN2, MediaOptions(detail="high"), 500_000) == full
    assert pixel_budget(QWEN2, MediaOptions(max_pixels=900_000), 500_000).max_pixels == 900_000


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (MediaOptions(max_pixels=783), "max_pixels"),
        (MediaOptions(max_pixels=0), "max_pixels"),
        (MediaOptions(max_pixels=-5), "max_pixels"),
        (MediaOptions(max_pixels=QWEN2.max_pixels + 1), "max_pixels"),
        (MediaOptions(min_pixels=783), "min_pixels"),
        (MediaOptions(min_pixels=QWEN2.max_pixels + 1), "min_pixels"),
        (MediaOptions(min_pixels=5000, max_pixels=4000), "min_pixels"),
        (MediaOptions(min_pixels=900_000, detail="low"), "min_pixels"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: MediaOptions, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        pixel_budget(QWEN2, options)
    assert caught.value.param == param
    assert caught.value.status == 400
