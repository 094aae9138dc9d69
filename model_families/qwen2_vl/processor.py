"""Qwen2-VL: pictures and videos, their tokens and their M-RoPE positions."""

from __future__ import annotations

from pathlib import Path

from model_families.checkpoint import read_config
from model_families.processing import Processor
from model_families.qwen2_vl.encoder import Qwen2VLConfig
from model_families.vision.processor import open_vision_processor


def open_processor(folder: Path) -> Processor:
    return open_vision_processor(folder, read_config(folder, Qwen2VLConfig).vision_config)
