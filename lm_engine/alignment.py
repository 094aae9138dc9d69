"""Tokens laid along the encoder positions that they attend to: smoothed cross-attention, then the cheapest
monotonic path through it (dynamic time warping).

Shapes: N heads, U tokens, P positions.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

FILTER_WIDTH = 7
_DIAGONAL, _DOWN, _RIGHT = 0, 1, 2


def smoothed(weights_NUP: Tensor) -> Tensor:
    """[U, P]: how much more than other tokens each attends to a position, in standard deviations, through a
    running median along the positions, averaged over the heads."""
    std_N1P, mean_N1P = torch.std_mean(weights_NUP, dim=1, keepdim=True, unbiased=False)
    scaled_NUP = (weights_NUP - mean_N1P) / std_N1P.clamp(min=1e-20)
    return _median(scaled_NUP).mean(0)


def _median(x_NUP: Tensor) -> Tensor:
    reach = FILTER_WIDTH // 2
    if x_NUP.shape[-1] <= reach:
        return x_NUP
    padded = functional.pad(x_NUP, (reach, reach), mode="reflect")
    return padded.unfold(-1, FILTER_WIDTH, 1).sort(dim=-1).values[..., reach]


def first_positions(affinity_UP: NDArray[np.floating]) -> tuple[int, ...]:
    """Where each token begins on the path that goes from the first token and position to the last, never
    back,
    and gathers the most affinity."""
    num_tokens, num_positions = affinity_UP.shape
    trace = _trace(-affinity_UP.astype(np.float64))
    first = [0] * num_tokens
    i, j = num_tokens, num_positions
    while i > 0 and j > 0:
        first[i - 1] = j - 1
        step = int(trace[i, j])
        i -= step != _RIGHT
        j -= step != _DOWN
    return tuple(first)


def _trace(cost_UP: NDArray[np.float64]) -> NDArray[np.int8]:
    """[U + 1, P + 1]: how the cheapest path came to each cell, all cells of an anti-diagonal at a time."""
    num_tokens, num_positions = cost_UP.shape
    total = np.full((num_tokens + 1, num_positions + 1), np.inf, dtype=np.float32)
    trace = np.full((num_tokens + 1, num_positions + 1), _RIGHT, dtype=np.int8)
    total[0, 0] = 0
    for diagonal in range(2, num_tokens + num_positions + 1):
        i = np.arange(max(1, diagonal - num_positions), min(num_tokens, diagonal - 1) + 1)
        j = diagonal - i
        across, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        is_across = (across < down) & (across < right)
        is_down = (down < across) & (down < right)
        best = np.where(is_across, across, np.where(is_down, down, right))
        total[i, j] = cost_UP[i - 1, j - 1] + best
        trace[i, j] = np.where(is_across, _DIAGONAL, np.where(is_down, _DOWN, _RIGHT))
    return trace
