"""Qwen3-VL-MoE: its parts put together."""

from __future__ import annotations

from pathlib import Path

from lm_engine.model import DecoderConfig
from model_families.checkpoint import read_config
from model_families.parts import FamilyParts
from model_families.qwen3_vl.decoder import Qwen3VLConfig
from model_families.qwen3_vl_moe.decoder import decoder_config
from model_families.qwen3_vl_moe.encoder import load_encoder
from model_families.qwen3_vl_moe.pipeline import PIPELINE
from model_families.qwen3_vl_moe.processor import open_processor
from model_families.qwen3_vl_moe.weights import text_name
from model_families.vision.processor import PLACEHOLDERS


def read_decoder_config(folder: Path) -> DecoderConfig:
    return decoder_config(read_config(folder, Qwen3VLConfig))


PARTS = FamilyParts(
    pipeline=PIPELINE,
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    open_processor=open_processor,
    read_decoder_config=read_decoder_config,
    text_name=text_name,
    encoders={"vision": load_encoder},
    placeholders=PLACEHOLDERS,
)
