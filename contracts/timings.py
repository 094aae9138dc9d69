"""Times in buckets: what stages and edges measure of themselves, and how that crosses to the front
process."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)


def edge_name(source: str, target: str) -> str:
    return f"{source}->{target}"


class Timing(msgspec.Struct, frozen=True):
    """`place`: a stage or an edge ("vision->thinker"). `counts`: of times up to each bound that are over the
    bound before it, then of those over all bounds."""

    name: str
    place: str
    counts: tuple[int, ...]
    total_s: float


class Times:
    """All since it was made."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def as_timing(self, name: str, place: str) -> Timing:
        return Timing(name, place, tuple(self._counts), self.total_s)
