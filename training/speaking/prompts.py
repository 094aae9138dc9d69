"""What the talker hears of a text, as the server lays it out.

A line's rows: the head of the answer's turn, four pads, the begin mark and the first piece of text, then one
piece a frame, the end mark, pads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from model_families.default_model.shipped import SPEAKING
from model_families.omnistage_nano.front import Front, FrontSpeller
from model_families.omnistage_nano.pieces import MOST_AHEAD, SPOKEN_PIECES, Pieces, read_pieces
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS, read_words
from training.speaking.pointing import Ints, Spelled

TTS_PAD, TTS_BOS, TTS_EOS = 49160, 49161, 49162
COPIED = {TTS_PAD: 8, TTS_BOS: 9, TTS_EOS: 10}  # whose rows of the text table these tokens have
HEADER_TOKENS = 3
NUM_PADS = 4
OPENING = NUM_PADS + 2  # rows that also hear the opening codes

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Line:
    """`rows[:prompt]` come before the first frame, then one a frame, then pads for ever."""

    rows: Ids
    prompt: int


@dataclass(frozen=True)
class Layout:
    pieces: Pieces
    header: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """All that can be in a line, ascending."""
        return sorted({*self.pieces.ids, *self.header, TTS_PAD, TTS_BOS, TTS_EOS})

    @cached_property
    def _frames(self) -> npt.NDArray[np.float64]:
        return np.array(self.pieces.frames)

    def line(self, spelled: Spelled) -> tuple[Line, Ints]:
        """And in which row of text each piece is, 0 being the prompt's last."""
        rows_N, count = paced(self._frames[spelled.pieces_N])
        text = np.full(count, TTS_PAD, np.int32)
        text[rows_N] = self.pieces.ids.start + spelled.pieces_N
        return self.around(text), rows_N

    def around(self, text: npt.NDArray[np.integer]) -> Line:
        head = [*self.header, *[TTS_PAD] * NUM_PADS, TTS_BOS]
        return Line(np.array([*head, *text, TTS_EOS], np.int32), len(head) + 1)


class Prompts:
    """Lines of text, as the server reads it."""

    def __init__(self, front: Front, tokenizer: Tokenizer) -> None:
        self._front, self._tokenizer = front, tokenizer
        self.layout = Layout(front.pieces, tuple(self._ids("<|im_start|>assistant\n")[:HEADER_TOKENS]))

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def of(self, text: str) -> Line:
        return self.layout.around(np.array(FrontSpeller(self._front, TTS_PAD)(self._ids(text), True)))


def paced(frames_N: npt.NDArray[np.float64]) -> tuple[Ints, int]:
    """The rows of pieces that take so long, and rows in all: what `Pace` does one by one."""
    index_N = np.arange(len(frames_N))
    due_N = np.rint(np.cumsum([-MOST_AHEAD, *frames_N])[1:]).astype(np.int64)
    after_N = np.maximum.accumulate(np.maximum(due_N - index_N, 1)) + index_N
    return np.append(0, after_N[:-1]), int(after_N[-1])


def open_prompts(tokenizer: Path) -> Prompts:
    """With the shipped front end."""
    known, folder = Tokenizer.from_file(str(tokenizer)), SPEAKING.parent
    return Prompts(
        Front(known, read_pieces(folder / SPOKEN_PIECES), read_words(folder / SPOKEN_WORDS)), known
    )
