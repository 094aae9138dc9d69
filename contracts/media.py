"""What a picture, a sound or a video is between the stages: identity, size in tokens, where its features
lie."""

from __future__ import annotations

from typing import Literal

import msgspec

from contracts.digests import ContentDigest

Modality = Literal["image", "audio", "video"]
Detail = Literal["auto", "low", "high"]


class FeatureRef(msgspec.Struct, frozen=True):
    """Where preprocessed features lie in a shared arena. Valid until its lease is released."""

    arena: str
    offset: int
    nbytes: int
    dtype: str  # numpy name: "uint8", "float32"
    shape: tuple[int, ...]


class MediaOptions(msgspec.Struct, frozen=True):
    """Per-item request options that change the features; part of the `bytes_digest`."""

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None

    def key(self) -> str:
        return f"detail={self.detail};min={self.min_pixels};max={self.max_pixels}"


class MediaSource(msgspec.Struct, frozen=True):
    """Where the client says the item is: an URL as sent (data:, http(s):, file:) and its options."""

    modality: Modality
    url: str
    options: MediaOptions = MediaOptions()
    param: str = "messages"  # JSON path of the part, for errors


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One preprocessed item. `features` is None when only its identity is known (media index hit)."""

    modality: Modality
    bytes_digest: ContentDigest
    pixel_digest: ContentDigest
    num_tokens: int
    grid_thw: tuple[int, int, int]  # in patches, before spatial merging
    source_size: tuple[int, int]  # width, height in pixels, after EXIF orientation
    features: FeatureRef | None = None


class MediaSpan(msgspec.Struct, frozen=True):
    """Positions of a prompt that take one item's embeddings: `length` rows from `offset`.

    `embed_mask`, if given, has `length` entries; only the True ones take a row of the embeddings.
    """

    offset: int
    length: int
    item_index: int
    digest: ContentDigest
    embed_mask: tuple[bool, ...] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length


class Prompt(msgspec.Struct, frozen=True):
    """Token ids with placeholders expanded, and the spans in ascending order of offset."""

    token_ids: list[int]
    items: tuple[MediaItem, ...] = ()
    spans: tuple[MediaSpan, ...] = ()

    @property
    def num_media_tokens(self) -> int:
        return sum(span.length for span in self.spans)
