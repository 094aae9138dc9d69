"""The vision half of a Qwen-VL config.json, as far as the families agree."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from model_families.checkpoint import checkpoint_error
from model_families.fields import Count, Positive


class AxialRope(msgspec.Struct, frozen=True):
    rope_theta: Positive = 10_000.0


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What preprocessing and every tower need; a family's own config adds to it."""

    depth: Count
    num_heads: Count
    hidden_act: str
    patch_size: Count = 14
    spatial_merge_size: Count = 2
    temporal_patch_size: Count = 2
    in_channels: Count = 3
    rope_parameters: AxialRope | None = None

    @property
    def rope_theta(self) -> float:
        return (self.rope_parameters or AxialRope()).rope_theta

    @property
    def patch_width(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


V = TypeVar("V", bound=VisionConfig)


def require_activation(config: VisionConfig, supported: str) -> None:
    if config.hidden_act != supported:
        raise checkpoint_error(
            f"config.json: vision_config.hidden_act {config.hidden_act!r} is not supported,"
            f" only {supported} is"
        )


class MediaTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Placeholder ids of config.json."""

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
