"""The talker's text side begins with pieces that can be told apart and are alike where they sound alike."""

from __future__ import annotations

import torch

from tests.training.speaking.small_front import small_pieces
from training.speaking.sizes import TalkerSizes
from training.speaking.talker import TextProjection
from training.speaking.text_start import begin, sound_vectors

WIDTH = 32


def test_rows_become_the_sums_of_their_sounds():
    pieces = small_pieces()
    wanted = sound_vectors(pieces, WIDTH)
    projection = TextProjection(TalkerSizes(hidden_size=WIDTH, intermediate_size=256, text_width=64))
    drawn = torch.randn(len(pieces.pieces), 64, generator=torch.Generator().manual_seed(1))
    rows = 3.0 + 0.1 * drawn  # as words are: far from zero, near one another
    begin(projection, rows, wanted)
    found = projection(rows)
    assert (found - wanted).std() < 0.2 * wanted.std()
    at = {piece: index for index, piece in enumerate(pieces.pieces)}

    def near(one, other):
        return torch.cosine_similarity(wanted[at[one]], wanted[at[other]], dim=0)

    assert near("ðə", " ðə") > near("ðə", " s") + 0.3
    assert near("sˈi", "s") > 0.3
    assert near("=t", "t") < 0.5
