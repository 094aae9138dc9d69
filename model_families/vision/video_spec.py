"""The video half of a checkpoint's preprocessing → VideoSpec, with transformers' defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from contracts.specs import ImageSpec, VideoSpec
from model_families.checkpoint import read_processor_config

FILE = "video_preprocessor_config.json"

Rule = Literal["qwen2_vl", "qwen3_vl"]


class _Bounds(msgspec.Struct, frozen=True):
    shortest_edge: int | None = None
    longest_edge: int | None = None


class _VideoConfig(msgspec.Struct, frozen=True, kw_only=True):
    size: _Bounds = _Bounds()
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int | None = None
    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[float, float, float] | None = None

    @property
    def bounds(self) -> tuple[int, int] | None:
        low = self.min_pixels or self.size.shortest_edge
        high = self.max_pixels or self.size.longest_edge
        return (low, high) if low and high else None


def read_video_spec(folder: Path, image: ImageSpec, rule: Rule, *, own_bounds: bool = False) -> VideoSpec:
    """What the video file leaves unsaid is as for images. `own_bounds`: but for the pixels, which then are
    the
    reference's constants: 128 to 768 tokens a frame."""
    config = read_processor_config(folder, FILE, "video_processor", _VideoConfig) or _VideoConfig()
    low, high = image.min_pixels, image.max_pixels
    if own_bounds:
        low, high = 128 * image.factor**2, 768 * image.factor**2
    low, high = config.bounds or (low, high)
    defaults = VideoSpec(
        rule=rule,
        patch_size=image.patch_size,
        merge_size=image.merge_size,
        temporal_patch_size=image.temporal_patch_size,
        min_pixels=low,
        max_pixels=high,
        max_aspect_ratio=image.max_aspect_ratio,
        resample=image.resample,
        image_mean=config.image_mean or image.image_mean,
        image_std=config.image_std or image.image_std,
        frame_cap_tokens=config.max_video_tokens if config.cap_pixels_per_frame else None,
    )
    return msgspec.structs.replace(
        defaults,
        fps=config.fps or defaults.fps,
        min_frames=config.min_frames or defaults.min_frames,
        max_frames=config.max_frames or defaults.max_frames,
    )
