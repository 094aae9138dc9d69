"""Qwen2.5-Omni's vision tower: Qwen2.5-VL's."""

from __future__ import annotations

from pathlib import Path

import torch

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.omni.config import read_thinker_config
from model_families.qwen2_5_omni.vision_weights import vision_name
from model_families.qwen2_5_vl.encoder import Qwen25VLConfig, build_encoder


def load_encoder(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_thinker_config(folder, Qwen25VLConfig).vision_config
    return build_encoder("qwen2_5_omni", folder, config, specs, vision_name, device, dtype)
