"""`python -m training.hearing.words ASSETS`: the words that the ears know how to spell, the commonest first.

Those of the speech package's dictionary with their plain endings, and how common they are by the order in
which the language model's tokenizer learned them. ASSETS: `tokenizer.json` of the default model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from hibari.tts import ASSETS
from tokenizers import Tokenizer

from model_families.default_model.shipped import PACKED, WEIGHTS, write_packed
from model_families.omnistage_nano.ears import HEARD_WORDS
from training.speaking.vocabulary import CONTRACTIONS, past, third
from training.speaking.words import read_package

MOST_PIECES, SHORT = 3, 3  # tokens of a word; letters of one that must be known by its part of speech
CAPITAL = 2_000  # places behind its like: a word that is commoner with a capital
MANY = 50_000  # places behind, for every token more than one
ENDED = 20_000  # places behind, for an ending that the dictionary does not list


def heard_words(assets: Path, tokenizer: Tokenizer) -> list[str]:
    """`assets`: the speech package's folder of that name."""
    said, tags = read_package(assets, "lexicon_us_gold"), read_package(assets, "tagger")["tagdict"]
    listed = {word.lower() for word in said if word.isascii() and word.isalpha()}
    tagged = {word.lower() for word in tags}
    listed = {word for word in listed if len(word) > SHORT or word in tagged}
    listed = {word for word in listed if len(word) > 1 or word == "a"}
    listed |= {"i"} | {word.lower() for word in CONTRACTIONS}
    places = _places(tokenizer, listed, MOST_PIECES)
    common = [word for word, place in places.items() if place < MANY and len(word) >= SHORT]
    ended = {form for word in common if word.isalpha() for form in _endings(word)} - listed
    places |= {word: place + ENDED for word, place in _places(tokenizer, ended, MOST_PIECES - 1).items()}
    return sorted(places, key=lambda word: (places[word], word))


def _endings(word: str) -> tuple[str, ...]:
    stem = word[:-1] if word.endswith("e") and not word.endswith("ee") else word
    return third(word), past(word), f"{stem}ing", f"{word}'s"


def _places(tokenizer: Tokenizer, words: Iterable[str], most_pieces: int) -> dict[str, int]:
    ordered = sorted(words)
    small = tokenizer.encode_batch([f" {word}" for word in ordered], add_special_tokens=False)
    large = tokenizer.encode_batch([f" {word.capitalize()}" for word in ordered], add_special_tokens=False)
    places: dict[str, int] = {}
    for word, *encodings in zip(ordered, small, large, strict=True):
        pieces = min(len(found.ids) for found in encodings)
        if pieces <= most_pieces:
            places[word] = min(
                found.ids[0] + MANY * (len(found.ids) - 1) + later
                for found, later in zip(encodings, (0, CAPITAL), strict=True)
            )
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--to", type=Path, default=WEIGHTS / (HEARD_WORDS + PACKED))
    given = parser.parse_args()
    words = heard_words(Path(ASSETS), Tokenizer.from_file(str(given.assets / "tokenizer.json")))
    write_packed(given.to, words)
    print(f"{given.to}: {len(words)} words")


if __name__ == "__main__":
    main()
