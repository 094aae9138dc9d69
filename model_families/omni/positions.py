"""TMRoPE positions of the omni families: text counts up on all three axes, sound too, one a token; pictures
spread over rows and columns, and a video also over time.

A video and its sound track begin at the same position. Text goes on after the last run before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contracts.media import MediaItem, MediaSpan, Prompt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class OmniPositions:
    """`whole_times`: times of frames are rounded down (Qwen2.5-Omni). `paired_markers`: the two tokens before
    a video with sound share a position, as do the two after it (Qwen2.5-Omni)."""

    merge_size: int
    positions_per_s: float
    whole_times: bool
    paired_markers: bool

    def __call__(self, prompt: Prompt) -> tuple[Floats, float]:
        """[3, T] float32 (t, h, w), and delta: token i ≥ T has position i + delta."""
        positions = np.empty((3, len(prompt.token_ids)), dtype=np.float32)
        done, following = 0, np.float32(0)  # tokens filled; the position of the next one
        paired = False
        for group in _groups(prompt):
            is_pair = len({span.item_index for span in group}) > 1
            first, last = group[0], group[-1]
            following = _count_up(positions, done, first.offset, following, paired)
            if is_pair and self.paired_markers:  # the marker of sound beside that of pictures
                following -= np.float32(1)
                positions[:, first.offset - 1] = following - np.float32(1)
            self._place(positions, prompt, group, following)
            following = self._end_of_last(positions, prompt, group)
            done, paired = last.end, is_pair and self.paired_markers
        _count_up(positions, done, len(prompt.token_ids), following, paired)
        highest = positions.max(initial=np.float32(-1))
        return positions, float(highest) + 1 - len(prompt.token_ids)

    def _place(self, positions: Floats, prompt: Prompt, group: list[MediaSpan], start: np.float32) -> None:
        taken: dict[int, int] = {}
        tables = {s.item_index: self._table(prompt.items[s.item_index]) for s in group}
        for span in group:
            row = taken.get(span.item_index, 0)
            table = tables[span.item_index]
            positions[:, span.offset : span.end] = table[:, row : row + span.length] + start
            taken[span.item_index] = row + span.length

    def _table(self, item: MediaItem) -> Floats:
        """[3, tokens of the item] from zero."""
        if item.modality == "audio":
            return np.broadcast_to(np.arange(item.num_tokens, dtype=np.float32), (3, item.num_tokens))
        frames, rows, columns = item.grid_thw
        grid = (frames, rows // self.merge_size, columns // self.merge_size)
        t, h, w = np.indices(grid, dtype=np.float32).reshape(3, -1)
        t = t * np.float32(item.seconds_per_grid) * np.float32(self.positions_per_s)
        return np.stack([np.floor(t) if self.whole_times else t, h, w])

    def _end_of_last(self, positions: Floats, prompt: Prompt, group: list[MediaSpan]) -> np.float32:
        """One more than the highest position of the last run, which need not be the highest of all."""
        last = group[-1]
        run = positions[:, last.offset : last.end]
        return np.float32(run.max()) + np.float32(1)


def _groups(prompt: Prompt) -> list[list[MediaSpan]]:
    """Spans that share a beginning: a video's and its sound track's, in their order."""
    groups: list[list[MediaSpan]] = []
    leader_of = {index: index - 1 if item.of_video else index for index, item in enumerate(prompt.items)}
    for span in prompt.spans:
        leader = leader_of[span.item_index]
        if groups and leader_of[groups[-1][0].item_index] == leader:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _count_up(positions: Floats, start: int, end: int, first: np.float32, paired: bool) -> np.float32:
    """Text from `first`; `paired`: its first two tokens share that position. Returns the next position."""
    count = np.arange(end - start, dtype=np.float32)
    if paired:
        count = np.maximum(count - 1, 0)
    positions[:, start:end] = count + first
    return first + np.float32(max(end - start - paired, 0))
