import random
from collections import Counter

import pytest

from lm_engine.block_pool import BlockPool


def test_blocks_come_least_recently_used_first_and_never_the_scratch_block():
    pool = BlockPool(6)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    pool.on_reuse = pool.unmark_cached
    for block in range(1, 6):
        pool.mark_cached(block)
    pool.release([3])
    pool.release([1, 5])
    assert pool.allocate(3) == [3, 5, 1]  # 3 was freed first; of a table the tail goes first


def test_freed_blocks_stay_hittable_and_blank_ones_are_reused_before_them():
    pool = BlockPool(5)
    reused = []
    pool.on_reuse = lambda block: (reused.append(block), pool.unmark_cached(block))
    table = pool.allocate(4)
    pool.mark_cached(4)
    pool.mark_cached(3)
    pool.release(table)  # tail first: the cached ones are freed before the blank ones
    assert pool.num_free == 4
    pool.share([4])  # a prefix hit on a free block
    assert pool.num_free == 3
    assert pool.check_integrity({4: 1}) is None
    assert sorted(pool.allocate(2)) == [1, 2]
    assert reused == []
    assert pool.allocate(1) == [3]
    assert reused == [3]


def test_a_shared_block_is_free_only_after_its_last_owner():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    assert pool.check_integrity(Counter(blocks)) is None
    pool.release(blocks)
    assert pool.num_free == 2


def test_misuse_is_an_assertion():
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    with pytest.raises(AssertionError):
        pool.release([1])
    with pytest.raises(AssertionError):
        pool.share([0])


@pytest.mark.parametrize("break_it", ["reference", "count", "link"])
def test_check_integrity_sees(break_it):
    pool = BlockPool(4)
    pool.allocate(1)
    assert pool.check_integrity({1: 1}) is None
    if break_it == "reference":
        assert "block 1" in (pool.check_integrity({}) or "")
    elif break_it == "count":
        pool.num_free += 1
        assert "counted" in (pool.check_integrity({1: 1}) or "")
    else:
        pool._next[2] = 0
        assert pool.check_integrity({1: 1}) is not None


def test_conservation_under_random_use():
    rng = random.Random(5)
    pool = BlockPool(17)
    pool.on_reuse = pool.unmark_cached
    tables: list[list[int]] = []
    for _ in range(1000):
        move = rng.random()
        if move < 0.4 and pool.num_free:
            tables.append(pool.allocate(rng.randint(1, min(4, pool.num_free))))
            for block in tables[-1]:
                if rng.random() < 0.5:
                    pool.mark_cached(block)
        elif move < 0.6 and tables:
            source = rng.choice(tables)
            shared = source[: rng.randint(1, len(source))]
            pool.share(shared)
            tables.append(list(shared))
        elif tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        owners = Counter(block for table in tables for block in table)
        assert pool.check_integrity(owners) is None
        assert pool.num_unowned(range(1, 17)) == pool.num_free
