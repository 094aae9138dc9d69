"""MediaIndex: what is known of items whose encoded bytes were seen before, by bytes_digest."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from contracts.digests import ContentDigest
from contracts.media import MediaItem


class MediaIndex:
    """A bounded LRU of item metadata, without features (a few hundred bytes each)."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._items: OrderedDict[ContentDigest, MediaItem] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, digest: ContentDigest) -> MediaItem | None:
        item = self._items.get(digest)
        if item is not None:
            self._items.move_to_end(digest)
        return item

    def put(self, item: MediaItem) -> None:
        self._items[item.bytes_digest] = msgspec.structs.replace(item, features=None)
        self._items.move_to_end(item.bytes_digest)
        if len(self._items) > self.capacity:
            self._items.popitem(last=False)

    def clear(self) -> None:
        self._items.clear()
