"""Seconds that a server counts by stage and edge, from its metrics: what a run took of each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.wire.connection import HttpPool

# Counters and sums of histograms, of seconds, with a label that says whose they are.
_COUNTER = re.compile(
    r"^omnistage:(?P<what>\w+)_seconds_(?:total|sum)\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)", re.M
)
_OWNER = re.compile(r'\b(?:stage|edge)="([^"]+)"')


async def counted_seconds(pool: HttpPool) -> Mapping[str, float]:
    """By "stage what"; empty where the server does not tell."""
    status, body = await pool.get("/metrics")
    return parse_seconds(body.decode(errors="replace")) if status == 200 else {}


def parse_seconds(exposition: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for match in _COUNTER.finditer(exposition):
        owner = _OWNER.search(match["labels"])
        if owner is not None:
            found[f"{owner[1]} {match['what'].replace('_', ' ')}"] = float(match["value"])
    return found


def seconds_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    spent = {name: value - before.get(name, 0.0) for name, value in sorted(after.items())}
    return {name: seconds for name, seconds in spent.items() if seconds > 0}
