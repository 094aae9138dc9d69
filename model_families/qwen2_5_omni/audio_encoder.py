"""Qwen2.5-Omni's audio tower: two convolutions over chunks, attention inside chunks, pairs averaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.audio.chunks import Ints, chunk_lengths, first_rows, halved, stack_chunks
from model_families.audio.encoder import AudioConfig, AudioTower, load_audio_encoder, require_gelu
from model_families.audio.layers import NORM_EPS, AudioBlock, sinusoids
from model_families.fields import Count
from model_families.omni.config import read_thinker_config
from model_families.qwen2_5_omni.audio_weights import audio_name
from model_families.vision.attention import PackedAttention, select_attention
from model_families.vision.packing import Segments


class Qwen25OmniAudioConfig(AudioConfig, frozen=True, kw_only=True):
    n_window: Count = 100  # half the mel frames of a chunk


class Qwen25OmniEars(msgspec.Struct, frozen=True):
    audio_config: Qwen25OmniAudioConfig = Qwen25OmniAudioConfig()


class AudioRows(AudioTower):
    """The tower up to its last block: what families of this kind share."""

    def __init__(self, config: Qwen25OmniAudioConfig, attention: PackedAttention) -> None:
        super().__init__()
        require_gelu(config)
        self.config = config
        self.embedding_width = config.output_dim
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            AudioBlock(
                width, config.encoder_attention_heads, config.encoder_ffn_dim, attention, key_bias=False
            )
            for _ in range(config.encoder_layers)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def rows(self, features: Sequence[Tensor]) -> tuple[Tensor, Ints]:
        """[N, width] of all sounds, a row for two mel frames, not normed; and how many are each sound's."""
        chunk = 2 * self.config.n_window
        num_frames = [mel.shape[1] for mel in features]
        frames_C = chunk_lengths(num_frames, chunk)
        rows_C = halved(frames_C)
        x = self._convolve(stack_chunks(features, chunk), frames_C)
        positions = sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        x_NW = (x + positions).flatten(0, 1)[first_rows(rows_C, x.shape[1], x.device)]
        segments = Segments(rows_C, x.device)
        for block in self.blocks:
            x_NW = block(x_NW, segments)
        return x_NW, halved(np.array(num_frames))

    def _convolve(self, mel_CMF: Tensor, frames_C: Ints) -> Tensor:
        """[chunks, rows, width]. Past a chunk's end there is silence, for the second convolution too."""
        lengths = torch.from_numpy(frames_C).to(mel_CMF.device)
        holds_sound = torch.arange(mel_CMF.shape[2], device=mel_CMF.device) < lengths[:, None]
        x = functional.gelu(self.conv1(mel_CMF)) * holds_sound.unsqueeze(1)
        return functional.gelu(self.conv2(x)).transpose(1, 2)


class Qwen25OmniAudioTower(AudioRows):
    def __init__(self, config: Qwen25OmniAudioConfig, attention: PackedAttention) -> None:
        super().__init__(config, attention)
        self.projection = nn.Linear(config.d_model, config.output_dim)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x_NW, num_rows = self.rows(features)
        first = torch.from_numpy(_pair_starts(num_rows)).to(x_NW.device)
        pooled = (x_NW[first] + x_NW[first + 1]) / 2
        tokens: Tensor = self.projection(self.norm(pooled))
        return tokens


def _pair_starts(rows: Ints) -> Ints:
    """The first row of every pair, sound by sound; the last row of an odd number is left out."""
    starts = np.cumsum(rows) - rows
    return np.concatenate(
        [start + 2 * np.arange(count // 2) for start, count in zip(starts, rows, strict=True)]
    )


def load_audio(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_thinker_config(folder, Qwen25OmniEars).audio_config
    attention = select_attention(device, dtype, config.head_dim)
    with torch.device("meta"):
        tower = Qwen25OmniAudioTower(config, attention)
    return load_audio_encoder("qwen2_5_omni", folder, tower, config, specs.audio, audio_name, device, dtype)
