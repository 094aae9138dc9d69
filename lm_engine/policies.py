"""Waiting queues: in which order sequences are admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from typing import Protocol

from lm_engine.config import Policy
from lm_engine.sequence import Sequence

MAX_TENANTS_REMEMBERED = 4096
OUTPUT_TOKEN_WEIGHT = 2  # an output token costs about two prompt tokens of a step
SCORE_WINDOW = 16  # waiting sequences whose cached prefix is compared

Key = tuple[float, int, int]


class WaitingQueue(Protocol):
    """A set of waiting sequences with a best one. Each sequence is in it at most once."""

    def push(self, seq: Sequence) -> None: ...

    def peek(self, skip: Collection[Sequence] = ()) -> Sequence | None:
        """The one to admit next, of those not to be skipped."""
        ...

    def first(self, count: int) -> list[Sequence]:
        """So many, or all, of those that wait longest, whoever is to be admitted next."""
        ...

    def take(self, seq: Sequence) -> None:
        """Removes it because its turn came."""
        ...

    def discard(self, seq: Sequence) -> None:
        """Removes it, if it is there."""
        ...

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Tells what a tenant has been given."""
        ...

    def __contains__(self, seq: Sequence) -> bool: ...

    def __len__(self) -> int: ...


def make_queue(policy: Policy, max_deferrals: int, cached_tokens: Callable[[Sequence], int]) -> WaitingQueue:
    match policy:
        case "fcfs":
            return OrderedQueue(_by_arrival)
        case "priority":
            return OrderedQueue(_by_rank)
        case "fair":
            return FairQueue()
        case "cache_aware":
            return CacheAwareQueue(max_deferrals, cached_tokens)


def _by_arrival(seq: Sequence) -> Key:
    return (0.0, seq.request.arrival, seq.sample)


def _by_rank(seq: Sequence) -> Key:
    # With aging every waiting request improves at the same rate, so their order never changes: rank is
    # priority · aging_s + arrival time, fixed on arrival.
    return seq.order


class OrderedQueue:
    """By a key that does not change while a sequence waits."""

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._key = key
        self._keys: list[Key] = []
        self._by_key: dict[Key, Sequence] = {}

    def push(self, seq: Sequence) -> None:
        key = self._key(seq)
        assert key not in self._by_key, f"{seq.request.id} is queued twice"
        insort(self._keys, key)
        self._by_key[key] = seq

    def peek(self, skip: Collection[Sequence] = ()) -> Sequence | None:
        return next(iter(self.first(1, skip)), None)

    def first(self, count: int, skip: Collection[Sequence] = ()) -> list[Sequence]:
        ahead = [self._by_key[key] for key in self._keys[: count + len(skip)]]
        return [seq for seq in ahead if seq not in skip][:count]

    def take(self, seq: Sequence) -> None:
        assert seq in self, f"{seq.request.id} is not queued"
        self.discard(seq)

    def discard(self, seq: Sequence) -> None:
        if self._by_key.pop(self._key(seq), None) is not None:
            del self._keys[bisect_left(self._keys, self._key(seq))]

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        pass

    def __contains__(self, seq: Sequence) -> bool:
        return self._key(seq) in self._by_key

    def __len__(self) -> int:
        return len(self._keys)


class FairQueue:
    """The tenant that was given the fewest tokens goes first (virtual token counters, Sheng et al. 2024).

    A tenant that comes back is lifted to the least counter of those waiting (or of the last one that waited),
    so idling earns no credit.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, OrderedQueue] = {}  # those with waiting sequences
        self._given: dict[str, int] = {}
        self._floor = 0

    def push(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            self._floor = max(self._floor, min((self._given[t] for t in self._tenants), default=0))
            self._given[tenant] = max(self._given.get(tenant, 0), self._floor)
            queue = self._tenants[tenant] = OrderedQueue(_by_arrival)
            self._forget_idle()
        queue.push(seq)

    def peek(self, skip: Collection[Sequence] = ()) -> Sequence | None:
        heads = [queue.peek(skip) for queue in self._tenants.values()]
        waiting = [seq for seq in heads if seq is not None]
        return min(waiting, key=lambda seq: (self._given[seq.request.tenant], _by_arrival(seq)), default=None)

    def first(self, count: int) -> list[Sequence]:
        some = [seq for queue in self._tenants.values() for seq in queue.first(count)]
        return sorted(some, key=_by_arrival)[:count]

    def take(self, seq: Sequence) -> None:
        assert seq in self, f"{seq.request.id} is not queued"
        self.discard(seq)

    def discard(self, seq: Sequence) -> None:
        queue = self._tenants.get(seq.request.tenant)
        if queue is None:
            return
        queue.discard(seq)
        if not queue:
            del self._tenants[seq.request.tenant]
            if not self._tenants:
                self._floor = max(self._floor, self._given[seq.request.tenant])

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        cost = num_prompt_tokens + OUTPUT_TOKEN_WEIGHT * num_output_tokens
        self._given[tenant] = self._given.get(tenant, self._floor) + cost

    def _forget_idle(self) -> None:
        # An idle tenant at or below the floor would be lifted to it anyway: nothing is lost with its counter.
        if len(self._given) > MAX_TENANTS_REMEMBERED:
            self._given = {t: n for t, n in self._given.items() if n > self._floor or t in self._tenants}

    def __contains__(self, seq: Sequence) -> bool:
        queue = self._tenants.get(seq.request.tenant)
        return queue is not None and seq in queue

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._tenants.values())


class CacheAwareQueue(OrderedQueue):
    """Of the first few by arrival, the one with the longest cached prefix; none is overtaken more than
    `max_deferrals` times."""

    def __init__(self, max_deferrals: int, cached_tokens: Callable[[Sequence], int]) -> None:
        super().__init__(_by_arrival)
        self._max_deferrals = max_deferrals
        self._cached_tokens = cached_tokens
        self._deferrals: dict[Sequence, int] = {}

    def peek(self, skip: Collection[Sequence] = ()) -> Sequence | None:
        window = self.first(SCORE_WINDOW, skip)
        for seq in window:
            if self._deferrals.get(seq, 0) >= self._max_deferrals:
                return seq
        return max(window, key=self._cached_tokens, default=None)  # the first of equals

    def take(self, seq: Sequence) -> None:
        for earlier in self.first(SCORE_WINDOW):
            if earlier is seq:
                break
            self._deferrals[earlier] = self._deferrals.get(earlier, 0) + 1
        super().take(seq)
        self._deferrals.pop(seq, None)

    def discard(self, seq: Sequence) -> None:
        super().discard(seq)
        self._deferrals.pop(seq, None)
