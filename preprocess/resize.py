"""How large an image becomes: the pixel budget a request asks for, and the Qwen-VL resizing rule on it."""

from __future__ import annotations

import math
from typing import NamedTuple

from contracts.errors import BadRequest, MediaError
from contracts.media import MediaOptions
from contracts.specs import ImageSpec, VideoSpec

LOW_DETAIL_TOKENS = 256
"""`detail: low` caps an image at this many tokens (256 * factor² pixels)."""


class PixelBudget(NamedTuple):
    """Area bounds of the resized image, in pixels."""

    min_pixels: int
    max_pixels: int

    def key(self) -> str:
        return f"min={self.min_pixels};max={self.max_pixels}"


class ResizedShape(NamedTuple):
    """The one grid object: token count, array shape and encoder grid all come from here."""

    height: int
    width: int
    grid_thw: tuple[int, int, int]
    num_tokens: int

    @property
    def nbytes(self) -> int:
        return self.height * self.width * 3


def pixel_budget(
    spec: ImageSpec | VideoSpec, options: MediaOptions, auto_max_pixels: int | None = None
) -> PixelBudget:
    """Resolves a request's `detail`, `min_pixels` and `max_pixels` against the model's range.

    `detail` low caps the area at LOW_DETAIL_TOKENS; high is the model's full range; auto is the model's
    range too, lowered by `auto_max_pixels` (a load policy) unless the request set `max_pixels` itself.
    Explicit values must lie in [factor², spec.max_pixels] (one token up to the model's maximum); a
    `max_pixels` under the model's own minimum lowers that minimum, and the other way round.
    Raises BadRequest naming the field.
    """
    least = spec.factor**2
    for name, value in (("min_pixels", options.min_pixels), ("max_pixels", options.max_pixels)):
        if value is not None and not least <= value <= spec.max_pixels:
            raise BadRequest(
                f"{name} must be between {least} and {spec.max_pixels} for this model",
                param=name,
                code="invalid_value",
            )
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise BadRequest("min_pixels is larger than max_pixels", param="min_pixels", code="invalid_value")

    max_pixels = spec.max_pixels if options.max_pixels is None else options.max_pixels
    if options.detail == "low":
        max_pixels = min(max_pixels, LOW_DETAIL_TOKENS * least)
    elif options.detail == "auto" and options.max_pixels is None and auto_max_pixels is not None:
        max_pixels = min(max_pixels, max(least, auto_max_pixels))
    if options.min_pixels is None:
        return PixelBudget(min(spec.min_pixels, max_pixels), max_pixels)
    if options.min_pixels > max_pixels:
        raise BadRequest(
            f"min_pixels is above the {max_pixels} pixels of detail 'low'",
            param="min_pixels",
            code="invalid_value",
        )
    return PixelBudget(options.min_pixels, max_pixels)


def resized_shape(width: int, height: int, spec: ImageSpec, budget: PixelBudget) -> ResizedShape:
    """Both sides become multiples of `spec.factor`, the area lies within the budget, the aspect ratio is
    kept as closely as that allows; a side under the factor is enlarged. Rounding is Python's (half to even),
    as in the reference. Raises MediaError beyond `spec.max_aspect_ratio`.
    """
    assert min(width, height) > 0
    if max(width, height) > spec.max_aspect_ratio * min(width, height):
        raise MediaError(
            f"the image's aspect ratio ({width}x{height}) is above the limit of {spec.max_aspect_ratio:g}:1;"
            " crop or pad it"
        )
    return _shape(*fit_area(width, height, spec.factor, budget), spec)


def fit_area(width: int, height: int, factor: int, budget: PixelBudget) -> tuple[int, int]:
    """(height, width): multiples of `factor` whose product lies within the budget, as near to the given ones
    as that allows."""
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > budget.max_pixels:
        shrink = math.sqrt(height * width / budget.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < budget.min_pixels:
        grow = math.sqrt(budget.min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _shape(height: int, width: int, spec: ImageSpec) -> ResizedShape:
    assert min(width, height) >= spec.factor
    assert width % spec.factor == height % spec.factor == 0
    grid_h, grid_w = height // spec.patch_size, width // spec.patch_size
    return ResizedShape(height, width, (1, grid_h, grid_w), grid_h * grid_w // spec.merge_size**2)
