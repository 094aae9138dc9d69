"""Qwen3-VL-MoE: config.json → the decoder's configuration."""

from __future__ import annotations

import msgspec

from lm_engine.model import DecoderConfig
from model_families.qwen3_vl.decoder import DEFAULTS as DENSE
from model_families.qwen3_vl.decoder import Qwen3VLConfig
from model_families.text_config import MoeDefaults, build_decoder_config

# The reference normalises the chosen experts' weights whatever the config says.
MOE = MoeDefaults(num_experts=60, num_chosen=4, intermediate_size=1408, normalise=True, always_normalise=True)
DEFAULTS = msgspec.structs.replace(DENSE, head_dim=None, moe=MOE)


def decoder_config(config: Qwen3VLConfig) -> DecoderConfig:
    levels = len(config.vision_config.deepstack_visual_indexes)
    return build_decoder_config(config, DEFAULTS, num_deepstack_levels=levels)
