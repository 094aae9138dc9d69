"""What the omni families do with a request's tokens and items, put together from their rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from contracts.media import MediaItem, Prompt
from contracts.specs import MediaSpecs
from model_families.checkpoint import checkpoint_error
from model_families.omni.layout import OmniLayout, OmniTokens
from model_families.omni.positions import Floats
from model_families.processing import Positions


class OmniConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of the thinker: ids of tokens by either spelling, and how time is counted."""

    audio_token_id: int | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    audio_token_index: int | None = None
    image_token_index: int | None = None
    video_token_index: int | None = None
    audio_start_token_id: int | None = None
    audio_end_token_id: int | None = None
    position_id_per_seconds: float | None = None
    seconds_per_chunk: float | None = None

    def tokens(self) -> OmniTokens:
        found: dict[str, int | None] = {
            "image": self.image_token_id if self.image_token_id is not None else self.image_token_index,
            "video": self.video_token_id if self.video_token_id is not None else self.video_token_index,
            "audio": self.audio_token_id if self.audio_token_id is not None else self.audio_token_index,
            "audio_start": self.audio_start_token_id,
            "audio_end": self.audio_end_token_id,
        }
        if self.audio_end_token_id is None and self.audio_start_token_id is not None:
            found["audio_end"] = self.audio_start_token_id + 1  # as in every published vocabulary
        ids = {name: token for name, token in found.items() if token is not None}
        if missing := sorted(found.keys() - ids.keys()):
            raise checkpoint_error(f"config.json: the thinker names no token id for {', '.join(missing)}")
        return OmniTokens(**ids)


class Placing(Protocol):
    def __call__(self, prompt: Prompt) -> tuple[Floats, float]:
        """[3, T] float32 (t, h, w), and delta: token i ≥ T has position i + delta."""
        ...


@dataclass(frozen=True)
class OmniProcessor:
    media_specs: MediaSpecs
    expand: OmniLayout
    place: Placing

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        return self.expand(token_ids, items)

    def positions(self, prompt: Prompt) -> tuple[Positions, float]:
        return self.place(prompt)
