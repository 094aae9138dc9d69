"""What a server counts by stage and edge, from its metrics: seconds, and steps, frames and chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from benchmarks.wire.connection import HttpPool

# Counters, sums and counts of histograms, with a label that says whose they are.
_SECONDS = re.compile(
    r"^omnistage:(?P<what>\w+)_seconds_(?:total|sum)\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)", re.M
)
_COUNT = re.compile(
    r"^omnistage:(?P<what>\w+?)(?P<kind>_total|_seconds_count)\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)", re.M
)
_OWNER = re.compile(r'\b(?:stage|edge)="([^"]+)"')


class Counted(NamedTuple):
    """By "stage what"."""

    seconds: Mapping[str, float]
    counts: Mapping[str, float]


async def counted(pool: HttpPool) -> Counted:
    """Nothing where the server does not tell."""
    status, body = await pool.get("/metrics")
    exposition = body.decode(errors="replace") if status == 200 else ""
    return Counted(parse_seconds(exposition), parse_counts(exposition))


def parse_seconds(exposition: str) -> dict[str, float]:
    return _owned(_SECONDS.finditer(exposition))


def parse_counts(exposition: str) -> dict[str, float]:
    """What is timed is counted as often ("talker stage step"); seconds are not counts."""
    found = _COUNT.finditer(exposition)
    return _owned(match for match in found if not match["what"].endswith("_seconds"))


def _owned(matches: Iterable[re.Match[str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for match in matches:
        owner = _OWNER.search(match["labels"])
        if owner is not None:
            found[f"{owner[1]} {match['what'].replace('_', ' ')}"] = float(match["value"])
    return found


def increase(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    grown = {name: value - before.get(name, 0.0) for name, value in sorted(after.items())}
    return {name: value for name, value in grown.items() if value > 0}
