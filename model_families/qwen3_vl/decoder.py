"""Qwen3-VL, dense: config.json → the decoder's configuration."""

from __future__ import annotations

import msgspec

from lm_engine.model import DecoderConfig
from model_families.text_config import CheckpointConfig, FamilyDefaults, build_decoder_config

DEFAULTS = FamilyDefaults(
    rope_theta=500_000.0,
    max_position=128_000,
    head_dim=128,
    qk_norm=True,
    mrope_section=(24, 20, 20),
    mrope_interleaved=True,
)


class DeepstackConfig(msgspec.Struct, frozen=True):
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class Qwen3VLConfig(CheckpointConfig, frozen=True, kw_only=True):
    vision_config: DeepstackConfig = DeepstackConfig()


def decoder_config(config: Qwen3VLConfig) -> DecoderConfig:
    levels = len(config.vision_config.deepstack_visual_indexes)
    return build_decoder_config(config, DEFAULTS, num_deepstack_levels=levels)
