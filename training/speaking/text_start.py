"""What the talker's text side begins as: pieces that share a sound look alike before anything is learned.

Rows of the text table stand for pieces by number alone. Read by layers that are drawn, they lie in a few
directions, and are told apart only after thousands of steps: so the first layer begins as one that spreads
them evenly, the second as what makes of them, piece by piece, the sum of its sounds' vectors.
Shapes: N pieces, X width of the text table, F inner width, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from model_families.omnistage_nano.pieces import BLANK, LETTERS, STRESSES, Pieces
from training.speaking.talker import TextProjection

SCALE = 0.1  # of a sound's vector, beside codes of 0.06
FLOOR, RIDGE = 0.03, 0.1  # so that what hardly differs is not blown up
SEED = 20260104


def sound_vectors(pieces: Pieces, width: int) -> Tensor:
    """[N, H]: of each piece the sum of those of its symbols: sounds by their place, stresses, the blank."""
    generator = torch.Generator().manual_seed(SEED)
    drawn: dict[tuple[str, str, int], Tensor] = {}

    def vector(piece: str) -> Tensor:
        kind, body = (LETTERS, piece[1:]) if piece.startswith(LETTERS) else ("", piece)
        keys = [(kind, BLANK, 0)] if body.startswith(BLANK) else []
        keys += [(kind, symbol, place) for place, symbol in enumerate(_symbols(body.strip(BLANK)))]
        for key in keys:
            if key not in drawn:
                drawn[key] = SCALE * torch.randn(width, generator=generator)
        return torch.stack([drawn[key] for key in keys]).sum(0)

    return torch.stack([vector(piece) for piece in pieces.pieces])


def _symbols(body: str) -> list[str]:
    """Sounds, or letters; behind them the stress."""
    stresses = [symbol for symbol in body if symbol in STRESSES]
    return [*(symbol for symbol in body if symbol not in STRESSES), *stresses]


@torch.no_grad()
def begin(projection: TextProjection, rows_NX: Tensor, wanted_NH: Tensor) -> None:
    """Makes of these rows what is wanted, nearly."""
    first, second = projection.linear_fc1, projection.linear_fc2
    mean_X = rows_NX.mean(0)
    _, scales, directions = torch.linalg.svd(rows_NX - mean_X, full_matrices=False)
    spread = 1 / (scales / len(rows_NX) ** 0.5 + FLOOR)
    generator = torch.Generator().manual_seed(SEED)
    mixed = torch.randn(first.out_features, len(spread), generator=generator) / len(spread) ** 0.5
    weight_FX = (mixed.to(rows_NX) * spread) @ directions
    inner_NF = functional.silu((rows_NX - mean_X) @ weight_FX.T)
    centred_NF, centred_NH = inner_NF - inner_NF.mean(0), wanted_NH - wanted_NH.mean(0)
    square_FF = centred_NF.T @ centred_NF + RIDGE * torch.eye(first.out_features).to(rows_NX)
    weight_FH = torch.linalg.solve(square_FF.double(), (centred_NF.T @ centred_NH).double()).to(rows_NX)
    first.weight.copy_(weight_FX)
    first.bias.copy_(-weight_FX @ mean_X)
    second.weight.copy_(weight_FH.T)
    second.bias.copy_(wanted_NH.mean(0) - inner_NF.mean(0) @ weight_FH)
