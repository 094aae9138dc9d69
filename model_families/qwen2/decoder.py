"""Qwen2 and Qwen2.5: config.json → the decoder's configuration."""

from __future__ import annotations

from lm_engine.model import DecoderConfig
from model_families.text_config import CheckpointConfig, FamilyDefaults, build_decoder_config

DEFAULTS = FamilyDefaults(qkv_bias=True, max_window_layers=28)


def decoder_config(config: CheckpointConfig) -> DecoderConfig:
    return build_decoder_config(config, DEFAULTS)
