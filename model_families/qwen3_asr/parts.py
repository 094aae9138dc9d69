"""Qwen3-ASR: its parts put together."""

from __future__ import annotations

from pathlib import Path

from model_families.parts import FamilyParts
from model_families.qwen3_asr.decoder import read_decoder_config
from model_families.qwen3_asr.encoder import load_audio
from model_families.qwen3_asr.pipeline import PIPELINE
from model_families.qwen3_asr.processor import open_processor
from model_families.qwen3_asr.transcription import Qwen3ASRTranscriber
from model_families.qwen3_asr.weights import text_name
from model_families.qwen3_omni_moe.processor import PLACEHOLDERS
from model_families.text import ChatTokenizer
from model_families.transcription import Transcriber


def make_transcriber(folder: Path, tokenizer: ChatTokenizer) -> Transcriber:
    spec = open_processor(folder).media_specs.audio
    assert spec is not None
    return Qwen3ASRTranscriber(tokenizer, spec)


PARTS = FamilyParts(
    pipeline=PIPELINE,
    architectures=("Qwen3ASRForConditionalGeneration",),
    open_processor=open_processor,
    read_decoder_config=read_decoder_config,
    text_name=text_name,
    encoders={"audio": load_audio},
    transcriber=make_transcriber,
    placeholders=PLACEHOLDERS,
)
