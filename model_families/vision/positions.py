"""M-RoPE positions of a prompt with pictures: text counts up on all three axes, a picture spreads over them.

After a picture, text goes on from where its longer side ended: pictures take few positions, many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_families.vision.packing import Grid

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GridSpan:
    """Prompt tokens from `offset` that stand for a grid in tokens (after merging).

    `frame_interval`: temporal positions from one frame to the next; products are rounded down.
    Qwen2-VL videos: 1. Qwen2.5-VL videos: tokens_per_second · seconds per frame. Qwen3-VL gives each frame a
    span of its own, with its timestamp as text between.
    """

    offset: int
    grid: Grid
    frame_interval: float = 1.0

    @property
    def end(self) -> int:
        frames, rows, columns = self.grid
        return self.offset + frames * rows * columns


def mrope_positions(num_tokens: int, spans: Sequence[GridSpan]) -> tuple[Ints, int]:
    """[3, num_tokens] (t, h, w), and delta: token i ≥ num_tokens has position i + delta. Spans ascend."""
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = following = 0  # tokens filled; the position of the next text token
    for span in spans:
        assert done <= span.offset, "spans overlap"
        assert span.end <= num_tokens, "a span beyond the prompt"
        following = _count_up(positions, done, span.offset, following)
        t, h, w = np.indices(span.grid).reshape(3, -1)
        t = (t.astype(np.float32) * np.float32(span.frame_interval)).astype(np.int64)
        positions[:, span.offset : span.end] = np.stack([t, h, w]) + following
        following += max(span.grid[1:])
        done = span.end
    _count_up(positions, done, num_tokens, following)
    return positions, int(positions.max(initial=-1)) + 1 - num_tokens


def _count_up(positions: Ints, start: int, end: int, first: int) -> int:
    positions[:, start:end] = np.arange(first, first + end - start)
    return first + end - start
