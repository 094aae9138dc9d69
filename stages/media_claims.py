"""Media claims: who holds preprocessed features in the shared arena, and which of them may be taken back.

    resolved ──▶ idle ──pin (Encode sent)──▶ pinned ──release (consumed)──▶ none ──materialize──▶ pinned
                  └──arena is full: the oldest idle ones are dropped──▶ none

Requests hold features while they wait for others of their own, so without taking idle ones back a full arena
could make every request wait for every other.
"""

from __future__ import annotations

import asyncio

import msgspec

from contracts.media import MediaItem
from preprocess.jobs import ProcessedMedia
from preprocess.service import Preprocessor, ResolvedMedia


class MediaClaim:
    """One item of one request; see `stages.coordinator.MediaHandle`."""

    def __init__(self, registry: ClaimRegistry, resolved: ResolvedMedia) -> None:
        self._registry = registry
        self._resolved = resolved
        self._processed: ProcessedMedia | None = resolved.processed
        self._materializing = asyncio.Lock()

    @property
    def item(self) -> MediaItem:
        """Identity and size; its features, if any, are not protected."""
        return msgspec.structs.replace(self._resolved.item, features=None)

    @property
    def is_new(self) -> bool:
        return self._resolved.processed is not None and self.holds_features

    def pin(self) -> MediaItem:
        self._registry.forget(self)
        if self._processed is None:
            return self.item
        return msgspec.structs.replace(self._resolved.item, features=self._processed.item.features)

    async def materialize(self) -> MediaItem:
        async with self._materializing:
            if self._processed is None:
                self._processed = await self._registry.preprocessor.materialize(self._resolved)
            return self.pin()

    def unpin(self) -> None:
        """Nobody reads the features now; they may be pinned again, or taken back."""
        if self._processed is not None:
            self._registry.idle(self)

    def release(self) -> None:
        self._registry.forget(self)
        if self._processed is not None:
            self._processed.lease.release()
            self._processed = None

    @property
    def holds_features(self) -> bool:
        return self._processed is not None


class ClaimRegistry:
    """Knows the idle claims in order of age and drops them when the arena has waiters."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self.preprocessor = preprocessor
        self._idle: dict[MediaClaim, None] = {}  # insertion order = age
        self.num_dropped = 0
        preprocessor.pool.arena.on_pressure = self.relieve

    def claim(self, resolved: ResolvedMedia) -> MediaClaim:
        """Takes over the features that `resolved` holds."""
        claim = MediaClaim(self, resolved)
        if claim.holds_features:
            self.idle(claim)
        return claim

    def idle(self, claim: MediaClaim) -> None:
        """Its features may be taken back from now on."""
        self._idle[claim] = None
        self.relieve()

    def forget(self, claim: MediaClaim) -> None:
        self._idle.pop(claim, None)

    def relieve(self) -> None:
        """Drops idle claims, oldest first, until nobody waits for room."""
        arena = self.preprocessor.pool.arena
        while arena.num_waiting and self._idle:
            next(iter(self._idle)).release()
            self.num_dropped += 1
