"""What share of a request a perfect cache would know, from nothing but the requests sent before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.chat.workload import Message

CHARS_PER_TOKEN = 4.0
TOKENS_PER_MESSAGE = 4.0


@dataclass(frozen=True)
class Expectation:
    """Token counts are estimates from characters and pixels: use them for shares only."""

    prompt_tokens: float
    known_prefix_tokens: float
    num_images: int
    num_known_images: int


class SentPrefixes:
    """Every prefix and image sent so far, at the granularity of roles, images and whole texts.

    The count is of requests *sent*: one that is still running when the next comes may not serve it yet.
    """

    def __init__(self, pixels_per_token: float) -> None:
        self._pixels_per_token = pixels_per_token
        self._prefixes: set[bytes] = set()
        self._images: set[bytes] = set()

    def observe(self, messages: Sequence[Message]) -> Expectation:
        """What of this request was sent before; from then on all of it was."""
        total = known = 0.0
        for key, num_tokens in self._chain(messages):
            total += num_tokens
            known += num_tokens if key in self._prefixes else 0.0
            self._prefixes.add(key)
        digests = [image.digest for message in messages for image in message.images]
        num_known = sum(digest in self._images for digest in digests)
        self._images.update(digests)
        return Expectation(total, known, len(digests), num_known)

    def answered(self, messages: Sequence[Message], answer: str) -> None:
        """The server produced `answer` itself, so it holds that text behind the request's prefix too."""
        self._prefixes.update(key for key, _ in self._chain([*messages, Message("assistant", answer)]))

    def _chain(self, messages: Sequence[Message]) -> Iterator[tuple[bytes, float]]:
        """A key stands for everything up to its piece: a known key means a known prefix."""
        key = b""
        for message in messages:
            pieces = [(b"role:" + message.role.encode(), TOKENS_PER_MESSAGE)]
            for image in message.images:
                num_pixels = image.size.width * image.size.height
                pieces.append((b"image:" + image.digest, num_pixels / self._pixels_per_token))
            pieces.append((b"text:" + message.text.encode(), len(message.text) / CHARS_PER_TOKEN))
            for content, num_tokens in pieces:
                key = hashlib.blake2b(key + content, digest_size=16).digest()
                yield key, num_tokens
