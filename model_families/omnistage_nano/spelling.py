"""How omnistage-nano's talker is given text: in pieces of one or two letters, about as fast as they are said.

A small talker learns six hundred pieces of words sooner than fifty thousand words, and finds the piece that
is spoken next near where it is: a row of text is one frame of speech, pieces come a few rows ahead of it,
and pads keep them from running further ahead.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase, digits, punctuation

from tokenizers import Tokenizer

MOST_AHEAD = 6  # rows
# Frames that what is written takes to be spoken.
LETTER, DIGIT, COMMA, STOP = 0.74, 3.7, 2.2, 2.6
PAUSES = dict.fromkeys(",;:", COMMA) | dict.fromkeys(".?!", STOP) | dict.fromkeys(digits, DIGIT)
WRITTEN_OTHERWISE = str.maketrans("‘’“”–—…\t\n\r", "''\"\"--.   ")
SPACE = "Ġ"  # as the tokenizer's vocabulary writes it


class Spelling:
    """Pieces are tokens of the vocabulary themselves: their embeddings are there. Lower case, ASCII; what
    has no such letters has no pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab()
        self._tokenizer = tokenizer
        single = f"{ascii_lowercase}{digits}{punctuation} "
        written = [*single, *(a + b for a in f" {ascii_lowercase}" for b in ascii_lowercase)]
        ids = {text: vocabulary.get(text.replace(" ", SPACE)) for text in written}
        self._pieces = {text: token for text, token in ids.items() if token is not None}
        self._cut: dict[int, tuple[str, ...]] = {}

    @property
    def ids(self) -> list[int]:
        """All that can come out, ascending."""
        return sorted(self._pieces.values())

    def id_of(self, piece: str) -> int:
        return self._pieces[piece]

    def cut(self, token: int) -> tuple[str, ...]:
        """The pieces of one token, as text."""
        if token not in self._cut:
            self._cut[token] = self._cut_text(self._tokenizer.decode([token], skip_special_tokens=True))
        return self._cut[token]

    def _cut_text(self, text: str) -> tuple[str, ...]:
        plain = unicodedata.normalize("NFKD", text.translate(WRITTEN_OTHERWISE)).lower()
        letters = "".join(letter for letter in plain if letter in self._pieces)
        pieces: list[str] = []
        at = 0
        while at < len(letters):
            length = 2 if letters[at : at + 2] in self._pieces else 1
            pieces.append(letters[at : at + length])
            at += length
        return tuple(pieces)


class Speller:
    """One answer's, token by token: a `contracts` Speller of the talker's engine. Blanks before the first
    letter are left out."""

    def __init__(self, spelling: Spelling, pad: int) -> None:
        self._spelling, self._pad = spelling, pad
        self._rows, self._due = 0, -float(MOST_AHEAD)

    def __call__(self, tokens: Sequence[int], last: bool) -> list[int]:
        spelled: list[int] = []
        for token in tokens:
            pieces = self._spelling.cut(token)
            if self._rows == 0 and not "".join(pieces).strip():
                continue
            self._due += sum(PAUSES.get(letter, LETTER) for piece in pieces for letter in piece)
            self._rows += len(pieces)
            pads = max(0, round(self._due) - self._rows)
            self._rows += pads
            spelled += [*map(self._spelling.id_of, pieces), *[self._pad] * pads]
        return spelled


def open_spelling(folder: Path) -> Spelling:
    return Spelling(Tokenizer.from_file(str(folder / "tokenizer.json")))
