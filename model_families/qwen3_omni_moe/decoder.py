"""Qwen3-Omni-MoE's thinker: config.json → the decoder's configuration."""

from __future__ import annotations

from lm_engine.model import DecoderConfig
from model_families.qwen3_vl.decoder import Qwen3VLConfig
from model_families.text_config import FamilyDefaults, MoeDefaults, build_decoder_config

DEFAULTS = FamilyDefaults(
    rope_theta=1_000_000.0,
    qk_norm=True,
    mrope_section=(24, 20, 20),
    mrope_interleaved=True,
    moe=MoeDefaults(num_experts=128, num_chosen=8, intermediate_size=768, normalise=True),
)


def decoder_config(config: Qwen3VLConfig) -> DecoderConfig:
    levels = len(config.vision_config.deepstack_visual_indexes)
    return build_decoder_config(config, DEFAULTS, num_deepstack_levels=levels)
