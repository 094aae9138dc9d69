"""An audio tower as the encoder pool drives it: checks the items, runs one packed forward, splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from contracts.specs import AudioSpec
from encoder_pool.model import EncoderInput, GraphBounds
from model_families.checkpoint import checkpoint_error
from model_families.dummy_weights import open_checkpoint
from model_families.fields import Count, check_multiple
from model_families.vision.loading import encoder_id
from model_families.vision.weights import TensorName, load_tower


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the towers share of their configuration."""

    num_mel_bins: Count = 128
    encoder_layers: Count = 32
    encoder_attention_heads: Count = 20
    encoder_ffn_dim: Count = 5120
    d_model: Count = 1280
    activation_function: str = "gelu"
    output_dim: Count = 3584

    def __post_init__(self) -> None:
        check_multiple("d_model", self.d_model, "encoder_attention_heads", self.encoder_attention_heads)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.encoder_attention_heads


class AudioTower(nn.Module, ABC):
    """The mathematics of one family's tower."""

    embedding_width: int

    @abstractmethod
    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Log-mel [mels, frames] of each sound → [tokens of all, embedding_width]. No sound sees another."""


class AudioEncoder:
    """An EncoderModel. Holds weights, no request state."""

    def __init__(
        self, tower: AudioTower, spec: AudioSpec, encoder_id: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.encoder_id = encoder_id
        self.embedding_width = tower.embedding_width
        self.dtype = dtype
        self.device = device
        self._tower = tower
        self._spec = spec

    def encode(self, items: list[EncoderInput]) -> list[Tensor]:
        """Raises ValueError when features and token count of an item contradict each other."""
        features = self._features(items)
        with torch.inference_mode():
            tokens: Tensor = self._tower(features)
            return list(torch.split(tokens, [item.num_tokens for item in items]))

    def allow_graphs(self, bounds: GraphBounds, *, ahead: bool) -> None:
        """Its forwards are not captured."""

    def drop_graphs(self) -> None: ...

    def _features(self, items: list[EncoderInput]) -> list[Tensor]:
        for item in items:
            self._check(item)
        return [item.features.to(self.device, self.dtype) for item in items]

    def _check(self, item: EncoderInput) -> None:
        if item.modality != "audio":
            raise ValueError(f"this encoder takes audio, not {item.modality}")
        if item.features.dtype != torch.float32 or item.features.dim() != 2:
            raise ValueError(f"log-mel features must be [mels, frames] of float32, not {item.features.dtype}")
        mels, frames = item.features.shape
        if mels != self._spec.num_mels or self._spec.num_tokens(frames) != item.num_tokens:
            raise ValueError(f"features [{mels}, {frames}] give not {item.num_tokens} tokens")


def load_audio_encoder(
    family: str,
    folder: Path,
    tower: AudioTower,
    config: AudioConfig,
    spec: AudioSpec | None,
    name_of: TensorName,
    device: torch.device,
    dtype: torch.dtype,
) -> AudioEncoder:
    """`tower` was built on the meta device. Raises EngineError when the checkpoint does not fit it."""
    if spec is None or spec.num_mels != config.num_mel_bins:
        raise checkpoint_error(
            f"config.json: num_mel_bins {config.num_mel_bins} differs from the preprocessing"
        )
    with open_checkpoint(folder) as checkpoint:
        fingerprint = load_tower(checkpoint, tower, name_of, device, dtype)
    parts = (msgspec.json.encode(config), spec.key().encode(), fingerprint.encode(), str(dtype).encode())
    return AudioEncoder(tower, spec, encoder_id(family, parts), device, dtype)


def require_gelu(config: AudioConfig) -> None:
    if config.activation_function != "gelu":
        raise checkpoint_error(f"audio activation {config.activation_function!r} is not supported; gelu is")
