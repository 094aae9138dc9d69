"""What recurs is made once, and what is kept stays within its bound."""

from __future__ import annotations

import random

from model_families.recurring import Recurring


def test_the_values_used_last_are_kept() -> None:
    made: list[int] = []
    recurring = Recurring(lambda key: made.append(key) or [key], lambda key: 1, 4)
    first = recurring.of(1)
    for key in (2, 3, 4, 1, 5):
        assert recurring.of(key) == [key]
    assert recurring.of(1) is first
    assert made == [1, 2, 3, 4, 5]
    recurring.of(2)  # was put out by 5
    assert made == [1, 2, 3, 4, 5, 2]


def test_what_is_kept_never_exceeds_the_bound() -> None:
    rng, capacity = random.Random(3), 100
    made: list[int] = []
    recurring = Recurring(lambda key: made.append(key) or str(key), lambda key: key, capacity)
    for _ in range(500):
        key = rng.randrange(1, 60)
        assert recurring.of(key) == str(key)
        assert sum(recurring._kept) <= capacity
    assert len(recurring) > 1
    assert len(made) < 500


def test_one_large_value_does_not_put_out_the_others() -> None:
    made: list[int] = []
    recurring = Recurring(lambda key: made.append(key) or str(key), lambda key: key, 100)
    for key in (10, 26, 10, 26):
        assert recurring.of(key) == str(key)
    assert made == [10, 26, 26]
    assert list(recurring._kept) == [10]
