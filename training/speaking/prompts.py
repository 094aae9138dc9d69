"""What the talker hears around a text, in token ids, as the server lays it out; and the texts as such ids.

A row of an example: the user's turn, the head of the answer's, four pads, the begin mark and the first
token of
text, then one token a frame, the end mark, pads. Media of the user's turn are rows of nothing here: zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

TTS_PAD, TTS_BOS, TTS_EOS = 49160, 49161, 49162
COPIED = {TTS_PAD: 8, TTS_BOS: 9, TTS_EOS: 10}  # whose rows of the text table these tokens have
NOTHING = -1  # a row of zeros
HEADER_TOKENS = 3
NUM_PADS = 4
OPENING = NUM_PADS + 2  # rows that also hear the opening codes
VERBATIM = "Read this text aloud:\n"

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Line:
    """One example's rows: `rows[:prompt]` come before the first frame, then one a frame, then pads for
    ever."""

    rows: Ids
    prompt: int


class Prompts:
    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._opening = self.ids("<|im_start|>user\n")
        self._closing = self.ids("<|im_end|>\n")
        answer = self.ids("<|im_start|>assistant\n")
        self._header, self._leading = answer[:HEADER_TOKENS], answer[HEADER_TOKENS:]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def many_ids(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def line(self, user: list[int], text: list[int]) -> Line:
        """`user`: what the user's turn says."""
        turn = [*self._opening, *user, *self._closing]
        spoken = [*self._leading, *text]
        prompt = [*turn, *self._header, *[TTS_PAD] * NUM_PADS, TTS_BOS, spoken[0]]
        return Line(np.array([*prompt, *spoken[1:], TTS_EOS], np.int32), len(prompt))

    def verbatim(self, text: str) -> Line:
        """As `/v1/audio/speech` asks for it."""
        return self.line(self.ids(VERBATIM + text), self.ids(text))


def user_turn(random: Random, verbatim: list[int], text: list[int], others: list[list[int]]) -> list[int]:
    """Of an example: the text itself to be read, or anything else that was said before."""
    kind = random.random()
    if kind < 0.6:
        return [*verbatim, *text]
    turn = [token for other in random.choices(others, k=random.randint(1, 3)) for token in other]
    if kind < 0.75:
        at = random.randrange(len(turn) + 1)
        turn[at:at] = [NOTHING] * random.randint(8, 100)
    return turn
