from dataclasses import dataclass

from contracts.media import MediaItem
from encoder_pool.batcher import BatchLimits, form_batch
from tests.encoder_pool.fakes import encode_message


@dataclass
class Entry:
    item: MediaItem


def entries(*grids: tuple[int, int, int]) -> list[Entry]:
    return [Entry(encode_message("r", i, grid=g).item) for i, g in enumerate(grids)]


def test_takes_the_longest_prefix_within_the_token_budget():
    queue = entries((1, 4, 4), (1, 4, 4), (1, 8, 8), (1, 2, 2))
    assert (
        form_batch(queue, BatchLimits(max_tokens=9)) == queue[:2]
    )  # 4 + 4 + 16 is over; (1, 2, 2) waits its turn
    assert form_batch(queue, BatchLimits(max_tokens=8)) == queue[:2]
    assert form_batch(queue, BatchLimits(max_tokens=7)) == queue[:1]


def test_an_item_over_every_budget_runs_alone():
    queue = entries((1, 8, 8), (1, 2, 2))
    assert form_batch(queue, BatchLimits(max_tokens=1, max_patches=1, max_items=1)) == queue[:1]


def test_patches_and_items_are_bounded_too():
    queue = entries(*[(1, 2, 2)] * 200)
    assert len(form_batch(queue, BatchLimits(max_items=7))) == 7
    assert len(form_batch(queue, BatchLimits(max_patches=20))) == 5


def test_nothing_queued_gives_an_empty_batch():
    assert form_batch([], BatchLimits()) == []
