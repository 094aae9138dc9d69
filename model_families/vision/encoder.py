"""A vision tower as the encoder pool drives it: checks the items, packs them, runs one forward, splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from contracts.specs import ImageSpec
from encoder_pool.model import EncoderInput
from model_families.vision.packing import Grid
from model_families.vision.patchify import CHANNELS, Patchifier


class VisionTower(nn.Module, ABC):
    """The mathematics of one family's tower."""

    embedding_width: int

    @abstractmethod
    def forward(self, patches_NW: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[N, patch width] → [tokens of all items, embedding_width]."""


class VisionEncoder:
    """An EncoderModel. Holds weights, no request state."""

    def __init__(
        self, tower: VisionTower, spec: ImageSpec, encoder_id: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.encoder_id = encoder_id
        self.embedding_width = tower.embedding_width
        self.dtype = dtype
        self.device = device
        self._tower = tower
        self._spec = spec
        self._patchify = Patchifier(spec, device, dtype)

    def encode(self, items: list[EncoderInput]) -> list[Tensor]:
        """Raises ValueError when features, grid and token count of an item contradict each other."""
        for item in items:
            self._check(item)
        with torch.inference_mode():
            patches_NW = self._patchify([item.features for item in items])
            tokens: Tensor = self._tower(patches_NW, [item.grid_thw for item in items])
            return list(torch.split(tokens, [item.num_tokens for item in items]))

    def _check(self, item: EncoderInput) -> None:
        frames, rows, columns = item.grid_thw
        size, merge = self._spec.patch_size, self._spec.merge_size
        if item.modality != "image" or frames != 1:
            raise ValueError(f"this encoder takes single images, not {item.modality} of {frames} frames")
        if item.features.dtype != torch.uint8:
            raise ValueError(f"pixels must be uint8, not {item.features.dtype}")
        shape = (rows * size, columns * size, CHANNELS)
        if tuple(item.features.shape) != shape or rows % merge or columns % merge:
            raise ValueError(
                f"pixels of shape {tuple(item.features.shape)} do not fit a {rows}x{columns} grid"
            )
        if item.num_tokens != prod(item.grid_thw) // merge**2:
            raise ValueError(f"a {rows}x{columns} grid gives not {item.num_tokens} tokens")
