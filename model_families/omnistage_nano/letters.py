"""The letters that the ears write, and how a row of them becomes text and words of the language model."""

from __future__ import annotations

from collections.abc import Sequence

LETTERS = " '.,?!-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # from 1 on; 0 is none
NUM_LETTERS = 1 + len(LETTERS)
FIRST_OF_WORDS = 1 + LETTERS.index("a")  # before it are none, the space and marks


def spell(text: str) -> list[int]:
    """Of a text whose characters are all among LETTERS."""
    return [1 + LETTERS.index(character) for character in text]


def read_letters(best: Sequence[int]) -> str:
    """What the likeliest letters of all rows say: one that lasts is said once, unless none is between
    (connectionist temporal classification, Graves et al. 2006)."""
    found: list[str] = []
    before = 0
    for letter in best:
        if letter not in (0, before):
            found.append(LETTERS[letter - 1])
        before = letter
    return " ".join("".join(found).split())
