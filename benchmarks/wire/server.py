"""What a server says about itself: its model, its version, and its cache counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from benchmarks.wire.connection import HttpPool

T = TypeVar("T")

# vLLM and ours: `<prefix>_<name>_cache_{hits,queries}[_total]`, with labels per engine that are summed.
_COUNTER = re.compile(
    r"^(?:\w+:|omnistage_)?(?P<cache>\w*cache)_(?P<what>hits|queries)(?:_total)?(?:\{[^}]*\})?\s+(?P<value>\S+)",
    re.M,
)


class CacheCount(msgspec.Struct, frozen=True):
    """How often a cache was asked and knew, in its own unit (tokens for prefixes, items for media)."""

    hits: float
    queries: float

    @property
    def share(self) -> float | None:
        return self.hits / self.queries if self.queries else None


CacheCounts = Mapping[str, CacheCount]
"""By cache name, such as `prefix_cache`."""


class ServerInfo(msgspec.Struct, frozen=True):
    url: str
    model: str | None
    version: str | None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str | None = None


class _Voices(msgspec.Struct):
    default: str | None = None


async def describe(pool: HttpPool, model: str | None) -> ServerInfo:
    """`model` wins over the first one listed; None stays None where the server lists none."""
    if model is None:
        models = _decode(await pool.get("/v1/models"), _Models)
        model = models.data[0].id if models is not None and models.data else None
    version = _decode(await pool.get("/version"), _Version)
    return ServerInfo(pool.url, model, version.version if version is not None else None)


async def own_voice(pool: HttpPool, otherwise: str) -> str:
    """What `/v1/audio/voices` calls the default, where the server has that route."""
    voices = _decode(await pool.get("/v1/audio/voices"), _Voices)
    return otherwise if voices is None or voices.default is None else voices.default


async def cache_counts(pool: HttpPool) -> CacheCounts:
    """Empty when the server exposes no such counters."""
    status, body = await pool.get("/metrics")
    return parse_cache_counts(body.decode(errors="replace")) if status == 200 else {}


def parse_cache_counts(exposition: str) -> CacheCounts:
    sums: dict[tuple[str, str], float] = {}
    for match in _COUNTER.finditer(exposition):
        key = (match["cache"].split(":")[-1], match["what"])
        sums[key] = sums.get(key, 0.0) + float(match["value"])
    return {
        cache: CacheCount(hits=sums[cache, "hits"], queries=value)
        for (cache, what), value in sums.items()
        if what == "queries" and (cache, "hits") in sums
    }


def counts_between(before: CacheCounts, after: CacheCounts) -> dict[str, CacheCount]:
    zero = CacheCount(0.0, 0.0)
    return {
        name: CacheCount(
            count.hits - before.get(name, zero).hits, count.queries - before.get(name, zero).queries
        )
        for name, count in after.items()
    }


def _decode(answer: tuple[int, bytes], kind: type[T]) -> T | None:
    status, body = answer
    if status != 200:
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None
