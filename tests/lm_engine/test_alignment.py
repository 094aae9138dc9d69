"""Laying tokens along positions: the cheapest path of all, found on small matrices by trying every one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lm_engine.alignment import first_positions, smoothed


def paths(num_tokens: int, num_positions: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All monotone ones from the first cell to the last."""

    def onwards(cell: tuple[int, int]) -> Iterator[tuple[tuple[int, int], ...]]:
        i, j = cell
        if cell == (num_tokens - 1, num_positions - 1):
            yield (cell,)
        for i_next, j_next in ((i + 1, j + 1), (i + 1, j), (i, j + 1)):
            if i_next < num_tokens and j_next < num_positions:
                for rest in onwards((i_next, j_next)):
                    yield (cell, *rest)

    yield from onwards((0, 0))


@pytest.mark.parametrize(("num_tokens", "num_positions"), [(1, 1), (1, 5), (4, 1), (3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_the_path_is_the_best_of_all(num_tokens: int, num_positions: int, seed: int) -> None:
    affinity = np.random.default_rng(seed).normal(size=(num_tokens, num_positions))
    best = max(paths(num_tokens, num_positions), key=lambda path: sum(affinity[cell] for cell in path))
    first = tuple(min(j for i, j in best if i == token) for token in range(num_tokens))
    assert first_positions(affinity) == first


def test_a_token_that_attends_to_a_stretch_begins_where_it_begins() -> None:
    weights = torch.full((2, 3, 30), 0.01)
    for token, (begin, end) in enumerate(((0, 9), (9, 21), (21, 30))):
        weights[:, token, begin:end] = 0.2
    weights[1, 0, 25] = 5.0  # a spike, which the median takes away
    assert first_positions(smoothed(weights).numpy()) == (0, 9, 21)
    assert torch.isfinite(smoothed(torch.full((1, 2, 20), 0.5))).all()
    assert smoothed(torch.rand(2, 3, 2)).shape == (3, 2)
