"""The seam between the encoder pool and a family's vision or audio tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from contracts.media import Modality


@dataclass(frozen=True)
class EncoderInput:
    """`features` as preprocessed: images uint8 [height, width, 3] (resized, not normalised), on the host."""

    modality: Modality
    features: Tensor
    grid_thw: tuple[int, int, int]
    num_tokens: int


@dataclass(frozen=True)
class GraphBounds:
    """Of a tower's CUDA graphs. `num_bytes`: of the memory that all of them share. The others are a captured
    batch's, see `encoder_pool.batcher`; sounds have no patches."""

    num_bytes: int
    max_tokens: int
    max_patches: int


class EncoderModel(Protocol):
    """A tower. `encode` packs the items into one variable-length forward; no item sees another."""

    encoder_id: str  # identifies weights and configuration in the embedding cache's keys
    embedding_width: int  # hidden size of the LM times (1 + deepstack levels)
    dtype: torch.dtype
    device: torch.device

    def encode(self, items: list[EncoderInput]) -> list[Tensor]:
        """One [num_tokens, embedding_width] tensor per item, in order, on `device`. Does not keep the
        features."""
        ...

    @property
    def num_replays(self) -> int:
        """Batches that were computed by a CUDA graph of an earlier one."""
        ...

    def allow_graphs(self, bounds: GraphBounds, *, ahead: bool) -> None:
        """From now on batches of a layout that comes again are computed by CUDA graph, where the tower can.
        `ahead`: the largest is captured now, in whose memory others find room."""
        ...

    def drop_graphs(self) -> None:
        """They are captured again as batches come. Idempotent; does not wait for the device."""
        ...


@runtime_checkable
class Listener(Protocol):
    """A tower that can also write down what is said."""

    def heard(self, items: list[EncoderInput]) -> list[str]:
        """One text per sound, in order; "" where no word is heard. Does not keep the features."""
        ...
