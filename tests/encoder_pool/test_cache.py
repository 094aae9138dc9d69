from functools import partial

import pytest
import torch

from contracts.digests import ContentDigest
from encoder_pool.cache import CacheConfig, EmbeddingCache, EmbeddingKey, User
from encoder_pool.host_tier import HostTier
from encoder_pool.slabs import Slabs, pin
from tests.encoder_pool.fakes import ROW_BYTES, WIDTH, expected

CPU = torch.device("cpu")
A, B, C = (User(name, 0) for name in "abc")


def key(n: int, salt: str | None = None, encoder: str = "e") -> EmbeddingKey:
    return EmbeddingKey(ContentDigest(bytes([n]) * 16), encoder, salt)


def cache_of(rows: int, host_rows: int = 0) -> EmbeddingCache:
    return EmbeddingCache(CacheConfig(rows * ROW_BYTES, host_rows * ROW_BYTES), CPU)


def acquire(cache: EmbeddingCache, k: EmbeddingKey, user: User, rows: int = 2):
    found = cache.acquire(k, (rows, WIDTH), torch.float32, user)
    assert cache.check_integrity() is None
    return found


def insert_and_release(cache: EmbeddingCache, n: int, rows: int = 2) -> None:
    cache.insert(key(n), expected(n, rows), [A])
    assert cache.check_integrity() is None
    release(cache, A)


def release(cache: EmbeddingCache, user: User) -> None:
    cache.release(user)
    assert cache.check_integrity() is None
    cache.trim()
    assert cache.excess_bytes == 0
    assert cache.check_integrity() is None


def test_a_hit_returns_what_was_inserted():
    cache = cache_of(8)
    insert_and_release(cache, 1)
    assert torch.equal(acquire(cache, key(1), B), expected(1, 2))
    assert cache.stats()["encoder_cache_hits_total"] == 1


def test_salt_and_encoder_separate_entries():
    cache = cache_of(8)
    cache.insert(key(1, salt="x"), expected(1, 2), [A])
    assert acquire(cache, key(1), B) is None
    assert acquire(cache, key(1, salt="y"), B) is None
    assert acquire(cache, key(1, salt="x", encoder="other"), B) is None
    assert acquire(cache, key(1, salt="x"), B) is not None


def test_the_least_recently_released_entry_is_evicted():
    cache = cache_of(4)
    insert_and_release(cache, 1)
    insert_and_release(cache, 2)
    assert acquire(cache, key(1), B) is not None
    release(cache, B)
    insert_and_release(cache, 3)
    assert acquire(cache, key(2), B) is None
    assert acquire(cache, key(1), B) is not None
    assert cache.stats()["encoder_cache_bytes"] == 4 * ROW_BYTES


def test_an_entry_in_use_outlives_any_pressure_until_its_last_user_lets_go():
    cache = cache_of(2)
    cache.insert(key(1), expected(1, 2), [A, B])
    release(cache, A)
    for n in range(2, 6):
        insert_and_release(cache, n)
        assert torch.equal(acquire(cache, key(1), C), expected(1, 2))
        release(cache, C)
    release(cache, B)
    insert_and_release(cache, 9)
    assert acquire(cache, key(1), C) is None


def test_releasing_a_whole_request_frees_its_entries_only():
    cache = cache_of(2)
    cache.insert(key(1), expected(1, 2), [User("r", 0), User("s", 0)])
    cache.insert(key(2), expected(2, 2), [User("r", 1)])
    cache.release_request("r")
    assert cache.check_integrity() is None
    cache.trim()
    assert cache.held_bytes == 2 * ROW_BYTES
    assert acquire(cache, key(2), A) is None  # over budget while s holds its entry
    assert acquire(cache, key(1), A) is not None


def test_a_user_with_two_holds_releases_twice():
    cache = cache_of(0)
    cache.insert(key(1), expected(1, 2), [A])
    assert acquire(cache, key(1), A) is not None
    release(cache, A)
    assert acquire(cache, key(1), B) is not None
    release(cache, B)
    release(cache, A)
    assert acquire(cache, key(1), B) is None
    cache.release(A)  # an unknown user: nothing happens
    assert cache.held_bytes == 0


def test_the_host_tier_gives_back_equal_embeddings():
    cache = cache_of(2, host_rows=4)
    insert_and_release(cache, 1)
    insert_and_release(cache, 2)
    assert cache.stats()["encoder_cache_host_bytes"] == 2 * ROW_BYTES
    assert torch.equal(acquire(cache, key(1), B), expected(1, 2))
    release(cache, B)
    stats = cache.stats()
    assert stats["encoder_cache_host_hits_total"] == 1
    assert stats["encoder_cache_bytes"] == stats["encoder_cache_host_bytes"] == 2 * ROW_BYTES  # they swapped
    assert torch.equal(acquire(cache, key(2), B), expected(2, 2))


def test_the_host_tier_is_bounded_in_bytes():
    cache = cache_of(0, host_rows=4)
    for n in range(1, 6):
        insert_and_release(cache, n)
    assert cache.stats()["encoder_cache_host_bytes"] == 4 * ROW_BYTES
    insert_and_release(cache, 7, rows=5)  # larger than the tier: dropped, the others stay
    assert cache.stats()["encoder_cache_host_bytes"] == 4 * ROW_BYTES
    assert acquire(cache, key(1), B) is None
    assert torch.equal(acquire(cache, key(5), B), expected(5, 2))


def test_an_entry_of_the_wrong_length_is_dropped_not_served():
    cache = cache_of(16, host_rows=8)
    cache.insert(key(1), expected(1, 2), [A])
    assert acquire(cache, key(1), B, rows=3) is None
    assert cache.stats()["encoder_cache_invalid_total"] == 1
    fresh = cache.insert(key(1), expected(1, 3), [B])
    assert acquire(cache, key(1), C, rows=3) is fresh
    release(cache, A)
    assert cache.check_integrity() is None
    assert cache.held_bytes == 3 * ROW_BYTES


def test_a_demoted_entry_of_the_wrong_length_is_dropped_too():
    cache = cache_of(0, host_rows=8)
    insert_and_release(cache, 1)
    assert acquire(cache, key(1), B, rows=3) is None
    assert cache.stats()["encoder_cache_host_bytes"] == 0


def test_reset_drops_everything_and_leaves_users_their_embeddings():
    cache = cache_of(2, host_rows=8)
    insert_and_release(cache, 1)
    mine = cache.insert(key(2), expected(2, 2), [A])
    cache.reset()
    assert cache.check_integrity() is None
    assert acquire(cache, key(1), B) is None
    assert acquire(cache, key(2), B) is None
    assert torch.equal(mine, expected(2, 2))
    assert cache.held_bytes == 2 * ROW_BYTES
    release(cache, A)
    assert cache.held_bytes == cache.stats()["encoder_cache_bytes"] == 0


def test_an_entry_does_not_keep_the_batch_it_was_cut_from():
    cache = cache_of(8)
    part = expected(1, 6).split([2, 4])[0]
    stored = cache.insert(key(1), part, [A])
    assert stored.untyped_storage().nbytes() == stored.nbytes == 2 * ROW_BYTES


def test_integrity_notices_a_lost_reference():
    cache = cache_of(8)
    cache.insert(key(1), expected(1, 2), [A])
    cache._held.clear()
    assert cache.check_integrity() is not None


def test_a_fresh_entry_replaces_its_demoted_copy():
    cache = cache_of(2, host_rows=4)
    insert_and_release(cache, 1)
    insert_and_release(cache, 2)  # 1 moves to the host tier
    insert_and_release(cache, 1)
    cache.reset()
    assert acquire(cache, key(1), B) is None


def test_nothing_is_evicted_before_it_is_asked_for():
    cache = cache_of(4, host_rows=8)
    insert_and_release(cache, 1)
    insert_and_release(cache, 2)
    cache.insert(key(3), expected(3, 3), [A])
    assert cache.excess_bytes == 3 * ROW_BYTES
    assert cache.stats()["encoder_cache_host_bytes"] == 0
    assert cache.check_integrity() is None
    cache.trim()
    assert cache.stats()["encoder_cache_host_bytes"] == 4 * ROW_BYTES
    assert cache.check_integrity() is None


def test_integrity_notices_what_should_have_been_trimmed():
    cache = cache_of(4)
    insert_and_release(cache, 1)
    cache._capacity_bytes = ROW_BYTES
    assert "idle beyond" in cache.check_integrity()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_host_copies_come_back_equal():
    cuda = torch.device("cuda")
    cache = EmbeddingCache(CacheConfig(2 * ROW_BYTES, 1 << 20), cuda)
    cache._host = HostTier(1 << 20, cuda, Slabs(1 << 20, partial(pin, cuda), lambda run: run()))
    for n in (1, 2, 3):
        cache.insert(key(n), expected(n, 2).cuda(), [A])
        release(cache, A)
    assert cache.check_integrity() is None
    for n in (1, 2, 3):
        found = acquire(cache, key(n), B)
        assert found.is_cuda
        assert torch.equal(found.cpu(), expected(n, 2))
        release(cache, B)
