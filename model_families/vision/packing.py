"""Where every patch of a packed batch stands, and which patches attend to each other. No loop over images.

Patch order everywhere: frame by frame, merge blocks row by row, and inside a block row by row again.
N patches, F frames (an image is one frame), U merge blocks ("units", one token each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Grid = tuple[int, int, int]  # frames, rows and columns in patches
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PatchGrid:
    """Coordinates of the N patches of a batch, on the host."""

    merge_size: int
    frame_N: Ints  # which frame of the batch
    row_N: Ints
    column_N: Ints
    height_N: Ints  # of the patch's frame
    width_N: Ints
    frame_lengths_F: Ints

    @property
    def num_patches(self) -> int:
        return len(self.frame_N)


def pack_grids(grids: Sequence[Grid], merge_size: int) -> PatchGrid:
    grid_B3 = np.array(grids, dtype=np.int64).reshape(-1, 3)
    assert not (grid_B3[:, 1:] % merge_size).any(), "sides must be multiples of the merge size"
    size_F2 = np.repeat(grid_B3[:, 1:], grid_B3[:, 0], axis=0)
    lengths_F = size_F2.prod(axis=1)
    frame_N = np.repeat(np.arange(len(size_F2)), lengths_F)
    within_N = np.arange(len(frame_N)) - (np.cumsum(lengths_F) - lengths_F)[frame_N]
    height_N, width_N = size_F2[frame_N].T
    unit_N, inner_N = np.divmod(within_N, merge_size**2)
    unit_row_N, unit_column_N = np.divmod(unit_N, width_N // merge_size)
    return PatchGrid(
        merge_size=merge_size,
        frame_N=frame_N,
        row_N=unit_row_N * merge_size + inner_N // merge_size,
        column_N=unit_column_N * merge_size + inner_N % merge_size,
        height_N=height_N,
        width_N=width_N,
        frame_lengths_F=lengths_F,
    )


def window_order(grid: PatchGrid, window_units: int) -> tuple[Ints, Ints]:
    """The order of units that puts each `window_units`² window in one run, and the lengths in patches.

    Windows lie row by row in each frame and are cut off at its right and lower edge.
    """
    merge = grid.merge_size
    first = slice(None, None, merge**2)  # the first patch of each unit
    frame_U = grid.frame_N[first]
    window_row_U = grid.row_N[first] // merge // window_units
    window_column_U = grid.column_N[first] // merge // window_units
    down_U = _ceil_divide(grid.height_N[first] // merge, window_units)
    across_U = _ceil_divide(grid.width_N[first] // merge, window_units)
    first_unit_F = np.searchsorted(frame_U, np.arange(len(grid.frame_lengths_F)))
    windows_F = (down_U * across_U)[first_unit_F]
    before_F = np.cumsum(windows_F) - windows_F
    window_U = before_F[frame_U] + window_row_U * across_U + window_column_U
    # Stable: inside a window, units keep their row-by-row order.
    return np.argsort(window_U, kind="stable"), np.bincount(window_U) * merge**2


def _ceil_divide(a: Ints, b: int) -> Ints:
    return -(-a // b)


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of one length. `rows` selects them all: a slice when they are adjacent."""

    count: int
    length: int
    rows: slice | Tensor


class Segments:
    """Runs of a packed sequence that attend within themselves only. Device tensors are made once, if used."""

    def __init__(self, lengths_S: Ints, device: torch.device) -> None:
        assert lengths_S.size, "no segments"
        assert lengths_S.min() > 0, "an empty segment"
        self.lengths_S = lengths_S
        self.device = device

    @cached_property
    def max_length(self) -> int:
        return int(self.lengths_S.max())

    @cached_property
    def starts(self) -> Tensor:
        """[S+1] int32: first row of each segment, then the total."""
        return torch.from_numpy(np.append(0, np.cumsum(self.lengths_S)).astype(np.int32)).to(self.device)

    @cached_property
    def mask(self) -> Tensor:
        """[N, N] bool: whether two rows are of one segment."""
        segment_N = torch.from_numpy(np.repeat(np.arange(len(self.lengths_S)), self.lengths_S))
        segment_N = segment_N.to(self.device)
        return segment_N[:, None] == segment_N

    @cached_property
    def groups(self) -> tuple[SegmentGroup, ...]:
        starts_S = np.cumsum(self.lengths_S) - self.lengths_S
        return tuple(
            self._group(starts_S[self.lengths_S == length], int(length))
            for length in np.unique(self.lengths_S)
        )

    def _group(self, starts_G: Ints, length: int) -> SegmentGroup:
        count, first = len(starts_G), int(starts_G[0])
        if starts_G[-1] - first == (count - 1) * length:
            return SegmentGroup(count, length, slice(first, first + count * length))
        rows = (starts_G[:, None] + np.arange(length)).reshape(-1)
        return SegmentGroup(count, length, torch.from_numpy(rows).to(self.device))
