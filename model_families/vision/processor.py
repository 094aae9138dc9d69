"""Prompt layout and positions of the Qwen-VL families: a placeholder grows to its picture's or video's
tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from contracts.media import MediaItem, Modality, Prompt
from contracts.specs import MediaSpecs
from model_families.checkpoint import read_config
from model_families.prompt import PromptBuilder, find_placeholders
from model_families.vision.config import MediaTokens, VisionConfig
from model_families.vision.image_spec import read_image_spec
from model_families.vision.positions import GridSpan, mrope_positions
from model_families.vision.video_spec import Rule, read_video_spec

PLACEHOLDERS: Mapping[Modality, str] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


@dataclass(frozen=True)
class FrameStamps:
    """Qwen3-VL: before each frame of a video its time as text, and markers around the frame."""

    tokenizer: Tokenizer
    start_id: int
    end_id: int

    def before(self, time_s: float) -> list[int]:
        stamp: list[int] = self.tokenizer.encode(f"<{time_s:.1f} seconds>", add_special_tokens=False).ids
        return [*stamp, self.start_id]


@dataclass(frozen=True)
class VisionProcessor:
    """`positions_per_s` (Qwen2.5-VL): temporal positions of a second of video; None: one a frame."""

    media_specs: MediaSpecs
    media_tokens: MediaTokens
    positions_per_s: float | None = None
    stamps: FrameStamps | None = None

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        ids = self.media_tokens
        modality_of: dict[int, Modality] = {ids.image_token_id: "image", ids.video_token_id: "video"}
        builder = PromptBuilder(items)
        done = 0
        for place, index in find_placeholders(token_ids, modality_of, items):
            builder.token_ids += token_ids[done:place]
            done = place + 1
            item = items[index]
            assert item.num_tokens == prod(self._grid(item)), "an item's token count and grid differ"
            if item.modality == "video" and self.stamps is not None:
                self._stamped(builder, index, self.stamps)
            else:
                builder.media(token_ids[place], index, item.num_tokens)
        builder.token_ids += token_ids[done:]
        return builder.prompt()

    def _stamped(self, builder: PromptBuilder, index: int, stamps: FrameStamps) -> None:
        item = builder.items[index]
        frames, rows, columns = self._grid(item)
        assert len(item.timestamps_s) == frames, "a video without the times of its frames"
        for time_s in item.timestamps_s:
            builder.token_ids += stamps.before(time_s)
            builder.media(self.media_tokens.video_token_id, index, rows * columns)
            builder.token_ids.append(stamps.end_id)

    def positions(self, prompt: Prompt) -> tuple[npt.NDArray[np.int64], int]:
        spans = []
        for span in prompt.spans:
            item = prompt.items[span.item_index]
            frames, rows, columns = self._grid(item)
            if span.length < item.num_tokens:  # one frame of several
                frames = 1
            interval = 1.0
            if item.modality == "video" and self.positions_per_s is not None:
                interval = self.positions_per_s * item.seconds_per_grid
            spans.append(GridSpan(span.offset, (frames, rows, columns), interval))
            assert spans[-1].end == span.end, "a span of another length than its grid"
        return mrope_positions(len(prompt.token_ids), spans)

    def _grid(self, item: MediaItem) -> tuple[int, int, int]:
        """In tokens: frames, rows, columns."""
        assert self.media_specs.image is not None
        merge = self.media_specs.image.merge_size
        frames, rows, columns = item.grid_thw
        return frames, rows // merge, columns // merge


def open_vision_processor(
    folder: Path,
    vision: VisionConfig,
    rule: Rule = "qwen2_vl",
    *,
    positions_per_s: float | None = None,
    stamped: bool = False,
) -> VisionProcessor:
    """Raises EngineError when the checkpoint's preprocessing does not fit its tower."""
    image = read_image_spec(folder, vision)
    tokens = read_config(folder, MediaTokens)
    stamps = None
    if stamped:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        stamps = FrameStamps(tokenizer, tokens.vision_start_token_id, tokens.vision_end_token_id)
    specs = MediaSpecs(image=image, video=read_video_spec(folder, image, rule))
    return VisionProcessor(specs, tokens, positions_per_s, stamps)
