"""Qwen3-Omni-MoE's vision tower: Qwen3-VL's."""

from __future__ import annotations

from pathlib import Path

import torch

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.omni.config import read_thinker_config
from model_families.qwen3_omni_moe.vision_weights import vision_name
from model_families.qwen3_vl.encoder import Qwen3VLConfig, build_encoder


def load_encoder(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_thinker_config(folder, Qwen3VLConfig).vision_config
    return build_encoder("qwen3_omni_moe", folder, config, specs, vision_name, device, dtype)
