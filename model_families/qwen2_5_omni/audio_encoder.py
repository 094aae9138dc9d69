"""Qwen2.5-Omni's audio tower: two convolutions over chunks, attention inside chunks, pairs averaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.audio.chunks import Ints, Stack, first_rows, halved, stack_of
from model_families.audio.encoder import AudioConfig, AudioTower, Lengths, load_audio_encoder, require_gelu
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


@dataclass(frozen=True)
class RowsLayout:
    """C chunks, L mel frames of each, N rows of all sounds: one for two frames."""

    num_rows: Ints  # of each sound
    chunks: Segments
    sounding_C1L: Tensor  # bool: up to a chunk's end
    rows_N: Tensor  # which of all chunks' rows belong to a sound
    pairs: Tensor  # the first row of every pair


class AudioRows(AudioTower[RowsLayout]):
    """The tower up to its last block: what families of this kind share."""

    def __init__(self, config: Qwen25OmniAudioConfig, attention: PackedAttention) -> None:
        super().__init__()
        require_gelu(config)
        self.config = config
        self.embedding_width = config.output_dim
        self.num_mels = config.num_mel_bins
        self.chunk = 2 * config.n_window
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

    def rows(self, mel_FM: Tensor, layout: RowsLayout) -> Tensor:
        """[N, width] of all sounds, not normed."""
        chunks, _, length = layout.sounding_C1L.shape
        x = self._convolve(mel_FM.view(chunks, -1, length), layout.sounding_C1L)
        positions = sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        x_NW = (x + positions).flatten(0, 1)[layout.rows_N]
        for block in self.blocks:
            x_NW = block(x_NW, layout.chunks)
        return x_NW

    def stacks(self, lengths: Lengths) -> tuple[Stack, ...]:
        return (stack_of(range(len(lengths)), lengths, self.chunk),)

    def _lay_out(self, lengths: Lengths, device: torch.device) -> RowsLayout:
        (stack,) = self.stacks(lengths)
        rows_C, num_rows = halved(stack.frames_C), halved(np.array(lengths))
        sounding_CL = np.arange(stack.length) < stack.frames_C[:, None]
        return RowsLayout(
            num_rows=num_rows,
            chunks=Segments(rows_C, device),
            sounding_C1L=torch.from_numpy(sounding_CL).to(device).unsqueeze(1),
            rows_N=first_rows(rows_C, int(halved(np.array([stack.length]))[0]), device),
            pairs=torch.from_numpy(_pair_starts(num_rows)).to(device),
        )

    def _convolve(self, mel_CMF: Tensor, sounding_C1L: Tensor) -> Tensor:
        """[chunks, rows, width]. Past a chunk's end there is silence, for the second convolution too."""
        x = functional.gelu(self.conv1(mel_CMF)) * sounding_C1L
        return functional.gelu(self.conv2(x)).transpose(1, 2)


class Qwen25OmniAudioTower(AudioRows):
    def __init__(self, config: Qwen25OmniAudioConfig, attention: PackedAttention) -> None:
        super().__init__(config, attention)
        self.projection = nn.Linear(config.d_model, config.output_dim)

    def embed(self, mel_FM: Tensor, layout: RowsLayout) -> Tensor:
        x_NW = self.rows(mel_FM, layout)
        pooled = (x_NW[layout.pairs] + x_NW[layout.pairs + 1]) / 2
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
