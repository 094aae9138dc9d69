"""Where in its text speech is: the last code of a frame, which the talker hears back.

Without it a small talker takes long to find what it is to say next: it babbles. The code is how many frames
ago the piece that is being spoken was heard; the decoder of sound does not hear it.
Shapes: L symbols of an utterance, T frames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

import numpy as np
import numpy.typing as npt

from training.speaking.prompts import Line
from training.speaking.sizes import NANO

SOONEST = -16  # frames: code 0

Ints = npt.NDArray[np.int64]


def letters_of(
    text: str, spoken: Sequence[str], symbols: Container[str], count: Callable[[str], int]
) -> Ints | None:
    """[L]: the letter of `text` that each symbol of the sentences `spoken` says, a pad before and behind each
    sentence included. None where it cannot be told.

    `count`: in how many words a written one is said. The letters of a word are spread evenly over them.
    """
    spans: list[tuple[float, float]] = []  # of each spoken word, in the text: first letter, letters
    for written in re.finditer(r"\S+", text):
        number = count(written[0])
        size = len(written[0]) / max(number, 1)
        spans += [(written.start() + size * index, size) for index in range(number)]
    sentences = [sentence.split(" ") for sentence in spoken]
    if sum(map(len, sentences)) != len(spans) or not spans:
        return None
    letters: list[float] = []
    following = iter(spans)
    for words in sentences:
        for index, word in enumerate(words):
            start, size = next(following)
            said = sum(symbol in symbols for symbol in word)
            letters += [start] * (index == 0) + [start + size * symbol / said for symbol in range(said)]
            letters.append(start + size)  # the blank behind the word, or the pad behind the last
    return np.minimum(np.array(letters).astype(np.int64), len(text) - 1)


def pointer_codes(line: Line, letters_T: npt.NDArray[np.integer]) -> Ints:
    """[T]: of frames that say these letters of the line's text."""
    ago_T = np.arange(len(letters_T)) - line.row_of(letters_T)
    codes_T: Ints = np.clip(ago_T - SOONEST, 0, NANO.codebook_size - 1)
    return codes_T
