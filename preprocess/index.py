"""MediaIndex: what is known of items whose encoded bytes were seen before, by bytes_digest."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from contracts.digests import ContentDigest
from contracts.media import MediaItem


class MediaIndex:
    """A bounded LRU of sources: their items' metadata, without features (a few hundred bytes each)."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._items: OrderedDict[ContentDigest, tuple[MediaItem, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, digest: ContentDigest) -> tuple[MediaItem, ...] | None:
        items = self._items.get(digest)
        if items is not None:
            self._items.move_to_end(digest)
        return items

    def put(self, items: tuple[MediaItem, ...]) -> None:
        """`items` are all of one source."""
        digest = items[0].bytes_digest
        assert all(item.bytes_digest == digest for item in items)
        self._items[digest] = tuple(msgspec.structs.replace(item, features=None) for item in items)
        self._items.move_to_end(digest)
        if len(self._items) > self.capacity:
            self._items.popitem(last=False)

    def clear(self) -> None:
        self._items.clear()
