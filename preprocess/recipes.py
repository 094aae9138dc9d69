"""What a worker is to make of an item's encoded bytes: plain data, and the part of its identity that is not
content."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from contracts.errors import MediaError
from contracts.media import MediaSource
from contracts.specs import AudioSpec, ImageSpec, MediaLimits, MediaSpecs, VideoSpec
from preprocess.resize import PixelBudget, pixel_budget
from preprocess.sampling import FrameBudget, frame_budget


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


class VideoRecipe(msgspec.Struct, frozen=True, tag="video"):
    """`audio`: of the sound track, where it is to be an item too."""

    spec: VideoSpec
    frames: FrameBudget
    budget: PixelBudget
    audio: AudioSpec | None = None

    def key(self) -> str:
        sound = "" if self.audio is None else self.audio.key()
        return f"video;{self.spec.key()};{self.frames.key()};{self.budget.key()};{sound}"


Recipe: TypeAlias = ImageRecipe | AudioRecipe | VideoRecipe


def make_recipe(
    source: MediaSource, specs: MediaSpecs, limits: MediaLimits, auto_max_pixels: int | None
) -> Recipe:
    """`auto_max_pixels`: what a load policy leaves to an image's `detail: auto`. Raises BadRequest kinds."""
    if source.modality == "image" and specs.image is not None:
        return ImageRecipe(specs.image, pixel_budget(specs.image, source.options, auto_max_pixels))
    if source.modality == "audio" and specs.audio is not None:
        return AudioRecipe(specs.audio)
    if source.modality == "video" and specs.video is not None:
        options = source.options
        if options.with_audio and specs.audio is None:
            raise MediaError("audio input is not supported")
        return VideoRecipe(
            specs.video,
            frame_budget(specs.video, options, limits.max_video_frames),
            pixel_budget(specs.video, options),
            specs.audio if options.with_audio else None,
        )
    raise MediaError(f"{source.modality} input is not supported")
