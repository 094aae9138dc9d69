"""Whisper: its parts put together."""

from __future__ import annotations

from pathlib import Path

import torch

from lm_engine.logits_rule import LogitsRule
from model_families.parts import FamilyParts
from model_families.text import ChatTokenizer
from model_families.transcription import Transcriber
from model_families.whisper.config import read_decoder_config, read_generation, read_whisper_config
from model_families.whisper.encoder import load_encoder
from model_families.whisper.pipeline import PIPELINE
from model_families.whisper.processor import open_processor
from model_families.whisper.rules import WhisperRule
from model_families.whisper.transcription import WhisperTranscriber
from model_families.whisper.weights import load_decoder, text_name


def make_rule(folder: Path, device: torch.device) -> LogitsRule:
    return WhisperRule(read_generation(folder), read_whisper_config(folder).vocab_size, device)


def make_transcriber(folder: Path, tokenizer: ChatTokenizer) -> Transcriber:
    return WhisperTranscriber(read_whisper_config(folder), read_generation(folder), tokenizer)


PARTS = FamilyParts(
    pipeline=PIPELINE,
    architectures=("WhisperForConditionalGeneration",),
    open_processor=open_processor,
    read_decoder_config=read_decoder_config,
    text_name=text_name,
    encoders={"audio": load_encoder},
    load_decoder=load_decoder,
    logits_rule=make_rule,
    transcriber=make_transcriber,
)
