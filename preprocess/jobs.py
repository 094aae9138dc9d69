"""What the preprocessing pool takes and gives: its bounds, a source as a job, the items made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from contracts.digests import Buffer, ContentDigest, Digester
from contracts.media import MediaItem
from contracts.specs import MediaLimits
from preprocess.arena import Block, Lease
from preprocess.recipes import Recipe
from preprocess.resampling import ResizeChoice


@dataclass(frozen=True)
class PoolConfig:
    """`limits` gives the time and memory limit of a job and the pixel cap. `resize` "auto": in C where
    there is
    a compiler, to the same bits."""

    num_workers: int
    resize: ResizeChoice = "auto"
    digester: Digester = field(default_factory=Digester.random)
    limits: MediaLimits = field(default_factory=MediaLimits)
    max_queued_jobs: int = 256
    arena_bytes: int = 512 << 20
    recycle_after_items: int = 2000
    recycle_rss_bytes: int = 512 << 20
    cancel_grace_s: float = 1.0  # a cancelled item may finish in its worker for this long
    start_timeout_s: float = 60.0
    worker_module: str = "preprocess.worker"


@dataclass(frozen=True)
class MediaJob:
    """One source. `data` is read until `process` returns. `bytes_digest` covers data and recipe."""

    data: Buffer
    bytes_digest: ContentDigest
    recipe: Recipe


@dataclass(frozen=True)
class ProcessedMedia:
    """`item.features` is valid until `lease.release()`."""

    item: MediaItem
    lease: Lease


@dataclass(frozen=True)
class ProcessedSource:
    """The items of one source, in one block of the arena; features are valid until `lease.release()`."""

    items: tuple[MediaItem, ...]
    lease: Lease

    def share(self) -> tuple[ProcessedMedia, ...]:
        """Each item on a lease of its own."""
        return tuple(ProcessedMedia(item, self.lease.share()) for item in self.items)


def check_items(items: tuple[MediaItem, ...], arena: str, blocks: Sequence[Block]) -> None:
    """The features lie inside the block that was granted. Raises msgspec.ValidationError."""
    for item in items:
        ref = item.features
        within = ref is not None and any(
            ref.arena == arena and b.offset <= ref.offset <= ref.offset + ref.nbytes <= b.offset + b.nbytes
            for b in blocks
        )
        if not within:
            raise msgspec.ValidationError("features outside of the granted block")
    if not items:
        raise msgspec.ValidationError("a source without items")
