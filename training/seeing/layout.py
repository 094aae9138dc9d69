"""What a picture's tokens are to say to the language model: phrases in reading order, where things are.

A cell is one token of the tower; cells count row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]  # [cells]: the token whose embedding a cell is to be, -1: none


@dataclass(frozen=True)
class Phrase:
    """Words, each spoken as the language model writes it, from a cell on."""

    cell: int
    names: tuple[str, ...]


def letter_cells(columns_of: Sequence[int], row: int, columns: int) -> list[int]:
    """A cell for each letter of a line: its own, or the next that is free; the line moves left where the
    row ends, and goes on in the next row when it is longer than one. `columns_of`: ascending."""
    cells: list[int] = []
    for column in columns_of:
        cells.append(max(row * columns + column, cells[-1] + 1 if cells else 0))
    if len(cells) <= columns:
        _keep_below(cells, [1] * len(cells), (row + 1) * columns)
    return cells


def lay_out(phrases: Sequence[tuple[int, tuple[int, ...]]], num_cells: int, columns: int) -> Tokens:
    """Phrases (first cell, tokens) one after the other, each whole, at its cell or as soon after it as those
    before leave room. A phrase that would run over the end of its row begins earlier in it, those at the end
    of the picture begin early enough. What does not fit at all is cut off."""
    ordered = sorted(phrases, key=lambda phrase: phrase[0])
    starts: list[int] = []
    free = 0
    for cell, tokens in ordered:
        if len(tokens) <= columns:
            cell = min(cell, (cell // columns + 1) * columns - len(tokens))
        starts.append(max(cell, free))
        free = starts[-1] + len(tokens)
    _keep_below(starts, [len(tokens) for _, tokens in ordered], num_cells)
    laid = np.full(num_cells, -1, np.int32)
    for start, (_, tokens) in zip(starts, ordered, strict=True):
        shown = tokens[: num_cells - max(start, 0)]
        laid[max(start, 0) : max(start, 0) + len(shown)] = shown
    return laid


def _keep_below(starts: list[int], lengths: Sequence[int], end: int) -> None:
    """Moves what lies too far back, and what is in its way."""
    for index in range(len(starts) - 1, -1, -1):
        starts[index] = min(starts[index], end - lengths[index])
        end = starts[index]
