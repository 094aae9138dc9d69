"""A recording under transcription: its features stay for all of its windows, each a media handle of its
own."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from contracts.digests import ContentDigest
from contracts.media import MediaItem
from stages.media_claims import MediaClaim


class Recording:
    """Owns the claim on the whole recording's features. They may be taken back while no window is pinned, and
    are given back for good when it is closed and the last window has been released."""

    def __init__(self, claim: MediaClaim) -> None:
        self._claim = claim
        self._pinned: set[Window] = set()
        self._closed = False

    @property
    def item(self) -> MediaItem:
        return self._claim.item

    def window(self, start: int, end: int, num_tokens: int) -> Window:
        """Mel frames [start, end), which the encoder makes `num_tokens` positions of."""
        return Window(self, start, end, num_tokens)

    def close(self) -> None:
        self._closed = True
        self._let_go()

    def pin(self, window: Window) -> MediaItem:
        self._pinned.add(window)
        return self._claim.pin()

    async def materialize(self, window: Window) -> MediaItem:
        self._pinned.add(window)
        return await self._claim.materialize()

    def unpin(self, window: Window) -> None:
        if window in self._pinned:
            self._pinned.remove(window)
            self._let_go()

    def _let_go(self) -> None:
        if self._pinned:
            return
        if self._closed:
            self._claim.release()
        else:
            self._claim.unpin()


class Window:
    """See `stages.coordinator.MediaHandle`."""

    def __init__(self, recording: Recording, start: int, end: int, num_tokens: int) -> None:
        self._recording = recording
        self._columns = (start, end)
        self._num_tokens = num_tokens
        # A part of some content is content of its own.
        place = f"{start}:{end}".encode()
        self._digest = ContentDigest(blake2b(recording.item.pixel_digest + place, digest_size=16).digest())

    @property
    def item(self) -> MediaItem:
        return self._part_of(self._recording.item)

    @property
    def is_new(self) -> bool:
        return False  # windows of a recording are asked about more than once

    def pin(self) -> MediaItem:
        return self._part_of(self._recording.pin(self))

    async def materialize(self) -> MediaItem:
        return self._part_of(await self._recording.materialize(self))

    def release(self) -> None:
        self._recording.unpin(self)

    def _part_of(self, whole: MediaItem) -> MediaItem:
        features = whole.features
        if features is not None:
            features = msgspec.structs.replace(features, columns=self._columns)
        start, end = self._columns
        return msgspec.structs.replace(
            whole,
            pixel_digest=self._digest,
            num_tokens=self._num_tokens,
            num_frames=end - start,
            features=features,
        )
