"""Mel frames of several sounds cut into chunks of one length, and what is left of them after convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


def chunk_lengths(num_frames: Sequence[int], chunk: int) -> Ints:
    """Frames of every chunk of every sound, in order: the last one of a sound may be shorter."""
    lengths: list[int] = []
    for frames in num_frames:
        assert frames > 0, "an empty sound"
        lengths += [chunk] * (frames // chunk)
        if frames % chunk:
            lengths.append(frames % chunk)
    return np.array(lengths, dtype=np.int64)


def stack_chunks(features: Sequence[Tensor], chunk: int) -> Tensor:
    """[mels, frames] each → [chunks, mels, length], in order: `length` is that of the longest chunk, shorter
    ones end in zeros."""
    parts = [part for mel in features for part in torch.split(mel, chunk, dim=1)]
    length = max(part.shape[1] for part in parts)
    stacked = parts[0].new_zeros(len(parts), parts[0].shape[0], length)
    for row, part in zip(stacked, parts, strict=True):
        row[:, : part.shape[1]] = part
    return stacked


def halved(length: Ints) -> Ints:
    """Length after a convolution of kernel 3, stride 2 and padding 1."""
    return (length - 1) // 2 + 1


def first_rows(lengths: Ints, stride: int, device: torch.device) -> Tensor:
    """Row numbers of the first `lengths[i]` rows of every block i of `stride` rows."""
    inside = np.arange(stride) < lengths[:, None]
    return torch.from_numpy(np.flatnonzero(inside)).to(device)
