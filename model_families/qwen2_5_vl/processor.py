"""Qwen2.5-VL: pictures and videos, their tokens and their M-RoPE positions."""

from __future__ import annotations

from pathlib import Path

from model_families.checkpoint import read_config
from model_families.processing import Processor
from model_families.qwen2_5_vl.encoder import Qwen25VLConfig
from model_families.vision.processor import open_vision_processor


def open_processor(folder: Path) -> Processor:
    vision = read_config(folder, Qwen25VLConfig).vision_config
    return open_vision_processor(folder, vision, positions_per_s=vision.tokens_per_second)
