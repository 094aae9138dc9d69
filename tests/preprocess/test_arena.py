"""The arena's conservation laws, its order under pressure, and what other mappings of it see."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine

import numpy as np

from contracts.media import FeatureRef
from preprocess.arena import PAGE, Arena, ArenaMapping, Block, Lease


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def test_random_allocation_keeps_the_books() -> None:
    async def scenario() -> None:
        rng = random.Random(0)
        arena = Arena(64 * PAGE)
        leases: list[Lease] = []
        waiting: list[asyncio.Future[Block]] = []
        for _ in range(2000):
            action = rng.random()
            if action < 0.5:
                waiting.append(arena.request(rng.randint(1, 12 * PAGE)))
            elif action < 0.9 and leases:
                leases.pop(rng.randrange(len(leases))).release()
            elif waiting:
                arena.withdraw(waiting.pop(rng.randrange(len(waiting))))
            leases += [Lease(arena, grant.result()) for grant in waiting if grant.done()]
            waiting = [grant for grant in waiting if not grant.done()]
            assert arena.check_integrity() is None
            assert arena.num_waiting == len(waiting)
            spans = sorted((lease.block.offset, lease.block.capacity) for lease in leases)
            for (offset, length), (following, _) in itertools.pairwise(spans):
                assert offset + length <= following
        for grant in waiting:
            arena.withdraw(grant)
        for lease in leases:
            lease.release()
        assert arena.allocated_bytes == 0
        assert arena.check_integrity() is None
        assert (await arena.request(64 * PAGE)).offset == 0  # one whole span again
        arena.close()

    run(scenario())


def test_a_full_arena_waits_and_grants_in_order() -> None:
    async def scenario() -> None:
        arena = Arena(4 * PAGE)
        first = Lease(arena, await arena.request(3 * PAGE))
        large, small = arena.request(2 * PAGE), arena.request(1)
        assert not large.done()
        assert not small.done()  # would fit, but must not overtake
        first.release()
        assert large.done()
        assert small.done()
        assert arena.check_integrity() is None
        arena.close()

    run(scenario())


def test_a_withdrawn_request_lets_the_next_one_pass() -> None:
    async def scenario() -> None:
        arena = Arena(4 * PAGE)
        await arena.request(3 * PAGE)
        large, small = arena.request(2 * PAGE), arena.request(1)
        arena.withdraw(large)
        assert small.done()
        arena.withdraw(small)
        assert arena.allocated_bytes == 3 * PAGE
        assert arena.check_integrity() is None
        arena.close()

    run(scenario())


def test_shared_leases_free_the_block_once_the_last_is_released() -> None:
    async def scenario() -> None:
        arena = Arena(PAGE)
        lease = Lease(arena, await arena.request(10))
        other = lease.share()
        lease.release()
        lease.release()
        assert arena.allocated_bytes == PAGE
        other.release()
        assert arena.allocated_bytes == 0
        arena.close()

    run(scenario())


def test_another_mapping_of_the_descriptor_sees_the_same_bytes() -> None:
    async def scenario() -> None:
        arena = Arena(4 * PAGE)
        block = await arena.request(2 * 3 * 3)
        ref = FeatureRef(arena.name, block.offset, block.nbytes, "uint8", (2, 3, 3))
        worker = ArenaMapping(arena.fd, arena.name, arena.size, writable=True)
        worker.view(ref)[:] = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
        seen = arena.view(ref)
        np.testing.assert_array_equal(seen, np.arange(18).reshape(2, 3, 3))
        assert not seen.flags.writeable
        arena.close()
        assert seen[1, 2, 2] == 17  # pages outlive the descriptor while viewed

    run(scenario())


def test_the_integrity_check_sees_broken_books() -> None:
    async def scenario() -> None:
        arena = Arena(4 * PAGE)
        block = await arena.request(PAGE)
        arena._free.append((block.offset, PAGE))
        assert "overlap" in str(arena.check_integrity())
        arena._free = [(2 * PAGE, 2 * PAGE)]
        assert "gap" in str(arena.check_integrity())
        arena._free = []
        assert "accounted" in str(arena.check_integrity())
        arena.close()

    run(scenario())
