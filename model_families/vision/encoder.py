"""A vision tower as the encoder pool drives it: checks the items, packs them, runs one forward, splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Generic

import torch
from torch import Tensor, nn

from contracts.media import Modality
from contracts.specs import ImageSpec, MediaSpecs, VideoSpec
from encoder_pool.graphs import Forward, GraphedTower
from encoder_pool.model import EncoderInput, GraphBounds
from model_families.vision.layouts import Layouts, LayoutT
from model_families.vision.packing import Grid
from model_families.vision.patchify import CHANNELS, Patchifier

Grids = tuple[Grid, ...]


class VisionTower(nn.Module, ABC, Generic[LayoutT]):
    """The mathematics of one family's tower."""

    embedding_width: int
    blocks: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self._layouts: Layouts[LayoutT] = Layouts(self._lay_out)

    def forward(self, patches_NW: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[N, patch width] → [tokens of all items, embedding_width]."""
        return self.embed(patches_NW, self.layout(grids, patches_NW.device))

    def layout(self, grids: Sequence[Grid], device: torch.device) -> LayoutT:
        return self._layouts.of(grids, device)

    @abstractmethod
    def embed(self, patches_NW: Tensor, layout: LayoutT) -> Tensor:
        """As `forward`. Of the host it needs nothing that a batch of the same layout did not need before."""

    @abstractmethod
    def _lay_out(self, grids: Sequence[Grid], device: torch.device) -> LayoutT: ...


class VisionEncoder(GraphedTower[Grids], Generic[LayoutT]):
    """An EncoderModel of pictures and, where the family takes them, videos. Holds weights, no request
    state."""

    def __init__(
        self,
        tower: VisionTower[LayoutT],
        specs: MediaSpecs,
        encoder_id: str,
        device: torch.device,
        dtype: torch.dtype,
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
        grids = tuple(item.grid_thw for item in items)
        return self.compute(grids, [item.num_tokens for item in items], partial(self._write, items))

    def _write(self, items: list[EncoderInput], patches_NW: Tensor) -> None:
        """Those of all items, in order."""
        counts = [prod(item.grid_thw) for item in items]
        for rows_NW, item in zip(torch.split(patches_NW, counts), items, strict=True):
            self._patchify[item.modality].write(rows_NW, item.features)

    # --- graphs -------------------------------------------------------------------------------------------
    def allow_graphs(self, bounds: GraphBounds, *, ahead: bool) -> None:
        if self._specs:
            super().allow_graphs(bounds, ahead=ahead)

    def max_rows(self, bounds: GraphBounds) -> int:
        return min(bounds.max_patches, bounds.max_tokens * self._merge_size**2)

    def input_shape(self, key: Grids) -> tuple[int, ...]:
        width = next(iter(self._patchify.values())).patch_width
        return sum(map(prod, key)), width

    def num_tokens(self, key: Grids) -> int:
        return sum(map(prod, key)) // self._merge_size**2

    def prepared(self, key: Grids) -> Forward:
        layout = self._tower.layout(key, self.device)
        return lambda patches_NW: self._tower.embed(patches_NW, layout)

    def largest(self, num_rows: int) -> Grids:
        """One picture, all of whose patches see each other."""
        merge = self._merge_size
        return ((1, merge, num_rows // merge**2 * merge),)

    @property
    def _merge_size(self) -> int:
        return next(iter(self._specs.values())).merge_size

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
