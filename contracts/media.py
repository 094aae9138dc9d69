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
    columns: tuple[int, int] | None = None  # the part [start, end) of the last axis that is meant; None: all


class MediaOptions(msgspec.Struct, frozen=True):
    """Per-item request options that change the features; part of the `bytes_digest`.

    Of a video: `fps` (frames sampled a second) and `num_frames` (sampled uniformly) exclude each other,
    `max_frames` bounds either, `with_audio` makes its sound track an item of its own after it.
    """

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    with_audio: bool = False

    def key(self) -> str:
        return msgspec.json.encode(self).decode()


class MediaSource(msgspec.Struct, frozen=True):
    """Where the client says the item is: an URL as sent (data:, http(s):, file:) and its options."""

    modality: Modality
    url: str
    options: MediaOptions = MediaOptions()
    param: str = "messages"  # JSON path of the part, for errors


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One preprocessed item. `features` is None when only its identity is known (media index hit).

    Features: image uint8 [H, W, 3]; video uint8 [T, H, W, 3], T a multiple of the temporal patch; audio
    float32 log-mel [mels, frames]. Items of one source share its `bytes_digest`.
    """

    modality: Modality
    bytes_digest: ContentDigest
    pixel_digest: ContentDigest  # of the features; of audio: of the decoded samples and its AudioSpec
    num_tokens: int
    grid_thw: tuple[int, int, int] = (0, 0, 0)  # in patches, before spatial merging
    source_size: tuple[int, int] = (0, 0)  # width, height in pixels, turned upright
    features: FeatureRef | None = None
    num_frames: int = 0  # audio: mel frames that hold sound; video: sampled frames, before temporal padding
    start_s: float = 0.0  # audio cut into windows: where this one begins in its source
    duration_s: float = 0.0
    timestamps_s: tuple[float, ...] = ()  # video: mean time of the frames of each temporal patch
    seconds_per_grid: float = 0.0  # video: seconds from one temporal patch to the next
    of_video: bool = False  # audio: the sound track of the video item before it


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
