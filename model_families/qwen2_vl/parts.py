"""Qwen2-VL: its parts put together."""

from __future__ import annotations

from pathlib import Path

from lm_engine.model import DecoderConfig
from model_families.checkpoint import read_config
from model_families.parts import FamilyParts
from model_families.qwen2_vl.decoder import decoder_config
from model_families.qwen2_vl.encoder import load_encoder
from model_families.qwen2_vl.pipeline import PIPELINE
from model_families.qwen2_vl.processor import open_processor
from model_families.qwen2_vl.weights import text_name
from model_families.text_config import CheckpointConfig
from model_families.vision.processor import PLACEHOLDERS


def read_decoder_config(folder: Path) -> DecoderConfig:
    return decoder_config(read_config(folder, CheckpointConfig))


PARTS = FamilyParts(
    pipeline=PIPELINE,
    architectures=("Qwen2VLForConditionalGeneration",),
    open_processor=open_processor,
    read_decoder_config=read_decoder_config,
    text_name=text_name,
    encoders={"vision": load_encoder},
    placeholders=PLACEHOLDERS,
)
