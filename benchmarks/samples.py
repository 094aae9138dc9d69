"""Percentiles of a set of measurements, and how they are written. Times in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

CDF_STEPS = 100


class Summary(msgspec.Struct, frozen=True):
    """`cdf` holds the percentiles 0, 1 … 100, enough to draw the distribution without every sample."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    cdf: tuple[float, ...]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. `ordered` must be sorted and not empty."""
    assert ordered
    rank = percent / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(samples: Sequence[float]) -> Summary | None:
    """None for no samples: an absent measurement is not a zero."""
    if not samples:
        return None
    ordered = sorted(samples)
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        max=ordered[-1],
        cdf=tuple(percentile(ordered, step * 100 / CDF_STEPS) for step in range(CDF_STEPS + 1)),
    )


def median(samples: Sequence[float]) -> float | None:
    return percentile(sorted(samples), 50) if samples else None
