"""A prompt under construction: which item a placeholder stands for, and where its tokens come to lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from contracts.digests import ContentDigest
from contracts.errors import BadRequest
from contracts.media import MediaItem, MediaSpan, Modality, Prompt


class PromptBuilder:
    """Append to `token_ids` for text, call `media` for tokens that take an item's rows, in their order."""

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self.items = items
        self.token_ids: list[int] = []
        self._spans: list[MediaSpan] = []

    def media(self, token: int, index: int, length: int) -> None:
        digest = _placed_digest(self.items[index])
        self._spans.append(MediaSpan(len(self.token_ids), length, index, digest))
        self.token_ids += [token] * length

    def prompt(self) -> Prompt:
        return Prompt(self.token_ids, tuple(self.items), tuple(self._spans))


def find_placeholders(
    token_ids: Sequence[int], modality_of: Mapping[int, Modality], items: Sequence[MediaItem]
) -> Iterator[tuple[int, int]]:
    """(place, index of the item) of every placeholder; a video's sound track has none of its own.

    Raises BadRequest when placeholders and items do not match in kind and number.
    """
    places = sorted(place for token_id in modality_of for place in _places_of(token_id, token_ids))
    own = [index for index, item in enumerate(items) if not item.of_video]
    if len(places) != len(own):
        raise BadRequest(
            f"the prompt has {len(places)} media placeholders but {len(own)} items came with it",
            param="messages",
        )
    for number, (place, index) in enumerate(zip(places, own, strict=True)):
        modality, item = modality_of[token_ids[place]], items[index]
        if modality != item.modality:
            raise BadRequest(
                f"placeholder {number} of the prompt is for {modality}, its item is {item.modality}",
                param="messages",
            )
        assert item.num_tokens > 0, "an item without tokens"
    return iter(zip(places, own, strict=True))


def _places_of(token_id: int, token_ids: Sequence[int]) -> Iterator[int]:
    place = -1
    while True:
        try:
            place = token_ids.index(token_id, place + 1)
        except ValueError:
            return
        yield place


def _placed_digest(item: MediaItem) -> ContentDigest:
    """Identity of an item's rows at their positions: the same frames at another pace are another prompt."""
    if item.modality != "video":
        return item.pixel_digest
    pace = struct.pack("<d", item.seconds_per_grid)
    return ContentDigest(xxhash.xxh3_128_digest(item.pixel_digest + pace))
