"""An audio tower as the encoder pool drives it: checks the items, runs one packed forward, splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from contracts.specs import AudioSpec
from encoder_pool.graphs import Forward, GraphedTower
from encoder_pool.model import EncoderInput, GraphBounds
from model_families.audio.chunks import Stack, split_stacks, write_stack
from model_families.checkpoint import checkpoint_error
from model_families.dummy_weights import open_checkpoint
from model_families.fields import Count, check_multiple
from model_families.recurring import Recurring
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


LayoutT = TypeVar("LayoutT")
Lengths = tuple[int, ...]  # mel frames of each sound
KEPT_FRAMES = 1 << 20  # of all layouts that a tower keeps; a frame takes some 8 bytes of them
GRAPHED_FRAMES = 1 << 14  # of a batch, at most: what takes longer hides its launches


class AudioTower(nn.Module, ABC, Generic[LayoutT]):
    """The mathematics of one family's tower. Its input is the sounds' chunks, stack by stack: mel frames are
    its rows, but each chunk's mels come before its frames."""

    embedding_width: int
    num_mels: int
    chunk: int  # mel frames
    waits_for_device = False  # in the middle of a forward

    def __init__(self) -> None:
        super().__init__()
        self._layouts: Recurring[tuple[Lengths, torch.device], LayoutT] = Recurring(
            self._new_layout, lambda place: sum(place[0]), KEPT_FRAMES
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Log-mel [mels, frames] of each sound → [tokens of all, embedding_width]. No sound sees another."""
        return self.embed(*self.stacked(features))

    @abstractmethod
    def embed(self, mel_FM: Tensor, layout: LayoutT) -> Tensor:
        """As `forward`. Unless it `waits_for_device` it needs nothing of the host that sounds of the same
        lengths did not need before."""

    @abstractmethod
    def stacks(self, lengths: Lengths) -> tuple[Stack, ...]: ...

    @abstractmethod
    def _lay_out(self, lengths: Lengths, device: torch.device) -> LayoutT: ...

    def layout(self, lengths: Lengths, device: torch.device) -> LayoutT:
        return self._layouts.of((lengths, device))

    def stacked(self, features: Sequence[Tensor]) -> tuple[Tensor, LayoutT]:
        """What `embed` takes."""
        lengths = tuple(mel.shape[1] for mel in features)
        mel_FM = features[0].new_empty(sum(s.num_frames for s in self.stacks(lengths)), self.num_mels)
        self.write(mel_FM, features)
        return mel_FM, self.layout(lengths, mel_FM.device)

    def write(self, mel_FM: Tensor, features: Sequence[Tensor]) -> None:
        """Fills all of it; the features may be anywhere."""
        stacks = self.stacks(tuple(mel.shape[1] for mel in features))
        for mel_CML, stack in zip(split_stacks(mel_FM, stacks), stacks, strict=True):
            sounds = [features[sound].to(mel_FM.device, mel_FM.dtype) for sound in stack.sounds]
            write_stack(mel_CML, sounds, self.chunk)

    def _new_layout(self, place: tuple[Lengths, torch.device]) -> LayoutT:
        # What is made while nothing can be learned could not be used where something is.
        with torch.inference_mode(False):
            return self._lay_out(*place)


class AudioEncoder(GraphedTower[Lengths], Generic[LayoutT]):
    """An EncoderModel. Holds weights, no request state."""

    def __init__(
        self,
        tower: AudioTower[LayoutT],
        spec: AudioSpec,
        encoder_id: str,
        device: torch.device,
        dtype: torch.dtype,
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
        lengths = tuple(mel.shape[1] for mel in features)

        def write(mel_FM: Tensor) -> None:
            self._tower.write(mel_FM, features)

        return self.compute(lengths, [item.num_tokens for item in items], write)

    # --- graphs -------------------------------------------------------------------------------------------
    def allow_graphs(self, bounds: GraphBounds, *, ahead: bool) -> None:
        if not self._tower.waits_for_device:
            super().allow_graphs(bounds, ahead=ahead)

    def max_rows(self, bounds: GraphBounds) -> int:
        chunk = self._tower.chunk
        most = min(bounds.max_tokens // self._spec.num_tokens(chunk), GRAPHED_FRAMES // chunk)
        return max(1, most) * chunk

    def input_shape(self, key: Lengths) -> tuple[int, ...]:
        return sum(stack.num_frames for stack in self._tower.stacks(key)), self._tower.num_mels

    def num_tokens(self, key: Lengths) -> int:
        return sum(map(self._spec.num_tokens, key))

    def prepared(self, key: Lengths) -> Forward:
        layout = self._tower.layout(key, self.device)
        return lambda mel_FM: self._tower.embed(mel_FM, layout)

    def largest(self, num_rows: int) -> Lengths:
        """One sound."""
        chunk = self._tower.chunk
        return (max(1, num_rows // chunk) * chunk,)

    # --- items --------------------------------------------------------------------------------------------
    def _features(self, items: list[EncoderInput]) -> list[Tensor]:
        for item in items:
            self._check(item)
        return [item.features for item in items]

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
    tower: AudioTower[LayoutT],
    config: AudioConfig,
    spec: AudioSpec | None,
    name_of: TensorName,
    device: torch.device,
    dtype: torch.dtype,
) -> AudioEncoder[LayoutT]:
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
