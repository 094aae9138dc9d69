"""The pieces that the talker is given text in: sounds of a word, or letters where its sounds are not known.

A row of text is one frame of speech, 80 ms, in which English has about one sound and a half of blanks and
stresses; so a piece is one or two sounds, a vowel's stress and the blank before a word included.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPOKEN_PIECES = "spoken_pieces.txt"
FIRST_ID = 1000  # of a text token: the n-th piece has the n-th row of the text table from there on
BLANK, STRESSES, LETTERS = " ", "ˈˌ", "="
MARKS = ",.?!"
MOST_AHEAD = 8.0  # rows


@dataclass(frozen=True)
class Pieces:
    """`frames[n]`: how long the n-th takes to be spoken. Every single sound and letter should be there: what
    is not has no piece. A piece of letters begins with `=`; a blank begins a word's first."""

    pieces: tuple[str, ...]
    frames: tuple[float, ...]

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {piece: index for index, piece in enumerate(self.pieces)}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self.pieces))

    @property
    def ids(self) -> range:
        return range(FIRST_ID, FIRST_ID + len(self.pieces))

    def mark(self, mark: str) -> int:
        return self._index[mark]

    def cut_sounds(self, word: str) -> list[tuple[int, int]]:
        """Pieces of a word's sounds, and where in the word each begins."""
        return self._cut(word, "")

    def cut_letters(self, word: str) -> list[tuple[int, int]]:
        """The same of letters."""
        return self._cut(word, LETTERS)

    def _cut(self, word: str, kind: str) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        at, blank = 0, BLANK
        while at < len(word):
            for end in range(min(len(word), at + self._longest), at, -1):
                index = self._index.get(kind + blank + word[at:end])
                if index is not None:
                    found.append((index, at))
                    at, blank = end, ""
                    break
            else:
                at += 1
        return found


class Pace:
    """Where pads go, so that pieces come no more than MOST_AHEAD rows ahead of speech. One answer's."""

    def __init__(self, pieces: Pieces) -> None:
        self._frames = pieces.frames
        self._rows, self._due = 0, -MOST_AHEAD

    def pads(self, piece: int) -> int:
        """Behind this piece, which is the next."""
        self._due += self._frames[piece]
        self._rows += 1
        pads = max(0, round(self._due) - self._rows)
        self._rows += pads
        return pads


def read_pieces(path: Path) -> Pieces:
    """A line is a piece, a tab, frames."""
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    return Pieces(tuple(piece for piece, _ in lines), tuple(float(frames) for _, frames in lines))


def write_pieces(path: Path, pieces: Sequence[tuple[str, float]]) -> None:
    path.write_text("".join(f"{piece}\t{frames:.2f}\n" for piece, frames in pieces))
