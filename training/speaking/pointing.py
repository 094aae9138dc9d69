"""Where in its text speech is: the last code of a frame, which the talker hears back.

Without it a small talker takes long to find what it is to say next: it babbles. The code is how many frames
ago the piece that is being spoken was heard; the decoder of sound does not hear it.
Shapes: L symbols of an utterance (of each sentence its sounds, a pad before and one behind), N pieces,
T frames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_families.omnistage_nano.pieces import MARKS, Pieces
from training.speaking.sizes import NANO

SOONEST = -16  # frames: code 0
PADS = 2  # symbols of a sentence beside its sounds
MARK_OF = dict(zip(MARKS, MARKS, strict=True)) | {";": ",", ":": ",", "—": ",", "(": ",", ")": ",", "…": "."}
QUOTES = '"“”'

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spelled:
    """What is heard of an utterance's text: pieces, and the symbol from which each is being spoken."""

    pieces_N: Ints
    starts_N: Ints
    num_symbols: int


def spell_sentence(pieces: Pieces, sentence: str, letters: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Pieces of a sentence's sounds and their first symbols. `letters`: of each word, in place of its sounds;
    "" where these are to be heard."""
    found: list[tuple[int, int]] = []
    for number, word in enumerate(re.finditer(r"[^ ]+", sentence)):
        ends = re.fullmatch(r"(\W*)(.*?)(\W*)", _letters_for_stresses(word[0]))
        assert ends is not None, "any word is of this kind"
        first, last = ends.start(2), ends.end(2)
        core, start = word[0][first:last], word.start() + 1  # a pad before all
        written = letters[number] if number < len(letters) else ""
        if written:
            cut = [(piece, at * len(core) // len(written)) for piece, at in pieces.cut_letters(written)]
        else:
            cut = pieces.cut_sounds(core)
        found += [(piece, start + first + at if at else start - 1) for piece, at in cut]
        marks = [(index, mark) for index, mark in enumerate(word[0]) if not first <= index < last]
        found += [(pieces.mark(MARK_OF[mark]), start + index) for index, mark in marks if mark in MARK_OF]
    return sorted(found, key=lambda one: one[1])


def _letters_for_stresses(word: str) -> str:
    """So that a mark is what is no letter."""
    return word.replace("ˈ", "x").replace("ˌ", "x")


def spell(pieces: Pieces, sentences: Sequence[str], letters: Sequence[str] = ()) -> Spelled:
    """Of an utterance. `letters`: as of a sentence, of the words of all."""
    found: list[tuple[int, int]] = []
    symbols = words = 0
    for sentence in sentences:
        count = len(sentence.split())
        cut = spell_sentence(pieces, sentence, letters[words : words + count])
        found += [(piece, symbols + start) for piece, start in cut]
        symbols, words = symbols + len(sentence) + PADS, words + count
    pieces_N2 = np.array(found, np.int64).reshape(-1, 2)
    return Spelled(pieces_N2[:, 0], pieces_N2[:, 1], symbols)


def joined(parts: Sequence[Spelled]) -> Spelled:
    before = np.cumsum([0, *(part.num_symbols for part in parts)])
    starts = [part.starts_N + first for part, first in zip(parts, before, strict=False)]
    return Spelled(np.concatenate([part.pieces_N for part in parts]), np.concatenate(starts), int(before[-1]))


def written_words(text: str, sentences: Sequence[str], count: Callable[[str], int]) -> list[str]:
    """The letters of each word of `sentences`, in lower case; "" where it is written otherwise, or where
    it is not known what is written for what. `count`: in how many words a written one is said."""
    spoken = sum(len(sentence.split()) for sentence in sentences)
    found: list[str] = []
    for word in text.split():
        number = count(word)
        bare = word.strip(",.?!;:\"'").lower()
        plain = number == 1 and bare.isascii() and bare.replace("'", "").isalpha()
        found += [bare] if plain else [""] * number
    return found if len(found) == spoken else [""] * spoken


def pointer_codes(rows_N: Ints, spelled: Spelled, symbols_T: npt.NDArray[np.integer]) -> Ints:
    """[T]: of frames that say these symbols. `rows_N`: where each piece is heard, 0 being the prompt's last
    row."""
    piece_T = np.maximum(np.searchsorted(spelled.starts_N, symbols_T, side="right") - 1, 0)
    ago_T = np.arange(len(symbols_T)) - rows_N[piece_T]
    codes_T: Ints = np.clip(ago_T - SOONEST, 0, NANO.codebook_size - 1)
    return codes_T
