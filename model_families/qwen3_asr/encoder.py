"""Qwen3-ASR's audio tower: Qwen3-Omni's, every chunk filled up to its whole length."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.audio.encoder import load_audio_encoder
from model_families.checkpoint import read_config
from model_families.fields import Count
from model_families.qwen3_asr.weights import audio_name
from model_families.qwen3_omni_moe.audio_encoder import Qwen3OmniAudioConfig, Qwen3OmniAudioTower
from model_families.vision.attention import select_attention


class Qwen3ASRAudioConfig(Qwen3OmniAudioConfig, frozen=True, kw_only=True):
    encoder_layers: Count = 24
    encoder_attention_heads: Count = 16
    encoder_ffn_dim: Count = 4096
    d_model: Count = 1024


class Qwen3ASREars(msgspec.Struct, frozen=True):
    audio_config: Qwen3ASRAudioConfig = Qwen3ASRAudioConfig()


def load_audio(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_config(folder, Qwen3ASREars).audio_config
    attention = select_attention(device, dtype, config.head_dim)
    with torch.device("meta"):
        tower = Qwen3OmniAudioTower(config, attention, fills_chunks=True)
    return load_audio_encoder("qwen3_asr", folder, tower, config, specs.audio, audio_name, device, dtype)
