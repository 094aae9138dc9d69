"""Qwen3-Omni-MoE's audio tower: three convolutions over chunks, attention inside windows of chunks."""

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
from model_families.audio.chunks import Ints, Stack, chunk_lengths, first_rows, halved, split_stacks, stack_of
from model_families.audio.encoder import AudioConfig, AudioTower, Lengths, load_audio_encoder, require_gelu
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


@dataclass(frozen=True)
class WindowedLayout:
    """`rows`: of each stack, which of its chunks' rows belong to a sound. `pieces`: (stack, sound's number in
    it) in the order of the batch; `sizes`: rows of each stack's sounds."""

    stacks: tuple[Stack, ...]
    windows: Segments
    rows: tuple[Tensor, ...]
    sizes: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[int, int], ...]


class Qwen3OmniAudioTower(AudioTower[WindowedLayout]):
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
        self.num_mels = config.num_mel_bins
        self.chunk = 2 * config.n_window
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

    def embed(self, mel_FM: Tensor, layout: WindowedLayout) -> Tensor:
        x_NW = self._rows(mel_FM, layout)
        for block in self.blocks:
            x_NW = block(x_NW, layout.windows)
        tokens: Tensor = self.projection2(functional.gelu(self.projection1(self.norm(x_NW))))
        return tokens

    def stacks(self, lengths: Lengths) -> tuple[Stack, ...]:
        """Sounds of several chunks are convolved together; shorter ones have each a length of their own."""
        long = [n for n, frames in enumerate(lengths) if frames >= self.chunk or self.fills_chunks]
        short = sorted(set(range(len(lengths))) - set(long))
        together = [stack_of(long, lengths, self.chunk, fill=True)] if long else []
        return (*together, *(stack_of([sound], lengths, self.chunk) for sound in short))

    def _lay_out(self, lengths: Lengths, device: torch.device) -> WindowedLayout:
        stacks = self.stacks(lengths)
        places = {
            sound: (number, place)
            for number, stack in enumerate(stacks)
            for place, sound in enumerate(stack.sounds)
        }
        return WindowedLayout(
            stacks=stacks,
            windows=Segments(self._windows(lengths), device),
            rows=tuple(
                first_rows(_eighth(stack.frames_C), int(_eighth(np.array([stack.length]))[0]), device)
                for stack in stacks
            ),
            sizes=tuple(tuple(self._num_rows(lengths[sound]) for sound in stack.sounds) for stack in stacks),
            pieces=tuple(places[sound] for sound in range(len(lengths))),
        )

    def _rows(self, mel_FM: Tensor, layout: WindowedLayout) -> Tensor:
        """The rows of all sounds, in order."""
        found = []
        parts = split_stacks(mel_FM, layout.stacks)
        for mel_CML, rows_N, sizes in zip(parts, layout.rows, layout.sizes, strict=True):
            found.append(torch.split(self._convolve(mel_CML)[rows_N], list(sizes)))
        return torch.cat([found[stack][place] for stack, place in layout.pieces])

    def _convolve(self, mel_CML: Tensor) -> Tensor:
        """[rows of all chunks, width], with those of their silence."""
        parts = []
        for part_CML in torch.split(mel_CML, self.config.conv_chunksize):
            x = part_CML.unsqueeze(1)
            for convolution in (self.conv1, self.conv2, self.conv3):
                x = functional.gelu(convolution(x))
            parts.append(self.flatten(x.permute(0, 3, 1, 2).flatten(2)))
        x_CRW = torch.cat(parts)
        positions = sinusoids(x_CRW.shape[1], x_CRW.shape[2], x_CRW.device).to(x_CRW.dtype)
        return (x_CRW + positions).flatten(0, 1)

    def _num_rows(self, num_frames: int) -> int:
        return int(_eighth(chunk_lengths([num_frames], self.chunk)).sum())

    def _windows(self, lengths: Lengths) -> Ints:
        """Rows of every attention window: whole chunks' rows, as many chunks as the configuration says."""
        chunks = self.config.n_window_infer // self.chunk
        windows = []
        for frames in lengths:
            longest = int(_eighth(np.array([min(frames, self.chunk)]))[0])
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
