"""What a family does with a request's tokens and media items before the language model sees them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from contracts.errors import BadRequest
from contracts.media import MediaItem, Prompt
from contracts.specs import MediaSpecs

Positions = npt.NDArray[np.int64] | npt.NDArray[np.float32]


class Processor(Protocol):
    """Stateless; see `Family` for the contracts of `layout` and `positions`."""

    @property
    def media_specs(self) -> MediaSpecs: ...

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt: ...

    def positions(self, prompt: Prompt) -> tuple[Positions, float]: ...


class TextProcessor:
    """Families without media: one position axis, counting up."""

    media_specs = MediaSpecs()

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        if items:
            raise BadRequest(f"this model takes text only, not {items[0].modality}", param="messages")
        return Prompt(token_ids)

    def positions(self, prompt: Prompt) -> tuple[Positions, int]:
        return np.arange(len(prompt.token_ids), dtype=np.int64)[None], 0
