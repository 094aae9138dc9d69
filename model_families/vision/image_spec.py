"""preprocessor_config.json of a Qwen-VL checkpoint → ImageSpec, with transformers' defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from contracts.specs import ImageSpec
from model_families.checkpoint import checkpoint_error, read_processor_config
from model_families.vision.config import VisionConfig

FILE = "preprocessor_config.json"
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 1280

# PIL's numbers of the filters.
_RESAMPLE: dict[int, Literal["bicubic", "bilinear", "lanczos"]] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


class _PixelBounds(msgspec.Struct, frozen=True):
    """Both spellings occur; either way they are areas in pixels."""

    shortest_edge: int | None = None
    longest_edge: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


class _PreprocessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    size: _PixelBounds = _PixelBounds()
    min_pixels: int | None = None
    max_pixels: int | None = None
    patch_size: int | None = None
    merge_size: int | None = None
    temporal_patch_size: int | None = None
    resample: int = 3
    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[float, float, float] | None = None
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255


def read_image_spec(folder: Path, vision: VisionConfig) -> ImageSpec:
    """Raises EngineError when the file contradicts the tower or asks for what is not supported."""
    config = (
        read_processor_config(folder, FILE, "image_processor", _PreprocessorConfig) or _PreprocessorConfig()
    )
    sizes = (config.patch_size, config.merge_size, config.temporal_patch_size)
    tower = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if any(theirs not in (None, ours) for theirs, ours in zip(sizes, tower, strict=True)):
        raise checkpoint_error(f"{FILE} has patch, merge and temporal sizes {sizes}, config.json {tower}")
    if not (config.do_resize and config.do_rescale and config.do_normalize):
        raise checkpoint_error(f"{FILE} turns off resizing, rescaling or normalisation: not supported")
    if abs(config.rescale_factor * 255 - 1) > 1e-6 or config.resample not in _RESAMPLE:
        raise checkpoint_error(f"{FILE} has an unsupported rescale_factor or resample")
    defaults = ImageSpec(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=_first(config.min_pixels, config.size.shortest_edge, config.size.min_pixels, MIN_PIXELS),
        max_pixels=_first(config.max_pixels, config.size.longest_edge, config.size.max_pixels, MAX_PIXELS),
        resample=_RESAMPLE[config.resample],
    )
    return msgspec.structs.replace(
        defaults,
        image_mean=config.image_mean or defaults.image_mean,
        image_std=config.image_std or defaults.image_std,
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
