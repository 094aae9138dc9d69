"""A vision tower as the encoder pool drives it: checks the items, packs them, runs one forward, splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from contracts.media import Modality
from contracts.specs import ImageSpec, MediaSpecs, VideoSpec
from encoder_pool.model import EncoderInput
from model_families.vision.packing import Grid
from model_families.vision.patchify import CHANNELS, Patchifier


class VisionTower(nn.Module, ABC):
    """The mathematics of one family's tower."""

    embedding_width: int
    blocks: nn.ModuleList

    @abstractmethod
    def forward(self, patches_NW: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[N, patch width] → [tokens of all items, embedding_width]."""


class VisionEncoder:
    """An EncoderModel of pictures and, where the family takes them, videos. Holds weights, no request
    state."""

    def __init__(
        self, tower: VisionTower, specs: MediaSpecs, encoder_id: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.encoder_id = encoder_id
        self.embedding_width = tower.embedding_width
        self.dtype = dtype
        self.device = device
        self._tower = tower
        given: dict[Modality, ImageSpec | VideoSpec | None] = {"image": specs.image, "video": specs.video}
        self._specs = {modality: spec for modality, spec in given.items() if spec is not None}
        self._patchify = {m: Patchifier(spec, device, dtype) for m, spec in self._specs.items()}

    def encode(self, items: list[EncoderInput]) -> list[Tensor]:
        """Raises ValueError when features, grid and token count of an item contradict each other."""
        for item in items:
            self._check(item)
        with torch.inference_mode():
            tokens: Tensor = self._tower(self._patches(items), [item.grid_thw for item in items])
            return list(torch.split(tokens, [item.num_tokens for item in items]))

    def _patches(self, items: list[EncoderInput]) -> Tensor:
        """[N, patch width] of all items, in order."""
        counts = [prod(item.grid_thw) for item in items]
        width = self._patchify[items[0].modality].patch_width
        patches_NW = torch.empty(sum(counts), width, dtype=self.dtype, device=self.device)
        for rows_NW, item in zip(torch.split(patches_NW, counts), items, strict=True):
            self._patchify[item.modality].write(rows_NW, item.features)
        return patches_NW

    def _check(self, item: EncoderInput) -> None:
        frames, rows, columns = item.grid_thw
        if item.modality not in self._specs:
            raise ValueError(f"this encoder takes {' and '.join(self._specs)}, not {item.modality}")
        spec = self._specs[item.modality]
        size, merge = spec.patch_size, spec.merge_size
        if item.features.dtype != torch.uint8:
            raise ValueError(f"pixels must be uint8, not {item.features.dtype}")
        shape: tuple[int, ...] = (rows * size, columns * size, CHANNELS)
        if item.modality == "video":
            shape = (frames * spec.temporal_patch_size, *shape)
        elif frames != 1:
            raise ValueError(f"an image of {frames} frames")
        if tuple(item.features.shape) != shape or rows % merge or columns % merge:
            raise ValueError(
                f"pixels of shape {tuple(item.features.shape)} do not fit a {frames}x{rows}x{columns} grid"
            )
        if item.num_tokens != prod(item.grid_thw) // merge**2:
            raise ValueError(f"a {frames}x{rows}x{columns} grid gives not {item.num_tokens} tokens")
