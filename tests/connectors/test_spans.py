"""The pool's allocator: never overlaps, merges what it gets back, ends as one free span."""

from __future__ import annotations

import random

import pytest

from connectors.spans import SpanPool


@pytest.mark.parametrize("seed", range(5))
def test_random_spans_never_overlap_and_all_merge_again(seed: int) -> None:
    random_ = random.Random(seed)
    pool, taken = SpanPool(100), []
    for _ in range(300):
        if taken and random_.random() < 0.5:
            pool.give_back(taken.pop(random_.randrange(len(taken))))
        else:
            offset = pool.take(random_.randint(1, 30))
            taken += [] if offset is None else [offset]
        pool.check()
    for offset in taken:
        pool.give_back(offset)
    assert pool.take(100) == 0
    assert pool.take(1) is None


def test_the_best_fit_keeps_the_long_span() -> None:
    pool = SpanPool(100)
    offsets = [pool.take(n) for n in (10, 10, 80)]
    pool.give_back(offsets[2])
    pool.give_back(offsets[0])
    assert pool.take(10) == 0
    assert pool.take(80) == 20
