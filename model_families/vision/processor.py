"""Prompt layout and positions of the Qwen-VL families: one placeholder per picture grows to its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from contracts.errors import BadRequest
from contracts.media import MediaItem, MediaSpan, Modality, Prompt
from contracts.specs import ImageSpec, MediaSpecs
from model_families.checkpoint import read_config
from model_families.processing import Positions
from model_families.vision.config import MediaTokens, VisionConfig
from model_families.vision.image_spec import read_image_spec
from model_families.vision.positions import GridSpan, mrope_positions

PLACEHOLDERS: Mapping[Modality, str] = {"image": "<|vision_start|><|image_pad|><|vision_end|>"}


@dataclass(frozen=True)
class VisionProcessor:
    image_spec: ImageSpec
    media_tokens: MediaTokens

    @property
    def media_specs(self) -> MediaSpecs:
        return MediaSpecs(image=self.image_spec)

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        ids_T = np.array(token_ids, dtype=np.int64)
        if (ids_T == self.media_tokens.video_token_id).any():
            raise BadRequest("this model takes no video yet; send frames as images", param="messages")
        places = np.flatnonzero(ids_T == self.media_tokens.image_token_id)
        self._check(len(places), items)
        counts_T = np.ones(len(ids_T), dtype=np.int64)
        counts_T[places] = [item.num_tokens for item in items]
        offsets = (np.cumsum(counts_T) - counts_T)[places].tolist()
        spans = tuple(
            MediaSpan(offset, item.num_tokens, index, item.pixel_digest)
            for index, (offset, item) in enumerate(zip(offsets, items, strict=True))
        )
        return Prompt(np.repeat(ids_T, counts_T).tolist(), tuple(items), spans)

    def positions(self, prompt: Prompt) -> tuple[Positions, int]:
        merge = self.image_spec.merge_size
        spans = []
        for span in prompt.spans:
            frames, rows, columns = prompt.items[span.item_index].grid_thw
            spans.append(GridSpan(span.offset, (frames, rows // merge, columns // merge)))
            assert spans[-1].end == span.end, "a span of another length than its grid"
        return mrope_positions(len(prompt.token_ids), spans)

    def _check(self, num_placeholders: int, items: list[MediaItem]) -> None:
        if num_placeholders != len(items):
            raise BadRequest(
                f"the prompt has {num_placeholders} image placeholders but {len(items)} images came with it",
                param="messages",
            )
        for item in items:
            if item.modality != "image":
                raise BadRequest(f"this model takes images, not {item.modality}", param="messages")
            merged = prod(item.grid_thw) // self.image_spec.merge_size**2
            assert item.num_tokens == merged > 0, "an item's token count and grid differ"


def open_vision_processor(folder: Path, vision: VisionConfig) -> VisionProcessor:
    """Raises EngineError when the checkpoint's preprocessing does not fit its tower."""
    return VisionProcessor(read_image_spec(folder, vision), read_config(folder, MediaTokens))
