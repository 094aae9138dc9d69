"""A front end of few pieces and words: sounds are written as letters are."""

from __future__ import annotations

from string import ascii_lowercase

from model_families.omnistage_nano.front import Front
from model_families.omnistage_nano.pieces import BLANK, LETTERS, MARKS, Pieces
from model_families.omnistage_nano.pronouncing import Dictionary

WORDS = {
    "the": "ðə",
    "sea": "sˈi",
    "hold": "hˈOld",
    "sheep": "ʃˈip",
    "two": "tˈu",
    "forty": "fˈɔɹTi",
    "four": "fˈɔɹ",
}
SOUNDS = [*"ðəsɪhldʃptuTfɹznkʌ", *("ˈ" + vowel for vowel in "iOuɔɪʌ"), "i", "O"]
PAIRS = ["ðə", BLANK + "ðə", "sˈi", "ld"]
ONES = [*ascii_lowercase, "'"]


def small_pieces() -> Pieces:
    sounds = [*SOUNDS, *(BLANK + sound for sound in SOUNDS), *PAIRS]
    letters = [LETTERS + blank + one for blank in ("", BLANK) for one in [*ONES, "th"]]
    pieces = [*MARKS, *sounds, *letters]
    return Pieces(tuple(pieces), tuple(0.8 * len(piece) for piece in pieces))


def small_front(tokenizer) -> Front:
    return Front(tokenizer, small_pieces(), Dictionary(WORDS))
