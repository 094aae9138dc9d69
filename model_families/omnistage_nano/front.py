"""Text, as it comes token by token → the rows of pieces that the talker hears: its front end.

A word is known once a blank or a mark follows it, or the text has ended: it is held back for so long;
"the" until the word behind it is known.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from model_families.omnistage_nano.neighbours import goes_on, waits
from model_families.omnistage_nano.pieces import MARKS, SPOKEN_PIECES, Pace, Pieces, read_pieces
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS, Dictionary, begins_with_vowel, read_words
from model_families.omnistage_nano.said import say
from model_families.token_bytes import TokenBytes

# What can be said without looking further: letters and a mark behind them.
_WORD = re.compile(r"[A-Za-z]+[,;!?]")
_CHUNK = re.compile(r"\S++(?=\s)")
_BLANKS = re.compile(r"\s+")
_GAP = re.compile(r"[^\S\n]+")  # in a line
# Whatever stands for longer than this without a blank, a mark or a dash was not meant to be read aloud: the
# rest of it is left unsaid.
MOST_UNBROKEN = 100  # characters
_RUNS = re.compile(r"[^\s,;!?…—]+|[\s,;!?…—]+")
_STOP, _COMMA = ".", ","
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


class Bound:
    """Text in parts, however it is parted → the same without what is too long to be read."""

    def __init__(self) -> None:
        self._run = 0  # characters since something broke it

    def __call__(self, text: str) -> str:
        kept: list[str] = []
        for run in _RUNS.findall(text):
            if run[0].isspace() or run[0] in ",;!?…—":
                self._run = 0
                kept.append(run)
            else:
                kept.append(run[: max(0, MOST_UNBROKEN - self._run)])
                self._run += len(run)
        return "".join(kept)


class Reader:
    """Text in parts, however it is parted → words and marks. A comma is held back until it is known that
    something follows it: at the end, and before a mark that ends a sentence, there is none."""

    def __init__(self) -> None:
        self._bound = Bound()
        self._text = ""
        self._before = ""  # what was said last in this line, as it was written
        self._marked = True  # whether the end of a sentence was the last, or nothing
        self._comma = False

    def read(self, text: str, *, last: bool) -> Iterator[str]:
        self._text += self._bound(text)
        while self._text:
            if blanks := _BLANKS.match(self._text):
                self._text = self._text[blanks.end() :]
                if "\n" in blanks[0]:
                    self._before = ""
                    yield from self._fresh([_STOP])
                continue
            found = self._next(last)
            if found is None:
                return
            chunk, behind = found
            self._text = self._text[len(chunk) :]
            yield from self._fresh(say(chunk, self._before, behind))
            self._before = chunk

    def _next(self, last: bool) -> tuple[str, str] | None:
        """What is said next, and what stands behind it where that matters. None: it is not known yet."""
        if found := _WORD.match(self._text):
            return found[0], ""
        end = self._end(0, last)
        while end is not None and waits(chunk := self._text[:end]):
            gap = _GAP.match(self._text, end)
            if gap is None or self._text.startswith("\n", gap.end()):
                return chunk, ""
            if gap.end() == len(self._text):
                return (chunk, "") if last else None
            behind_end = self._end(gap.end(), last)
            if behind_end is None:
                return None
            behind = self._text[gap.end() : behind_end]
            if not goes_on(chunk, behind):
                return chunk, behind
            end = behind_end
        return None if end is None else (self._text[:end], "")

    def _end(self, start: int, last: bool) -> int | None:
        """Of what stands between blanks from `start` on."""
        found = _CHUNK.match(self._text, start)
        if found is not None:
            return found.end()
        return len(self._text) if last else None

    def _fresh(self, words: Iterable[str]) -> Iterator[str]:
        """No mark behind another, none at the beginning."""
        for word in words:
            if word not in MARKS:
                if self._comma:
                    yield _COMMA
                self._comma = self._marked = False
                yield word
            elif word == _COMMA:
                self._comma = not self._marked
            elif not self._marked:
                self._comma, self._marked = False, True
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


def spoken_of(text: str) -> str:
    """What of a text is spoken: without what is too long to be read; "" where nothing of it can be said."""
    bound = Bound()(text)
    return bound if any(word not in MARKS for word in Reader().read(bound, last=True)) else ""


def open_front(folder: Path) -> Front:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Front(tokenizer, read_pieces(folder / SPOKEN_PIECES), read_words(folder / SPOKEN_WORDS))
