"""Qwen2.5-Omni: its parts put together."""

from __future__ import annotations

from pathlib import Path

from lm_engine.model import DecoderConfig
from model_families.omni.config import read_thinker_config
from model_families.parts import FamilyParts
from model_families.qwen2_5_omni.audio_encoder import load_audio
from model_families.qwen2_5_omni.decoder import decoder_config
from model_families.qwen2_5_omni.encoder import load_encoder
from model_families.qwen2_5_omni.pipeline import PIPELINE
from model_families.qwen2_5_omni.processor import PLACEHOLDERS, open_processor
from model_families.qwen2_5_omni.speech import SPEECH
from model_families.qwen2_5_omni.weights import text_name
from model_families.text_config import CheckpointConfig


def read_decoder_config(folder: Path) -> DecoderConfig:
    return decoder_config(read_thinker_config(folder, CheckpointConfig))


PARTS = FamilyParts(
    pipeline=PIPELINE,
    architectures=("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
    open_processor=open_processor,
    read_decoder_config=read_decoder_config,
    text_name=text_name,
    encoders={"vision": load_encoder, "audio": load_audio},
    model_types=("qwen2_5_omni_thinker",),
    speech=SPEECH,
    placeholders=PLACEHOLDERS,
)
