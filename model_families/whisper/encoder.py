"""Whisper's audio encoder: two convolutions over the mel frames, learned positions, full attention.

Shapes: B windows, M mel bins, F frames, P = F/2 positions, H hidden.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from contracts.specs import MediaSpecs
from encoder_pool.graphs import Forward, GraphedTower
from encoder_pool.model import EncoderInput, GraphBounds
from model_families.audio.encoder import GRAPHED_FRAMES
from model_families.dummy_weights import open_checkpoint
from model_families.vision.weights import load_tower
from model_families.whisper.config import NORM_EPS, WhisperConfig, read_whisper_config
from model_families.whisper.weights import encoder_name


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BPH: Tensor) -> Tensor:
        q, k, v = (
            projection(x_BPH).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        width = config.d_model
        self.self_attn = _Attention(width, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.fc1 = nn.Linear(width, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, width)
        self.final_layer_norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, x_BPH: Tensor) -> Tensor:
        x_BPH = x_BPH + self.self_attn(self.self_attn_layer_norm(x_BPH))
        inner = functional.gelu(self.fc1(self.final_layer_norm(x_BPH)))
        out: Tensor = x_BPH + self.fc2(inner)
        return out


class WhisperTower(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, width)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, mel_BMF: Tensor) -> Tensor:
        """[B, M, F] → [B, P, H]."""
        x_BHF = functional.gelu(self.conv1(mel_BMF))
        x_BHP = functional.gelu(self.conv2(x_BHF))
        x_BPH = x_BHP.transpose(1, 2) + self.embed_positions.weight
        for block in self.layers:
            x_BPH = block(x_BPH)
        out: Tensor = self.layer_norm(x_BPH)
        return out


class WhisperEncoder(GraphedTower[int]):
    """An EncoderModel: items are windows of log-mel frames, all of `max_source_positions` tokens. Batches of
    as many windows are of one layout."""

    def __init__(
        self,
        tower: WhisperTower,
        config: WhisperConfig,
        encoder_id: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.encoder_id = encoder_id
        self.embedding_width = config.d_model
        self.dtype = dtype
        self.device = device
        self._config = config
        self._tower = tower

    def encode(self, items: list[EncoderInput]) -> list[Tensor]:
        """Raises ValueError when an item does not fit a window. A shorter one is filled up with zeros, as in
        the reference."""
        for item in items:
            self._check(item)

        def write(mel_BMF: Tensor) -> None:
            mel_BMF.zero_()
            for mel_MF, item in zip(mel_BMF, items, strict=True):
                mel_MF[:, : item.features.shape[1]] = item.features.to(self.device)

        return self.compute(len(items), [item.num_tokens for item in items], write)

    # --- graphs -------------------------------------------------------------------------------------------
    def max_rows(self, bounds: GraphBounds) -> int:
        config = self._config
        most = bounds.max_tokens // config.max_source_positions, GRAPHED_FRAMES // config.window_frames
        return max(1, min(most))

    def input_shape(self, key: int) -> tuple[int, ...]:
        return key, self._config.num_mel_bins, self._config.window_frames

    def num_tokens(self, key: int) -> int:
        return key * self._config.max_source_positions

    def prepared(self, key: int) -> Forward:
        return lambda mel_BMF: self._tower(mel_BMF).flatten(0, 1)

    def largest(self, num_rows: int) -> int:
        return num_rows

    def _check(self, item: EncoderInput) -> None:
        config, shape = self._config, tuple(item.features.shape)
        if item.modality != "audio" or item.features.dtype != torch.float32:
            raise ValueError(f"this encoder takes float32 mel frames, not {item.modality}")
        if len(shape) != 2 or shape[0] != config.num_mel_bins or not 1 <= shape[1] <= config.window_frames:
            raise ValueError(
                f"mel frames of shape {shape} do not fit {config.num_mel_bins} bins of up to"
                f" {config.window_frames}"
            )
        if item.num_tokens != config.max_source_positions:
            raise ValueError(f"a window gives {config.max_source_positions} tokens, not {item.num_tokens}")


def load_encoder(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> WhisperEncoder:
    """Raises EngineError when the checkpoint does not fit the tower."""
    config = read_whisper_config(folder)
    with torch.device("meta"):
        tower = WhisperTower(config)
    with open_checkpoint(folder) as checkpoint:
        fingerprint = load_tower(checkpoint, tower, encoder_name, device, dtype)
    identity = xxhash.xxh3_128(msgspec.json.encode(config) + fingerprint.encode() + str(dtype).encode())
    return WhisperEncoder(tower, config, f"whisper-{identity.hexdigest()}", device, dtype)
