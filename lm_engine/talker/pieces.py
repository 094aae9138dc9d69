"""The input rows of a step, from the pieces that its plan names.

Shapes: T rows of the step, W width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lm_engine.talker.plan import RowPiece
from lm_engine.transfer import to_device

MANY = 8  # single rows: fewer are sliced and joined in less time than they are looked up


def rows_of(pieces: Sequence[RowPiece], device: torch.device) -> Tensor:
    """[T, W], of its own memory. Blocks until the pieces' rows are made."""
    if len(pieces) >= MANY and all(piece.length == 1 for piece in pieces):
        return looked_up(pieces, device)
    return joined(pieces)


def joined(pieces: Sequence[RowPiece]) -> Tensor:
    """The plain path: a slice for each piece."""
    return torch.cat([piece.rows.result()[piece.start : piece.start + piece.length] for piece in pieces])


def looked_up(pieces: Sequence[RowPiece], device: torch.device) -> Tensor:
    """Of pieces of one row: most are of one table or of its end, so a look-up in each instead of a slice for
    each row, every one of which may have to wait for the interpreter."""
    places: dict[int, list[int]] = {}
    for place, piece in enumerate(pieces):
        places.setdefault(id(piece.rows), []).append(place)
    order = [place for of_one in places.values() for place in of_one]
    starts = [pieces[place].start for place in order]
    index_2T = to_device(np.array([starts, np.argsort(order)], dtype=np.int64), device)
    sizes = [len(of_one) for of_one in places.values()]
    parts = [
        torch.index_select(pieces[of_one[0]].rows.result(), 0, index_K)
        for of_one, index_K in zip(places.values(), torch.split(index_2T[0], sizes), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.index_select(torch.cat(parts), 0, index_2T[1])
