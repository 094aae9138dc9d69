"""Qwen3-ASR: config.json → the decoder's configuration, Qwen3's."""

from __future__ import annotations

from pathlib import Path

from lm_engine.model import DecoderConfig
from model_families.checkpoint import read_config
from model_families.qwen3.decoder import DEFAULTS
from model_families.text_config import CheckpointConfig, build_decoder_config


class Qwen3ASRConfig(CheckpointConfig, frozen=True, kw_only=True):
    audio_token_id: int = 151676
    tie_word_embeddings: bool | None = True


def read_decoder_config(folder: Path) -> DecoderConfig:
    return build_decoder_config(read_config(folder, Qwen3ASRConfig), DEFAULTS)
