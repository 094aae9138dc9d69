"""A window's text tokens as words with times: cut before white space, punctuation kept with its word."""

from __future__ import annotations

import codecs
import string
from collections.abc import Callable, Sequence

# Written without spaces between words: every character that is complete is a word.
UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
OPENING = "\"'“¿([{-"
CLOSING = "\"'.。,，!！?？:：”)]}、"

Word = tuple[str, int]  # its text, its number of tokens


def words_of(token_ids: Sequence[int], bytes_of: Callable[[int], bytes], language: str) -> list[Word]:
    """The words' texts joined are the tokens' text; their numbers of tokens add up."""
    if not token_ids:
        return []
    pieces = _whole_characters(token_ids, bytes_of)
    if language not in UNSPACED:
        pieces = _joined(
            pieces, lambda _, text: not (text[:1].isspace() or text.strip() in string.punctuation)
        )
    pieces = _joined(pieces, lambda before, _: before[:1] == " " and before.strip() in tuple(OPENING))
    return _joined(pieces, lambda before, text: not before.endswith(" ") and text in tuple(CLOSING))


def _whole_characters(token_ids: Sequence[int], bytes_of: Callable[[int], bytes]) -> list[Word]:
    """A token may end inside a character: then it is one piece with those that complete it."""
    pieces: list[Word] = []
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    count = 0
    for token_id in token_ids:
        count += 1
        if text := decoder.decode(bytes_of(token_id)):
            pieces.append((text, count))
            count = 0
    tail = decoder.decode(b"", final=True)
    if count:
        pieces.append((tail, count))
    else:
        text, count = pieces[-1]
        pieces[-1] = (text + tail, count)
    return pieces


def _joined(pieces: list[Word], belongs: Callable[[str, str], bool]) -> list[Word]:
    """Each piece goes with the one before it where `belongs(before, piece)`."""
    words: list[Word] = []
    for text, count in pieces:
        if words and belongs(words[-1][0], text):
            before, num_before = words[-1]
            words[-1] = (before + text, num_before + count)
        else:
            words.append((text, count))
    return words
