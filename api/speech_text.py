"""Long text in pieces that are spoken one after another: whole sentences, as few pieces as may be."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A piece ends after a sentence, else after a clause, else after a word, else anywhere.
_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")
_CLAUSE = re.compile(r"(?<=[,;:—–])\s+|(?<=[，、；：])")
_WORD = re.compile(r"\s+")


def pieces_of(text: str, max_chars: int) -> list[str]:
    """The text in pieces of at most `max_chars` characters, nothing lost but the white space between them."""
    assert max_chars > 0
    pieces: list[str] = []
    for part in _parts(text.strip(), max_chars, (_SENTENCE, _CLAUSE, _WORD)):
        if pieces and len((pieces[-1] + part).strip()) <= max_chars:
            pieces[-1] += part
        else:
            pieces.append(part)
    return [piece.strip() for piece in pieces if piece.strip()]


def _parts(text: str, max_chars: int, ends: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Parts whose concatenation is the text, none longer than `max_chars`, cut at the strongest ends that
    do."""
    if len(text.strip()) <= max_chars:
        yield text
        return
    if not ends:
        for start in range(0, len(text), max_chars):
            yield text[start : start + max_chars]
        return
    start = 0
    for match in (*ends[0].finditer(text), None):
        end = len(text) if match is None else match.end()
        part, start = text[start:end], end
        if part:
            yield from _parts(part, max_chars, ends[1:])
