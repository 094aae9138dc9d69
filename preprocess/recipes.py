"""What a worker is to make of an item's encoded bytes: plain data, and the part of its identity that is not
content."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from contracts.errors import MediaError
from contracts.media import MediaSource
from contracts.specs import AudioSpec, ImageSpec, MediaSpecs
from preprocess.resize import PixelBudget, pixel_budget


class ImageRecipe(msgspec.Struct, frozen=True, tag="image"):
    spec: ImageSpec
    budget: PixelBudget

    def key(self) -> str:
        """Everything that changes the features, for the bytes_digest."""
        return f"{self.spec.key()};{self.budget.key()}"


class AudioRecipe(msgspec.Struct, frozen=True, tag="audio"):
    spec: AudioSpec

    def key(self) -> str:
        return f"audio;{self.spec.key()}"


Recipe: TypeAlias = ImageRecipe | AudioRecipe


def make_recipe(source: MediaSource, specs: MediaSpecs, auto_max_pixels: int | None) -> Recipe:
    """`auto_max_pixels`: what a load policy leaves to an image's `detail: auto`. Raises BadRequest kinds."""
    if source.modality == "image" and specs.image is not None:
        return ImageRecipe(specs.image, pixel_budget(specs.image, source.options, auto_max_pixels))
    if source.modality == "audio" and specs.audio is not None:
        return AudioRecipe(specs.audio)
    raise MediaError(f"{source.modality} input is not supported", param=source.param)
