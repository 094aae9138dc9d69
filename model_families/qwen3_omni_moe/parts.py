"""Qwen3-Omni-MoE: its parts put together."""

from __future__ import annotations

from pathlib import Path

from lm_engine.model import DecoderConfig
from model_families.omni.config import read_thinker_config
from model_families.parts import FamilyParts
from model_families.qwen3_omni_moe.audio_encoder import load_audio
from model_families.qwen3_omni_moe.decoder import decoder_config
from model_families.qwen3_omni_moe.encoder import load_encoder
from model_families.qwen3_omni_moe.pipeline import PIPELINE
from model_families.qwen3_omni_moe.processor import PLACEHOLDERS, open_processor
from model_families.qwen3_omni_moe.speech import SPEECH
from model_families.qwen3_omni_moe.weights import text_name
from model_families.qwen3_vl.decoder import Qwen3VLConfig


def read_decoder_config(folder: Path) -> DecoderConfig:
    return decoder_config(read_thinker_config(folder, Qwen3VLConfig))


PARTS = FamilyParts(
    pipeline=PIPELINE,
    architectures=("Qwen3OmniMoeForConditionalGeneration",),
    open_processor=open_processor,
    read_decoder_config=read_decoder_config,
    text_name=text_name,
    encoders={"vision": load_encoder, "audio": load_audio},
    model_types=("qwen3_omni_moe_thinker",),
    speech=SPEECH,
    placeholders=PLACEHOLDERS,
)
