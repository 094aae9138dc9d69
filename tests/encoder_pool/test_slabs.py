"""Places in slabs never overlap, and are found again when they are given back; the host tier in them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from encoder_pool.host_tier import HostTier
from encoder_pool.slabs import ALIGNMENT, Place, Slabs

CPU = torch.device("cpu")
SLAB = 8 * ALIGNMENT


class Memory:
    """Allocates when it is told to, or at once."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.sizes: list[int] = []
        self._at_once = at_once
        self._begun: list[Callable[[], None]] = []

    def slabs(self, capacity: int) -> Slabs:
        return Slabs(capacity, self._allocate, self._start, SLAB)

    def arrive(self) -> None:
        self._begun.pop(0)()

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def _start(self, run: Callable[[], None]) -> None:
        if self._at_once:
            run()
        else:
            self._begun.append(run)

    def _allocate(self, nbytes: int) -> Tensor:
        self.sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


def test_slabs_are_begun_one_by_one_when_the_last_is_used() -> None:
    memory = Memory(at_once=False)
    slabs = memory.slabs(2 * SLAB + 3 * ALIGNMENT)
    assert slabs.take(1) is None
    assert memory.num_begun == 1
    memory.arrive()
    assert slabs.take(1) is not None
    assert slabs.take(SLAB) is None
    assert memory.num_begun == 1
    memory.arrive()
    for _ in range(2):
        assert slabs.take(SLAB - ALIGNMENT) is not None
    memory.arrive()
    assert memory.sizes == [SLAB, SLAB, 2 * ALIGNMENT]  # powers of two
    assert slabs.take(2 * ALIGNMENT) is not None
    assert memory.num_begun == 1
    memory.arrive()
    assert sum(memory.sizes) == 2 * SLAB + 3 * ALIGNMENT


def test_what_is_larger_than_a_slab_has_one_made_if_there_is_room() -> None:
    memory = Memory()
    slabs = memory.slabs(6 * SLAB)
    assert not slabs.fits(3 * SLAB)  # begun
    assert slabs.fits(3 * SLAB)
    assert slabs.take(3 * SLAB) is not None
    assert not slabs.fits(5 * SLAB)
    assert memory.sizes == [SLAB, 4 * SLAB, SLAB]


def test_places_never_overlap_and_gaps_join_again() -> None:
    rng, slabs = random.Random(1), Memory().slabs(3 * SLAB)
    held: list[tuple[Place, int]] = []
    for number in range(2000):
        if held and rng.random() < 0.5:
            place, value = held.pop(rng.randrange(len(held)))
            assert (place.memory == value).all()
            slabs.give_back(place)
        elif (taken := slabs.take(rng.randrange(1, SLAB // 3))) is not None:
            held.append((taken, number % 251))
            taken.memory.fill_(number % 251)
        assert slabs.check_integrity([place for place, _ in held]) is None
    assert slabs.check_integrity([place for place, _ in held[1:]]) is not None
    for place, _ in held:
        slabs.give_back(place)
    assert all(slabs.take(SLAB) is not None for _ in range(3))


def embeddings(value: int, rows: int = 1) -> Tensor:
    return torch.full((rows, ALIGNMENT // 4), float(value))


def check(tier: HostTier[int]) -> None:
    assert tier.check_integrity() is None


def test_a_tier_in_slabs_drops_the_oldest_and_gives_back_copies() -> None:
    memory = Memory()
    tier: HostTier[int] = HostTier(SLAB, CPU, memory.slabs(SLAB))
    for value in range(10):
        tier.put(value, embeddings(value))
        check(tier)
    assert tier.keys() == list(range(2, 10))
    taken = tier.take(4)
    assert taken is not None
    tier.put(11, embeddings(11))  # in the place of 4
    check(tier)
    assert torch.equal(taken, embeddings(4))
    assert tier.keys() == [2, 3, 5, 6, 7, 8, 9, 11]
    tier.put(12, embeddings(12, rows=3))
    check(tier)
    found = tier.take(12)
    assert found is not None
    assert torch.equal(found, embeddings(12, rows=3))
    tier.clear()
    check(tier)
    assert tier.num_bytes == 0


def test_what_no_slab_holds_is_forgotten_and_the_others_stay() -> None:
    memory = Memory(at_once=False)
    tier: HostTier[int] = HostTier(SLAB, CPU, memory.slabs(SLAB))
    tier.put(1, embeddings(1))
    assert tier.keys() == []  # no slab yet
    memory.arrive()
    tier.put(2, embeddings(2))
    tier.put(3, embeddings(3, rows=9))
    assert tier.keys() == [2]
    check(tier)
