"""Preprocessor: the coordinator's door to media. Fetch, identify, look up, preprocess at most once.

resolve:      data URL whose text was seen ─▶ index hit: metadata alone (one hash of the text)
              fetch ─▶ bytes_digest ─▶ index hit: metadata alone (one hash of the bytes)
                                    └▶ miss: pool job, shared by every request that asks meanwhile
materialize:  the pool again, for an indexed item whose features turn out to be needed
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from contracts.compilation import BuildError
from contracts.digests import Buffer, ContentDigest
from contracts.errors import BadRequest, EngineError, OmnistageError
from contracts.media import MediaItem, MediaSource
from contracts.specs import MediaSpecs
from preprocess.addresses import Resolver, system_resolver
from preprocess.base64 import compile_base64
from preprocess.fetch import INLINE_BYTES, Fetcher
from preprocess.index import LRU, MediaIndex
from preprocess.jobs import MediaJob, PoolConfig, ProcessedMedia, ProcessedSource
from preprocess.pool import PreprocessPool
from preprocess.recipes import Recipe, make_recipe
from preprocess.single_flight import SingleFlight

logger = logging.getLogger(__name__)

INLINE_DIGEST_BYTES = 1 << 20
"""Up to this size content is hashed on the event loop: 0.1 ms, less than a thread takes to answer."""


@dataclass(frozen=True)
class PreprocessorConfig:
    pool: PoolConfig
    index_capacity: int = 100_000
    max_concurrent_fetches: int = 256


@dataclass(frozen=True)
class ResolvedMedia:
    """One item of a request: identity for sure, features if they had to be made.

    `data`, the encoded bytes, or else `source` stays for `materialize`. The holder calls `release` when the
    request ends.
    """

    item: MediaItem
    source: MediaSource
    recipe: Recipe
    data: Buffer | None
    position: int  # among the items of its source
    processed: ProcessedMedia | None

    def release(self) -> None:
        """Idempotent; ends the lease on the features, if there is one."""
        if self.processed is not None:
            self.processed.lease.release()


@dataclass(frozen=True)
class KnownText:
    """What a data URL's text stands for."""

    bytes_digest: ContentDigest
    num_bytes: int


@dataclass(eq=False)
class _Flight:
    """A pool job under way and how many callers wait for it; the last to leave cleans up."""

    task: asyncio.Task[ProcessedSource]
    waiters: int = 0


@dataclass
class PreprocessCounters:
    """`jobs_total` counts decodes asked of the pool; a repeated image must not raise it."""

    sources_total: int = 0
    source_bytes_total: int = 0
    index_hits_total: int = 0
    index_misses_total: int = 0
    jobs_total: int = 0
    shared_jobs_total: int = 0  # calls that joined a job under way
    materialized_total: int = 0


class Preprocessor:
    """All methods on the front process's event loop."""

    def __init__(self, config: PreprocessorConfig, *, resolver: Resolver = system_resolver) -> None:
        self.config = config
        self.pool = PreprocessPool(config.pool)
        self.index = MediaIndex(config.index_capacity)
        self.counters = PreprocessCounters()
        self._texts: LRU[ContentDigest, KnownText] = LRU(config.index_capacity)
        self._fetcher = Fetcher(
            config.pool.limits, max_concurrent=config.max_concurrent_fetches, resolver=resolver
        )
        self._reads: SingleFlight[ContentDigest, tuple[Buffer, ContentDigest]] = SingleFlight()
        self._flights: dict[ContentDigest, _Flight] = {}

    async def start(self) -> None:
        try:
            await asyncio.to_thread(compile_base64)
        except BuildError as error:
            logger.info("base64 is decoded by the interpreter: %s", error)
        await self.pool.start()

    async def close(self) -> None:
        await self.pool.close()
        await self._fetcher.close()

    async def resolve(
        self, source: MediaSource, specs: MediaSpecs, auto_max_pixels: int | None = None
    ) -> tuple[ResolvedMedia, ...]:
        """Fetches and identifies the items of a source; preprocesses them only when the index does not know
        them.

        `auto_max_pixels`: what a load policy leaves to `detail: auto`. Raises BadRequest kinds with
        source.param (and the option's name behind it), TooManyRequests, ServiceUnavailable. Cancelling frees
        everything.
        """
        try:
            recipe = make_recipe(source, specs, self.config.pool.limits, auto_max_pixels)
            text = await self._digest_of_text(source.url, recipe.key())
            if (known := self._known_by(text)) is not None:
                return tuple(
                    ResolvedMedia(item, source, recipe, None, i, None) for i, item in enumerate(known)
                )
            data, digest = await self._read(source, text, recipe.key())
            self.counters.sources_total += 1
            self.counters.source_bytes_total += len(data)
            job = MediaJob(data, digest, recipe)
            if (known := self.index.get(job.bytes_digest)) is not None:
                self.counters.index_hits_total += 1
                self._remember(text, job)
                return tuple(
                    ResolvedMedia(item, source, recipe, data, i, None) for i, item in enumerate(known)
                )
            self.counters.index_misses_total += 1
            processed = await self._process(job)
        except OmnistageError as error:
            raise _for_param(error, source.param) from error
        self._remember(text, job)
        return tuple(
            ResolvedMedia(media.item, source, recipe, data, i, media) for i, media in enumerate(processed)
        )

    async def materialize(self, resolved: ResolvedMedia) -> ProcessedMedia:
        """Features of an item, on a lease of the caller's own."""
        self.counters.materialized_total += 1
        try:
            data = resolved.data
            if data is None:
                data = await self._fetcher.fetch(resolved.source)
            made = await self._process(MediaJob(data, resolved.item.bytes_digest, resolved.recipe))
        except OmnistageError as error:
            raise _for_param(error, resolved.source.param) from error
        for position, media in enumerate(made):
            if position != resolved.position:
                media.lease.release()
        digests = [media.item.pixel_digest for media in made]
        if digests[resolved.position : resolved.position + 1] != [resolved.item.pixel_digest]:
            made[min(resolved.position, len(made) - 1)].lease.release()
            raise EngineError("an item's content changed between two decodes", stage="preprocess")
        return made[resolved.position]

    def stats(self) -> dict[str, float]:
        """Counters and gauges for StageStats."""
        values: dict[str, float] = dict(vars(self.counters))
        values |= vars(self.pool.counters)
        values["index_items"] = len(self.index)
        values["arena_bytes"] = self.pool.arena.allocated_bytes
        return values

    def check_integrity(self) -> str | None:
        """None when the conservation laws hold."""
        if any(flight.waiters == 0 for flight in self._flights.values()):
            return "a preprocessing job that nobody waits for"
        return self.pool.check_integrity()

    async def _read(
        self, source: MediaSource, text: ContentDigest | None, options: str
    ) -> tuple[Buffer, ContentDigest]:
        """A large data URL that comes several times at once is decoded once: users who begin with one picture
        would each wait for all."""
        if text is None or len(source.url) <= INLINE_BYTES:
            return await self._fetch(source, options)
        return await self._reads.join(text, lambda: self._fetch(source, options))

    async def _fetch(self, source: MediaSource, options: str) -> tuple[Buffer, ContentDigest]:
        data = await self._fetcher.fetch(source)
        return data, await self._digest(data, options)

    async def _digest_of_text(self, url: str, options: str) -> ContentDigest | None:
        """Of a data URL, which holds its content; None for any other."""
        if url[:5].lower() != "data:":
            return None
        digester = self.config.pool.digester
        if len(url) <= INLINE_DIGEST_BYTES:
            return digester.of_text(url, options)
        return await asyncio.to_thread(digester.of_text, url, options)

    def _known_by(self, text: ContentDigest | None) -> tuple[MediaItem, ...] | None:
        seen = None if text is None else self._texts.get(text)
        known = None if seen is None else self.index.get(seen.bytes_digest)
        if seen is not None and known is not None:
            self.counters.sources_total += 1
            self.counters.source_bytes_total += seen.num_bytes
            self.counters.index_hits_total += 1
        return known

    def _remember(self, text: ContentDigest | None, job: MediaJob) -> None:
        if text is not None:
            self._texts.put(text, KnownText(job.bytes_digest, len(job.data)))

    async def _digest(self, data: Buffer, options: str) -> ContentDigest:
        digester = self.config.pool.digester
        if len(data) <= INLINE_DIGEST_BYTES:
            return digester.of_bytes(data, options)
        return await asyncio.to_thread(digester.of_bytes, data, options)

    async def _process(self, job: MediaJob) -> tuple[ProcessedMedia, ...]:
        """Single flight: one pool job per digest at a time; each caller gets leases of its own."""
        flight = self._flights.get(job.bytes_digest)
        if flight is None:
            flight = self._flights[job.bytes_digest] = _Flight(asyncio.create_task(self.pool.process(job)))
            self.counters.jobs_total += 1
        else:
            self.counters.shared_jobs_total += 1
        flight.waiters += 1
        try:
            processed = await asyncio.shield(flight.task)
            self.index.put(processed.items)
            return processed.share()
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                self._land(job.bytes_digest, flight)

    def _land(self, digest: ContentDigest, flight: _Flight) -> None:
        """The last waiter is leaving: its own lease is shared already, the flight's ends here."""
        if self._flights.get(digest) is flight:
            del self._flights[digest]
        if not flight.task.done():
            flight.task.cancel()
        elif not flight.task.cancelled() and flight.task.exception() is None:
            flight.task.result().lease.release()


def _for_param(error: OmnistageError, param: str) -> OmnistageError:
    """The same error for this item of this request (a shared job's error belongs to no single one); an option
    it names is named as the item's."""
    info = error.info()
    if not isinstance(error, BadRequest):
        return info.to_exception()
    if info.param is None:
        return msgspec.structs.replace(info, param=param).to_exception()
    path = f"{param}.{info.param}" if param else info.param
    message = info.message.replace(info.param, f"`{path}`", 1)
    return msgspec.structs.replace(info, param=path, message=message).to_exception()
