"""What the talker hears of a text, as the server lays it out.

A line's rows: the head of the answer's turn, four pads, the begin mark and the first piece of text, then one
piece a frame, the end mark, pads. Letters are counted from the text's beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from model_families.omnistage_nano.spelling import Speller, Spelling

TTS_PAD, TTS_BOS, TTS_EOS = 49160, 49161, 49162
COPIED = {TTS_PAD: 8, TTS_BOS: 9, TTS_EOS: 10}  # whose rows of the text table these tokens have
HEADER_TOKENS = 3
NUM_PADS = 4
OPENING = NUM_PADS + 2  # rows that also hear the opening codes

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Line:
    """`rows[:prompt]` come before the first frame, then one a frame, then pads for ever. `letter_ends`: where
    the piece of each row of text ends, from the last row of the prompt on."""

    rows: Ids
    prompt: int
    letter_ends: Ids

    def row_of(self, letters: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Which row of text (0: the prompt's last) spells these letters."""
        found = np.searchsorted(self.letter_ends, letters, side="right")
        return np.minimum(found, len(self.letter_ends) - 1)


class Prompts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.spelling = Spelling(tokenizer)
        self.header = self._ids("<|im_start|>assistant\n")[:HEADER_TOKENS]

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def many_ids(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def line(self, tokens: list[int]) -> Line:
        """`tokens` of a text of ASCII letters that begins with one."""
        spell = Speller(self.spelling, TTS_PAD)
        spelled: list[int] = []
        ends: list[int] = []
        letters = 0
        for token in tokens:
            pieces = self.spelling.cut(token)
            rows = spell([token])
            for piece in pieces:
                letters += len(piece)
                ends.append(letters)
            ends += [letters] * (len(rows) - len(pieces))
            spelled += rows
        prompt = [*self.header, *[TTS_PAD] * NUM_PADS, TTS_BOS, spelled[0]]
        rows_R = np.array([*prompt, *spelled[1:], TTS_EOS], np.int32)
        return Line(rows_R, len(prompt), np.array(ends, np.int32))

    def of(self, text: str) -> Line:
        return self.line(self._ids(text))


def open_prompts(tokenizer: Path) -> Prompts:
    return Prompts(Tokenizer.from_file(str(tokenizer)))
