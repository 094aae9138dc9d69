"""Qwen2.5-Omni's thinker: config.json → the decoder's configuration."""

from __future__ import annotations

from lm_engine.model import DecoderConfig
from model_families.text_config import CheckpointConfig, FamilyDefaults, build_decoder_config

DEFAULTS = FamilyDefaults(
    rope_theta=1_000_000.0,
    qkv_bias=True,
    mrope_section=(16, 24, 24),
    max_window_layers=28,
    sliding_window=32768,
)


def decoder_config(config: CheckpointConfig) -> DecoderConfig:
    return build_decoder_config(config, DEFAULTS)
