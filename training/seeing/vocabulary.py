"""Which numbers, words and colour-shape pairs are for training and which for evaluation: never both."""

from __future__ import annotations

import hashlib
import random
import re
from typing import Literal

from tokenizers import Tokenizer

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 8  # one of so many
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwyz", "aeiou"


def held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0


def held_out_pair(colour: str, shape: str) -> bool:
    """Pairs of colour and shape that no picture of the training split shows: one of sixteen."""
    return hashlib.sha256(f"{colour} {shape}".encode()).digest()[1] % 16 == 0


def dictionary(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Lower-case words of 3 to 8 letters: those that are one token of the language model's vocabulary."""
    words = (token[1:] for token in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{3,8}", token))
    return tuple(sorted(words))


def split_words(words: tuple[str, ...], split: Split) -> tuple[str, ...]:
    return tuple(word for word in words if held_out(word) == (split == "held_out"))


def number(split: Split, rng: random.Random) -> str:
    """1 to 4 digits. There are too few of one digit to hold any out."""
    while True:
        digits = rng.choice((1, 2, 3, 3, 4, 4))
        text = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
        if digits == 1 or held_out(text) == (split == "held_out"):
            return text


def word(words: tuple[str, ...], split: Split, rng: random.Random) -> str:
    """One of `words`, those of the split, in one of three cases; in training one of four is made up, so
    that letters are
    read and not words."""
    made_up = split == "train" and rng.random() < 0.25
    chosen = _made_up(rng) if made_up else rng.choice(words)
    return rng.choice((chosen, chosen, chosen.upper(), chosen.capitalize()))


def _made_up(rng: random.Random) -> str:
    while True:
        length = rng.randint(3, 8)
        if rng.random() < 0.5:
            text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
        else:
            text = "".join(rng.choice((_CONSONANTS, _VOWELS)[k % 2]) for k in range(length))
        if not held_out(text):
            return text
