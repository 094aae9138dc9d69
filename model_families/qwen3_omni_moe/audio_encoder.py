"""Qwen3-Omni-MoE's audio tower: three convolutions over chunks, attention inside windows of chunks."""

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
from model_families.qwen3_omni_moe.audio_weights import audio_name
from model_families.vision.attention import PackedAttention, select_attention
from model_families.vision.packing import Segments


class Qwen3OmniAudioConfig(AudioConfig, frozen=True, kw_only=True):
    n_window: Count = 50  # half the mel frames of a chunk
    n_window_infer: Count = 800  # mel frames that attend to each other
    conv_chunksize: Count = 500  # chunks that are convolved at once
    downsample_hidden_size: Count = 480


class Qwen3OmniEars(msgspec.Struct, frozen=True):
    audio_config: Qwen3OmniAudioConfig = Qwen3OmniAudioConfig()


class Qwen3OmniAudioTower(AudioTower):
    """A sound of several chunks pads its last one with silence in the features, as the reference does: what
    the later convolutions make of that silence reaches the last rows. A sound of one chunk has no padding,
    unless the family `fills_chunks` always (Qwen3-ASR)."""

    def __init__(
        self, config: Qwen3OmniAudioConfig, attention: PackedAttention, *, fills_chunks: bool = False
    ) -> None:
        super().__init__()
        require_gelu(config)
        self.config = config
        self.fills_chunks = fills_chunks
        self.embedding_width = config.output_dim
        width, channels = config.d_model, config.downsample_hidden_size
        self.conv1 = nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        mels = int(_eighth(np.array([config.num_mel_bins]))[0])
        self.flatten = nn.Linear(channels * mels, width, bias=False)
        self.blocks = nn.ModuleList(
            AudioBlock(
                width, config.encoder_attention_heads, config.encoder_ffn_dim, attention, key_bias=True
            )
            for _ in range(config.encoder_layers)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.projection1 = nn.Linear(width, width)
        self.projection2 = nn.Linear(width, config.output_dim)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x_NW = self._rows(features)
        segments = Segments(self._windows([mel.shape[1] for mel in features]), x_NW.device)
        for block in self.blocks:
            x_NW = block(x_NW, segments)
        tokens: Tensor = self.projection2(functional.gelu(self.projection1(self.norm(x_NW))))
        return tokens

    def _rows(self, features: Sequence[Tensor]) -> Tensor:
        """The rows of all sounds, in order. Sounds of several chunks are convolved together; shorter ones
        have each a length of their own."""
        chunk = 2 * self.config.n_window
        long = [index for index, mel in enumerate(features) if mel.shape[1] >= chunk or self.fills_chunks]
        rows: dict[int, Tensor] = {}
        if long:
            together = self._convolve([features[index] for index in long])
            sizes = [self._num_rows(features[index].shape[1]) for index in long]
            rows = dict(zip(long, torch.split(together, sizes), strict=True))
        for index, mel in enumerate(features):
            if index not in rows:
                rows[index] = self._convolve([mel])
        return torch.cat([rows[index] for index in range(len(features))])

    def _convolve(self, features: Sequence[Tensor]) -> Tensor:
        chunk = 2 * self.config.n_window
        frames_C = chunk_lengths([mel.shape[1] for mel in features], chunk)
        mel_CMF = stack_chunks(features, chunk)
        if self.fills_chunks:
            mel_CMF = functional.pad(mel_CMF, (0, chunk - mel_CMF.shape[2]))
        parts = []
        for part_CMF in torch.split(mel_CMF, self.config.conv_chunksize):
            x = part_CMF.unsqueeze(1)
            for convolution in (self.conv1, self.conv2, self.conv3):
                x = functional.gelu(convolution(x))
            parts.append(self.flatten(x.permute(0, 3, 1, 2).flatten(2)))
        x_CRW = torch.cat(parts)
        positions = sinusoids(x_CRW.shape[1], x_CRW.shape[2], x_CRW.device).to(x_CRW.dtype)
        return (x_CRW + positions).flatten(0, 1)[first_rows(_eighth(frames_C), x_CRW.shape[1], x_CRW.device)]

    def _num_rows(self, num_frames: int) -> int:
        return int(_eighth(chunk_lengths([num_frames], 2 * self.config.n_window)).sum())

    def _windows(self, num_frames: Sequence[int]) -> Ints:
        """Rows of every attention window: whole chunks' rows, as many chunks as the configuration says."""
        chunk = 2 * self.config.n_window
        chunks = self.config.n_window_infer // chunk
        windows = []
        for frames in num_frames:
            longest = int(_eighth(np.array([min(frames, chunk)]))[0])
            windows.append(chunk_lengths([self._num_rows(frames)], longest * chunks))
        return np.concatenate(windows)


def _eighth(lengths: Ints) -> Ints:
    return halved(halved(halved(lengths)))


def load_audio(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_thinker_config(folder, Qwen3OmniEars).audio_config
    attention = select_attention(device, dtype, config.head_dim)
    with torch.device("meta"):
        tower = Qwen3OmniAudioTower(config, attention)
    return load_audio_encoder("qwen3_omni_moe", folder, tower, config, specs.audio, audio_name, device, dtype)
