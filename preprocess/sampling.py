"""Which frames of a video are sampled and how large they become: the mathematics of the Qwen-VL families.

Sampling works on a grid of equal steps, `total` frames at `fps`. A video of constant rate is its own grid;
one of variable rate is mapped onto it by the time stamps (see `preprocess.video`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contracts.errors import BadRequest, MediaError
from contracts.media import MediaOptions
from contracts.specs import VideoSpec
from preprocess.resize import PixelBudget, fit_area


class FrameBudget(NamedTuple):
    """How many frames a request may have, resolved against the model and the server."""

    fps: float | None
    num_frames: int | None
    max_frames: int

    def key(self) -> str:
        return f"fps={self.fps};num={self.num_frames};max={self.max_frames}"


def frame_budget(spec: VideoSpec, options: MediaOptions, max_video_frames: int) -> FrameBudget:
    """Raises BadRequest naming the field."""
    most = min(spec.max_frames, max_video_frames)
    if options.fps is not None and options.num_frames is not None:
        raise BadRequest(
            "num_frames excludes fps: give one of them", param="num_frames", code="invalid_value"
        )
    if options.num_frames is not None and not 1 <= options.num_frames <= most:
        raise BadRequest(
            f"num_frames must be between 1 and {most} for this model",
            param="num_frames",
            code="invalid_value",
        )
    if options.fps is not None and not 0 < options.fps < math.inf:
        raise BadRequest("fps must be above 0", param="fps", code="invalid_value")
    if options.max_frames is not None and options.max_frames < 1:
        raise BadRequest("max_frames must be at least 1", param="max_frames", code="invalid_value")
    max_frames = most if options.max_frames is None else min(most, options.max_frames)
    fps = spec.fps if options.fps is None and options.num_frames is None else options.fps
    num_frames = None if options.num_frames is None else min(options.num_frames, max_frames)
    return FrameBudget(fps, num_frames, max_frames)


def sample_positions(total: int, fps: float, spec: VideoSpec, budget: FrameBudget) -> npt.NDArray[np.float64]:
    """Where to look, in frames from the first: ascending in [0, total - 1], at least one. `total` frames are
    1 / fps seconds apart; see `whole_frames`."""
    assert total > 0
    assert fps > 0
    if spec.rule == "qwen3_vl":
        count = budget.num_frames
        if count is None:
            assert budget.fps is not None
            count = max(int(total / fps * budget.fps), spec.min_frames)
        return np.linspace(0, total - 1, max(1, min(count, budget.max_frames, total)))
    count = _whole_patches(total, fps, spec, budget)
    # Through float32, as the reference's sequence is.
    starts = (np.arange(count) * (total / count)).astype(np.float32).astype(np.float64)
    return np.minimum(starts, total - 1)


def whole_frames(positions: npt.NDArray[np.float64], spec: VideoSpec) -> list[int]:
    """The frames of a video of constant rate that the reference takes for `positions`."""
    rounded = positions.round() if spec.rule == "qwen3_vl" else np.floor(positions)
    numbers: list[int] = rounded.astype(int).tolist()
    return numbers


def _whole_patches(total: int, fps: float, spec: VideoSpec, budget: FrameBudget) -> int:
    """A multiple of the temporal patch, or all frames of a video shorter than one."""
    patch = spec.temporal_patch_size
    most = min(budget.max_frames, total) // patch * patch
    if budget.num_frames is not None:
        wanted = round(budget.num_frames / patch) * patch
    else:
        assert budget.fps is not None
        wanted = math.floor(min(max(total / fps * budget.fps, spec.min_frames), total) / patch) * patch
    return max(min(wanted, most), min(patch, total, budget.max_frames))


def frame_size(
    num_frames: int, width: int, height: int, spec: VideoSpec, budget: PixelBudget
) -> tuple[int, int]:
    """(height, width) of the sampled frames, multiples of `spec.factor`. Raises MediaError beyond
    `spec.max_aspect_ratio`."""
    assert num_frames > 0
    if max(width, height) > spec.max_aspect_ratio * min(width, height):
        raise MediaError(
            f"the video's aspect ratio ({width}x{height}) is above the limit of {spec.max_aspect_ratio:g}:1"
        )
    if spec.rule == "qwen3_vl":
        return _fit_volume(max(num_frames, spec.temporal_patch_size), width, height, spec, budget)
    max_pixels = budget.max_pixels
    if spec.frame_cap_tokens is not None:
        total_pixels = int(spec.frame_cap_tokens * spec.factor**2 * 0.9)
        share = total_pixels * spec.temporal_patch_size // num_frames
        max_pixels = max(min(max_pixels, share), int(budget.min_pixels * 1.05))
    return fit_area(width, height, spec.factor, PixelBudget(budget.min_pixels, max_pixels))


def _fit_volume(
    num_frames: int, width: int, height: int, spec: VideoSpec, budget: PixelBudget
) -> tuple[int, int]:
    """The budget bounds frames x height x width, frames rounded to whole temporal patches."""
    factor, max_pixels = spec.factor, budget.max_pixels
    if spec.frame_cap_tokens is not None:
        share = min(spec.frame_cap_tokens * factor * factor, max_pixels // num_frames)
        max_pixels = max(share, int(budget.min_pixels * 1.05)) * num_frames
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    rounded = round(num_frames / spec.temporal_patch_size) * spec.temporal_patch_size
    if rounded * new_height * new_width > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif rounded * new_height * new_width < budget.min_pixels:
        grow = math.sqrt(budget.min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width
