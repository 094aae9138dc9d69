"""Token ids of a rendered conversation piece by piece: a later turn repeats all but the last few."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from tokenizers import AddedToken

MAX_KEPT_BYTES = 64 << 20
_BYTES_PER_ID = 40  # a place in a tuple and an int
_MAX_SHARE = 8  # a piece takes at most this part of the room


class PieceEncoder:
    """Cuts text before every one of `cuts` (see `safe_cuts`) and keeps the ids of the pieces used last, which
    `encode` gives. Thread-safe if that is."""

    def __init__(
        self,
        cuts: Sequence[str],
        encode: Callable[[str], list[int]],
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._cut = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        self._encode = encode
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> list[int]:
        if self._cut is None:
            return self._encode(text)
        ids: list[int] = []
        starts = [found.start() for found in self._cut.finditer(text)]
        for start, end in pairwise((0, *starts, len(text))):
            if start < end:
                ids += self._ids(text[start:end])
        return ids

    def _ids(self, piece: str) -> tuple[int, ...]:
        with self._lock:
            kept = self._kept.get(piece)
            if kept is not None:
                self._kept.move_to_end(piece)
                return kept
        ids = tuple(self._encode(piece))
        if _num_bytes(piece, ids) * _MAX_SHARE <= self._max_kept_bytes:
            self._keep(piece, ids)
        return ids

    def _keep(self, piece: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            if piece in self._kept:  # another thread was faster
                return
            self._kept[piece] = ids
            self._kept_bytes += _num_bytes(piece, ids)
            while self._kept_bytes > self._max_kept_bytes:
                self._kept_bytes -= _num_bytes(*self._kept.popitem(last=False))


def _num_bytes(piece: str, ids: tuple[int, ...]) -> int:
    return len(piece) + _BYTES_PER_ID * len(ids)


def safe_cuts(added_tokens: Sequence[AddedToken]) -> list[str]:
    """The special tokens before which a text can be cut without changing its ids.

    A tokenizer looks for added tokens first, from left to right, and then treats what lies between them each
    by itself. So it is the same before and behind a token that is found wherever it is written: one that no
    other token reaches into.
    """
    if any(token.single_word for token in added_tokens):  # these look at the characters around them
        return []
    contents = [token.content for token in added_tokens]
    return [
        token.content
        for token in added_tokens
        if token.special
        and not (token.normalized or token.lstrip or token.rstrip)
        and token.content
        and not token.content[0].isspace()
        and not any(_reaches_into(other, token.content) for other in contents)
    ]


def _reaches_into(other: str, token: str) -> bool:
    """Whether `other` may be matched where it covers a beginning of `token`, but begins elsewhere or ends
    later."""
    if other != token and token in other:
        return True
    return any(other.endswith(token[:n]) for n in range(1, len(token)))
