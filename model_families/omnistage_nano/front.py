"""Text, as it comes token by token → the rows of pieces that the talker hears: its front end.

A word is known once a blank or a mark follows it, or the text has ended: it is held back for so long;
"the" until the word behind it is known.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from model_families.omnistage_nano.pieces import MARKS, SPOKEN_PIECES, Pace, Pieces, read_pieces
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS, Dictionary, begins_with_vowel, read_words
from model_families.omnistage_nano.said import say
from model_families.token_bytes import TokenBytes

# What can be said without looking further: letters and a mark behind them.
_WORD = re.compile(r"[A-Za-z]+[,;!?]")
_CHUNK = re.compile(r"\S+(?=\s)")
# What money is counted in may stand behind it.
_MONEY = re.compile(r"[$£€]\d\S*\s+\S+(?=\s)")
_BLANKS = re.compile(r"\s+")
_STOP = "."
_ENDS = ".?!"
_THE, _THE_BEFORE_VOWEL = "the", "thee"


class Front:
    """How one checkpoint's talker is given text. Holds nothing of an answer."""

    def __init__(self, tokenizer: Tokenizer, pieces: Pieces, words: Dictionary) -> None:
        self.bytes_of = TokenBytes(tokenizer)
        self.pieces, self.words = pieces, words

    def pieces_of(self, word: str) -> list[int]:
        """Of a word's letters, or a mark."""
        if word in MARKS:
            return [self.pieces.mark(word)]
        sounds = self.words.sounds(word)
        cut = self.pieces.cut_letters(word.lower()) if sounds is None else self.pieces.cut_sounds(sounds)
        return [piece for piece, _ in cut]

    def begins_with_vowel(self, word: str) -> bool:
        return begins_with_vowel(self.words.sounds(word) or "")


class Reader:
    """Text in parts, however it is parted → words and marks."""

    def __init__(self) -> None:
        self._text = ""
        self._marked = True  # whether a mark was the last, or nothing

    def read(self, text: str, *, last: bool) -> Iterator[str]:
        self._text += text
        while self._text:
            if blanks := _BLANKS.match(self._text):
                self._text = self._text[blanks.end() :]
                if "\n" in blanks[0]:
                    yield from self._fresh([_STOP])
                continue
            found = _WORD.match(self._text) or (_MONEY if self._text[0] in "$£€" else _CHUNK).match(
                self._text
            )
            if found is None and not last:
                return
            chunk = self._text if found is None else found[0]
            self._text = self._text[len(chunk) :]
            yield from self._fresh(say(chunk))

    def _fresh(self, words: Iterator[str] | list[str]) -> Iterator[str]:
        """No mark behind another, none at the beginning."""
        for word in words:
            if word in MARKS and self._marked:
                continue
            self._marked = word in MARKS
            yield word


class FrontSpeller:
    """One answer's: a `Speller` of the talker's engine."""

    def __init__(self, front: Front, pad: int) -> None:
        self._front, self._pad = front, pad
        self._reader, self._pace = Reader(), Pace(front.pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._the = ""  # as it was written, until it is known how it sounds
        self._last = ""  # word or mark

    def __call__(self, tokens: Sequence[int], last: bool) -> list[int]:
        data = b"".join(self._front.bytes_of[token] for token in tokens)
        rows: list[int] = []
        for word in self._known(self._reader.read(self._decoder.decode(data, last), last=last), last):
            for piece in self._front.pieces_of(word):
                rows += [self._front.pieces.ids[piece], *[self._pad] * self._pace.pads(piece)]
        return rows

    def _known(self, words: Iterator[str], last: bool) -> Iterator[str]:
        """A text always ends as a sentence does: the talker has heard no other, and would go on."""
        for word in words:
            self._last = word
            if self._the:
                yield _THE_BEFORE_VOWEL if self._front.begins_with_vowel(word) else self._the
            self._the = word if word.lower() == _THE else ""
            if not self._the:
                yield word
        if last and self._the:
            yield self._the
        if last and self._last and self._last not in _ENDS:
            self._last = _STOP
            yield _STOP


def open_front(folder: Path) -> Front:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Front(tokenizer, read_pieces(folder / SPOKEN_PIECES), read_words(folder / SPOKEN_WORDS))
