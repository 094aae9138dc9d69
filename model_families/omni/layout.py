"""Prompt layout of the omni families: placeholders grow to their items' tokens; a video's sound track goes
between its frames.

Times are counted in position ids: `positions_per_s` of them a second, one per token of sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from contracts.media import MediaItem, Modality, Prompt
from model_families.prompt import PromptBuilder, find_placeholders

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OmniTokens:
    """Ids of the placeholders and of what surrounds sound."""

    image: int
    video: int
    audio: int
    audio_start: int
    audio_end: int

    @property
    def modality_of(self) -> dict[int, Modality]:
        return {self.image: "image", self.video: "video", self.audio: "audio"}


class Interleave(Protocol):
    """How a family orders the tokens of a video and of its sound track."""

    def __call__(self, video_times: Times, num_audio: int) -> list[tuple[bool, int]]:
        """Runs of tokens in their order: (whether of video, how many). `video_times`: of each token, in
        position ids, ascending."""
        ...


def interleave_by_chunks(positions_per_chunk: int) -> Interleave:
    """Qwen2.5-Omni: of each stretch of time, first what is seen in it, then what is heard."""

    def runs(video_times: Times, num_audio: int) -> list[tuple[bool, int]]:
        video = _chunk_sizes(video_times, positions_per_chunk)
        audio = _chunk_sizes(np.arange(num_audio, dtype=np.float64), positions_per_chunk)
        order: list[tuple[bool, int]] = []
        for index in range(max(len(video), len(audio))):
            order += [(True, size) for size in video[index : index + 1] if size]
            order += [(False, size) for size in audio[index : index + 1] if size]
        return order

    return runs


def _chunk_sizes(times: Times, positions_per_chunk: int) -> list[int]:
    """Tokens of every chunk. A chunk ends at the first token past its time and only there: a token that is
    late by several chunks still goes into the next one, as in the reference."""
    sizes: list[int] = []
    start = 0
    for index, time in enumerate(times):
        if time >= (len(sizes) + 1) * positions_per_chunk:
            sizes.append(index - start)
            start = index
    return [*sizes, len(times) - start]


def interleave_by_time(video_times: Times, num_audio: int) -> list[tuple[bool, int]]:
    """Qwen3-Omni: by time, the picture first where both are due; then what is left of either."""
    order: list[tuple[bool, int]] = []
    heard = 0
    times, counts = np.unique(video_times, return_counts=True)
    for time, count in zip(times, counts, strict=True):
        before = min(max(int(np.ceil(time)), heard), num_audio) - heard
        if before:
            order.append((False, before))
            heard += before
        order.append((True, int(count)))
    if heard < num_audio:
        order.append((False, num_audio - heard))
    return order


@dataclass(frozen=True)
class OmniLayout:
    tokens: OmniTokens
    merge_size: int
    positions_per_s: float
    interleave: Interleave

    def __call__(self, token_ids: list[int], items: Sequence[MediaItem]) -> Prompt:
        """Raises BadRequest when placeholders and items do not match in kind and number."""
        places = find_placeholders(token_ids, self.tokens.modality_of, items)
        builder = PromptBuilder(items)
        done = 0
        for place, index in places:
            builder.token_ids += token_ids[done:place]
            done = place + 1
            if index + 1 < len(items) and items[index + 1].of_video:
                self._video_with_sound(builder, index)
            else:
                builder.media(token_ids[place], index, items[index].num_tokens)
        builder.token_ids += token_ids[done:]
        return builder.prompt()

    def _video_with_sound(self, builder: PromptBuilder, index: int) -> None:
        video, audio = builder.items[index : index + 2]
        assert (video.modality, audio.modality) == ("video", "audio"), "a sound track without its video"
        frames, rows, columns = video.grid_thw
        per_frame = rows * columns // self.merge_size**2
        frame_times = np.arange(frames, dtype=np.float64) * video.seconds_per_grid * self.positions_per_s
        builder.token_ids.append(self.tokens.audio_start)
        for is_video, length in self.interleave(np.repeat(frame_times, per_frame), audio.num_tokens):
            if is_video:
                builder.media(self.tokens.video, index, length)
            else:
                builder.media(self.tokens.audio, index + 1, length)
        builder.token_ids.append(self.tokens.audio_end)
