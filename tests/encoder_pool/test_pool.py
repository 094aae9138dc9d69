import random

import pytest
import torch

from contracts.messages import FeaturesConsumed
from encoder_pool.batcher import BatchLimits
from encoder_pool.cache import CacheConfig, EmbeddingKey, User
from encoder_pool.outcomes import Embedded
from encoder_pool.pool import EncoderPool, EncoderPoolConfig
from tests.encoder_pool.fakes import ROW_BYTES, FakeEncoder, add, drain, encode_message, expected, pixels


def make_pool(model: FakeEncoder, *, rows: int = 1000, host_rows: int = 0, **options) -> EncoderPool:
    cache = CacheConfig(rows * ROW_BYTES, host_rows * ROW_BYTES)
    return EncoderPool(model, EncoderPoolConfig(cache=cache, **options), "vision")


@pytest.fixture
def model() -> FakeEncoder:
    return FakeEncoder()


def test_requests_share_a_batch_and_each_gets_his_own(model):
    pool = make_pool(model)
    grids = {1: (1, 2, 2), 2: (1, 4, 2), 3: (1, 6, 4)}
    for value, grid in grids.items():
        add(pool, f"r{value}", value, item_index=value, grid=grid, target=f"t{value}")
    embedded, needed, consumed, failed = drain(pool)
    assert model.calls == [[1, 2, 3]]
    assert not needed
    assert not failed
    assert {(c.request_id, c.item_index) for c in consumed} == {("r1", 1), ("r2", 2), ("r3", 3)}
    for outcome in embedded:
        value = int(outcome.request_id[1:])
        assert (outcome.item_index, outcome.target) == (value, f"t{value}")
        t, h, w = grids[value]
        assert torch.equal(outcome.embeddings, expected(value, t * h * w // 4))
    assert not pool.busy


def test_features_are_consumed_before_their_embeddings_come(model):
    pool = make_pool(model)
    add(pool, "a", 1)
    kinds = [type(o) for o in pool.step()]
    assert kinds == [FeaturesConsumed, Embedded]


def test_hits_come_at_once_and_only_misses_are_encoded(model):
    pool = make_pool(model)
    add(pool, "a", 1)
    drain(pool)
    add(pool, "b", 1)
    add(pool, "b", 2, item_index=1)
    pool.add(encode_message("c", 1), None)  # a hit needs no features
    first = pool.step()
    assert {(o.request_id, o.item_index) for o in first if isinstance(o, Embedded)} == {("b", 0), ("c", 0)}
    assert model.calls == [[1]]
    embedded, _, consumed, _ = drain(pool)
    assert [o.item_index for o in embedded] == [1]
    assert [(c.request_id, c.item_index) for c in consumed] == [("b", 1)]
    assert model.calls == [[1], [2]]
    assert pool.stats()["encoder_cache_hits_total"] == 2


def test_a_stream_of_hits_does_not_hold_up_a_miss(model):
    pool = make_pool(model)
    add(pool, "warm", 1)
    drain(pool)
    add(pool, "miss", 2)
    for i in range(4):
        pool.add(encode_message(f"hit{i}", 1), None)
        pool.step()
    assert model.calls == [[1], [2]]


def test_a_miss_without_features_asks_for_them_and_is_served_when_resent(model):
    pool = make_pool(model)
    pool.add(encode_message("a", 1, item_index=3), None)
    embedded, needed, _, failed = drain(pool)
    assert [(n.request_id, n.item_index) for n in needed] == [("a", 3)]
    assert not embedded
    assert not failed
    add(pool, "a", 1, item_index=3)
    embedded, *_ = drain(pool)
    assert [(e.request_id, e.item_index) for e in embedded] == [("a", 3)]


def test_equal_content_in_flight_is_encoded_once(model):
    pool = make_pool(model)
    add(pool, "a", 1)
    add(pool, "b", 1)
    pool.add(encode_message("c", 1), None)
    add(pool, "c", 1, item_index=1)
    embedded, needed, consumed, _ = drain(pool)
    assert model.calls == [[1]]
    assert not needed
    assert {(e.request_id, e.item_index) for e in embedded} == {("a", 0), ("b", 0), ("c", 0), ("c", 1)}
    assert {(c.request_id, c.item_index) for c in consumed} == {("a", 0), ("b", 0), ("c", 1)}
    assert all(torch.equal(e.embeddings, expected(1, 1)) for e in embedded)


def test_abort_of_the_first_leaves_the_second_its_own_features(model):
    pool = make_pool(model)
    add(pool, "a", 1)
    add(pool, "b", 1)
    pool.abort("a")
    embedded, needed, _, _ = drain(pool)
    assert [e.request_id for e in embedded] == ["b"]
    assert not needed
    assert model.calls == [[1]]


def test_abort_of_the_only_one_with_features_asks_the_others(model):
    pool = make_pool(model)
    add(pool, "a", 1)
    pool.add(encode_message("b", 1), None)
    pool.add(encode_message("c", 1), None)
    pool.abort("a")
    assert pool.check_integrity() is None
    embedded, needed, consumed, _ = drain(pool)
    assert not embedded
    assert not consumed
    assert [n.request_id for n in needed] == ["b", "c"]
    assert model.calls == []
    add(pool, "b", 1)
    add(pool, "c", 1)
    embedded, *_ = drain(pool)
    assert {e.request_id for e in embedded} == {"b", "c"}
    assert model.calls == [[1]]


def test_nothing_of_an_aborted_request_remains(model):
    pool = make_pool(model, rows=0)
    add(pool, "queued", 1)
    add(pool, "sent", 2)
    drain(pool, release=False)
    add(pool, "queued", 3)
    pool.add(encode_message("asked", 4), None)
    for request_id in ("queued", "sent", "asked", "unknown"):
        pool.abort(request_id)
    assert not pool.busy
    assert pool.check_integrity() is None
    assert pool.step() == []
    assert not pool.has_work()
    assert pool.check_integrity() is None
    assert pool.stats()["encoder_cache_bytes"] == 0


def test_different_salts_never_share(model):
    pool = make_pool(model, limits=BatchLimits(max_items=1))
    add(pool, "a", 1, salt="x")
    add(pool, "b", 1, salt="y")
    add(pool, "c", 1)
    drain(pool)
    assert model.calls == [[1], [1], [1]]
    for request_id, salt in (("a", "x"), ("b", "y"), ("c", None)):
        pool.add(encode_message(request_id, 1, salt=salt), None)
    pool.add(encode_message("d", 1, salt="z"), None)
    embedded, needed, _, _ = drain(pool)
    assert {e.request_id for e in embedded} == {"a", "b", "c"}
    assert [n.request_id for n in needed] == ["d"]


def test_batches_keep_to_the_budget_and_the_order(model):
    pool = make_pool(model, limits=BatchLimits(max_tokens=8, max_items=3))
    for i, grid in enumerate([(1, 4, 4), (1, 4, 4), (1, 2, 2), (1, 16, 16), *[(1, 2, 2)] * 4]):
        add(pool, f"r{i}", i, grid=grid)
    embedded, *_ = drain(pool)
    assert model.calls == [[0, 1], [2], [3], [4, 5, 6], [7]]  # 3 is larger than the budget
    assert [e.request_id for e in embedded] == [f"r{i}" for i in range(8)]


def test_three_hundred_images_of_one_request_come_in_bounded_batches(model):
    pool = make_pool(model, limits=BatchLimits(max_items=64, max_patches=200))
    for i in range(300):
        add(pool, "r", i % 256, item_index=i, grid=(1, 2, 2 + 2 * (i // 256)))
    embedded, *_ = drain(pool)
    assert len(embedded) == 300
    assert max(len(call) for call in model.calls) == 50  # 200 patches, 4 each


def test_sixty_four_waiting_requests_share_forwards(model):
    pool = make_pool(model, limits=BatchLimits(max_items=16))
    for i in range(64):
        add(pool, f"r{i}", i)
    drain(pool)
    stats = pool.stats()
    assert stats["encoder_items_total"] / stats["encoder_batches_total"] == 16
    assert stats["encoder_tokens_total"] == 64
    assert stats["encoder_patches_total"] == 256


@pytest.mark.parametrize("host_rows", [0, 6])
def test_a_small_cache_under_shuffled_load_and_aborts_serves_everyone(model, host_rows):
    """Eight images through room for four, misses without features, aborts at random."""
    rng = random.Random(7)
    pool = make_pool(model, rows=4, host_rows=host_rows, limits=BatchLimits(max_items=3))
    waiting: dict[str, int] = {}
    done: set[str] = set()
    aborted: set[str] = set()
    for i in range(400):
        request_id, value = f"r{i}", rng.randrange(8)
        pool.add(encode_message(request_id, value), pixels(value) if rng.random() < 0.3 else None)
        waiting[request_id] = value
        if rng.random() < 0.15:
            victim = rng.choice(list(waiting))
            pool.abort(victim)
            del waiting[victim]
            aborted.add(victim)
        while pool.has_work() and rng.random() < 0.7:
            for outcome in pool.step():
                assert outcome.request_id not in aborted
                if isinstance(outcome, Embedded):
                    assert torch.equal(outcome.embeddings, expected(waiting.pop(outcome.request_id), 1))
                    pool.release(outcome.request_id, 0)
                    done.add(outcome.request_id)
                elif not isinstance(outcome, FeaturesConsumed):
                    add(pool, outcome.request_id, waiting[outcome.request_id])
            assert pool.check_integrity() is None
    for _ in range(3):
        embedded, needed, _, failed = drain(pool)
        assert not failed
        done |= {e.request_id for e in embedded}
        for ask in needed:
            add(pool, ask.request_id, waiting[ask.request_id])
    assert len(done) + len(aborted) == 400
    assert not pool.busy
    assert pool.stats()["encoder_cache_bytes"] <= 4 * ROW_BYTES


def test_a_request_still_reads_what_another_finished_with(model):
    pool = make_pool(model, rows=1)
    add(pool, "a", 1)
    add(pool, "b", 1)
    embedded, *_ = drain(pool, release=False)
    pool.release("a", 0)
    add(pool, "c", 2)
    add(pool, "d", 3)
    drain(pool)
    assert torch.equal(embedded[1].embeddings, expected(1, 1))
    pool.add(encode_message("e", 1), None)  # b still holds it: a hit
    assert len(drain(pool)[0]) == 1
    assert model.calls == [[1], [2, 3]]


def test_a_cached_entry_of_the_wrong_length_is_encoded_again(model):
    pool = make_pool(model)
    message = encode_message("a", 1)
    key = EmbeddingKey(message.item.pixel_digest, model.encoder_id, None)
    pool._cache.insert(key, expected(1, 9), [User("stale", 0)])
    add(pool, "a", 1)
    embedded, needed, _, failed = drain(pool)
    assert [tuple(e.embeddings.shape) for e in embedded] == [(message.item.num_tokens, 4)]
    assert not needed
    assert not failed
    assert model.calls == [[1]]


def test_with_the_cache_off_ids_are_kept_and_nothing_is_remembered(model):
    pool = make_pool(model, rows=0)
    for _ in range(2):
        add(pool, "req-7", 1, item_index=5)
        embedded, *_ = drain(pool)
        assert [(e.request_id, e.item_index) for e in embedded] == [("req-7", 5)]
    assert model.calls == [[1], [1]]
    assert pool.stats()["encoder_cache_bytes"] == 0


def test_new_embeddings_come_before_old_ones_are_evicted(model):
    pool = make_pool(model, rows=2, host_rows=9)
    add(pool, "a", 1)
    add(pool, "b", 2)
    drain(pool)
    add(pool, "c", 3)
    assert isinstance(pool.step()[-1], Embedded)
    assert pool.stats()["encoder_cache_evictions_total"] == 0
    pool.release("c", 0)
    assert pool.has_work()
    assert pool.step() == []
    assert not pool.has_work()
    assert pool.stats()["encoder_cache_host_bytes"] == ROW_BYTES
    assert pool.check_integrity() is None


def test_the_cache_is_over_its_size_by_one_batch_at_most(model):
    """Batch behind batch, each sent before the next one begins, with or without a step between."""
    rng = random.Random(5)
    pool = make_pool(model, rows=4, limits=BatchLimits(max_items=2))
    most = 0
    for i in range(200):
        for item in range(2):
            add(pool, f"r{i}", rng.randrange(16), item_index=item)
        while pool.has_work():
            outcomes = pool.step()
            most = max(most, pool.stats()["encoder_cache_bytes"])
            assert pool.check_integrity() is None
            for outcome in outcomes:
                if isinstance(outcome, Embedded):
                    pool.release(outcome.request_id, outcome.item_index)
            if i % 3 and outcomes:
                break  # the next ones come before it is trimmed
    assert most <= (4 + 2) * ROW_BYTES


def test_hits_without_end_do_not_keep_old_ones_from_being_evicted(model):
    pool = make_pool(model, rows=2, host_rows=20)
    for value in range(12):
        add(pool, "warm", value, item_index=value)
    drain(pool)
    for i in range(48):  # each of the one that was demoted longest ago
        pool.add(encode_message(f"hit{i}", i % 12), None)
        (outcome,) = pool.step()
        assert torch.equal(outcome.embeddings, expected(i % 12, 1))
        pool.release(outcome.request_id, 0)
        assert pool.stats()["encoder_cache_bytes"] <= (2 + 2) * ROW_BYTES
        assert pool.check_integrity() is None
    assert pool.stats()["encoder_cache_host_hits_total"] > 30


def test_unsent_embeddings_hold_back_the_next_forward(model):
    pool = make_pool(model, limits=BatchLimits(max_items=1), max_unsent_bytes=ROW_BYTES)
    for i in range(4):
        add(pool, f"r{i}", i)
    embedded, *_ = drain(pool, release=False)
    assert len(embedded) == 2  # the second one fills the bound
    pool.release("r0", 0)
    assert pool.has_work()
    embedded, *_ = drain(pool, release=False)
    assert [e.request_id for e in embedded] == ["r2"]
    pool.abort("r1")
    assert [e.request_id for e in drain(pool)[0]] == ["r3"]


def test_a_full_queue_refuses_with_retry_after(model):
    pool = make_pool(model, max_waiting_items=2)
    for i in range(3):
        add(pool, f"r{i}", i)
    embedded, _, consumed, failed = drain(pool)
    assert [f.request_id for f in failed] == ["r2"]
    assert failed[0].error.kind == "TooManyRequests"
    assert failed[0].error.retry_after_s is not None
    assert "r2" in {c.request_id for c in consumed}
    assert {e.request_id for e in embedded} == {"r0", "r1"}


@pytest.mark.parametrize("error", [RuntimeError, ValueError, torch.OutOfMemoryError])
def test_a_bad_item_fails_alone(model, error):
    pool = make_pool(model)
    model.poison, model.error = {3}, error
    for i in range(8):
        add(pool, f"r{i}", i)
    add(pool, "twin", 3)
    embedded, _, consumed, failed = drain(pool)
    assert {e.request_id for e in embedded} == {f"r{i}" for i in range(8)} - {"r3"}
    assert {f.request_id for f in failed} == {"r3", "twin"}
    assert all((f.error.stage, f.error.request_id) == ("vision", f.request_id) for f in failed)
    assert len(consumed) == 9
    model.poison = set()
    add(pool, "later", 3)
    assert len(drain(pool)[0]) == 1  # the failure is not remembered
    assert pool.stats()["encoder_failures_total"] == 1


def test_an_encoder_that_gives_too_few_rows_fails_the_request(model):
    pool = make_pool(model)
    model.rows_short = 1
    add(pool, "a", 1, grid=(1, 4, 4))
    embedded, _, _, failed = drain(pool)
    assert not embedded
    assert [f.request_id for f in failed] == ["a"]


def test_a_lost_device_stops_the_stage(model):
    pool = make_pool(model)
    model.poison, model.error = {1}, torch.AcceleratorError
    add(pool, "a", 1)
    with pytest.raises(torch.AcceleratorError):
        pool.step()


def test_reset_makes_the_next_request_encode_again(model):
    pool = make_pool(model)
    add(pool, "a", 1)
    drain(pool)
    pool.reset_cache()
    assert model.num_drops == 1
    assert pool.check_integrity() is None
    pool.add(encode_message("b", 1), None)
    assert len(drain(pool)[1]) == 1


def test_a_flight_of_another_size_under_the_same_digest_is_kept_apart(model):
    pool = make_pool(model)
    small = add(pool, "a", 1)
    large = encode_message("b", 2, grid=(1, 4, 4))
    forged = type(large.item)(
        modality="image",
        bytes_digest=small.item.bytes_digest,
        pixel_digest=small.item.pixel_digest,
        num_tokens=4,
        grid_thw=(1, 4, 4),
        source_size=(8, 8),
    )
    pool.add(type(large)(request_id="b", item_index=0, item=forged, target="thinker"), pixels(2, (1, 4, 4)))
    embedded, *_ = drain(pool)
    rows = {e.request_id: e.embeddings for e in embedded}
    assert torch.equal(rows["a"], expected(1, 1))
    assert torch.equal(rows["b"], expected(2, 4))
