"""The words that the training sentences are made of, by part of speech, commonest first.

Nothing is vendored: pronounced words and their tags come from the speech package, how common a word is from
the order in which the language model's tokenizer learned it.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

MAX_PIECES = 3  # tokens of a word
RARE_WORDS = 12_000


@dataclass(frozen=True)
class Words:
    nouns: tuple[str, ...]
    plurals: tuple[str, ...]
    names: tuple[str, ...]
    adjectives: tuple[str, ...]
    adverbs: tuple[str, ...]
    actions: tuple[str, ...]  # ending in -ing
    common: tuple[str, ...]  # of every kind, one token each
    rare: tuple[str, ...]  # of several tokens


def load_words(assets: Path, tokenizer: Tokenizer) -> Words:
    """`assets`: the speech package's folder of that name."""
    lexicon, tag_of = read_package(assets, "lexicon_us_gold"), read_package(assets, "tagger")["tagdict"]
    ranked: list[tuple[int, str]] = []
    rare: list[str] = []
    plain = [word for word in lexicon if word.isascii() and word.isalpha() and len(word) > 2]
    encoded = tokenizer.encode_batch([f" {word}" for word in plain], add_special_tokens=False)
    for word, ids in zip(plain, (encoding.ids for encoding in encoded), strict=True):
        if len(ids) == 1:
            ranked.append((ids[0], word))
        elif len(ids) <= MAX_PIECES and word.islower():
            rare.append(word)
    common = [word for _, word in sorted(ranked)]

    def of(tag: str, *, capital: bool = False) -> tuple[str, ...]:
        found = [word for word in common if tag_of.get(word) == tag]
        return tuple(word for word in found if word[0].isupper() == capital)

    nouns = of("NN")
    more = tokenizer.encode_batch([f" {noun}s" for noun in nouns], add_special_tokens=False)
    plurals = tuple(f"{noun}s" for noun, encoding in zip(nouns, more, strict=True) if len(encoding.ids) == 1)
    step = max(len(rare) // RARE_WORDS, 1)
    return Words(
        nouns=nouns,
        plurals=plurals + of("NNS"),
        names=of("NNP", capital=True),
        adjectives=of("JJ"),
        adverbs=of("RB"),
        actions=of("VBG"),
        common=tuple(common),
        rare=tuple(sorted(rare)[::step]),
    )


def read_package(assets: Path, name: str) -> dict[str, Any]:
    """One of the speech package's dictionaries."""
    with gzip.open(assets / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found
