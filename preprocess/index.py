"""What is known of items whose encoded bytes were seen before, by bytes_digest; bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from contracts.digests import ContentDigest
from contracts.media import MediaItem

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Forgets what was asked for longest ago."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self.capacity:
            self._values.popitem(last=False)

    def clear(self) -> None:
        self._values.clear()


class MediaIndex:
    """Sources: their items' metadata, without features (a few hundred bytes each)."""

    def __init__(self, capacity: int) -> None:
        self._sources: LRU[ContentDigest, tuple[MediaItem, ...]] = LRU(capacity)

    def __len__(self) -> int:
        return len(self._sources)

    def get(self, digest: ContentDigest) -> tuple[MediaItem, ...] | None:
        return self._sources.get(digest)

    def put(self, items: tuple[MediaItem, ...]) -> None:
        """`items` are all of one source."""
        digest = items[0].bytes_digest
        assert all(item.bytes_digest == digest for item in items)
        self._sources.put(digest, tuple(msgspec.structs.replace(item, features=None) for item in items))

    def clear(self) -> None:
        self._sources.clear()
