"""The words that were likeliest said, against a count of every way to hear them."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from math import exp, log

import numpy as np
import pytest

from model_families.omnistage_nano.ears import HEARD_WORDS, read_words
from model_families.omnistage_nano.letters import LETTERS, NUM_LETTERS, read_letters, spell
from model_families.omnistage_nano.lexicon import Lexicon, Speller, Weights

WORDS = ("it", "was", "the", "worst", "of", "times", "best", "at")
ALL = Weights(words=1.0, word=0.0, unknown=-30.0, beam=10_000, unlikely=-50.0, certain=0.0)


def rows(*chances: dict[str, float]) -> np.ndarray:
    """Logarithms; what is left of a row is none, and a trace of everything else."""
    out = np.full((len(chances), NUM_LETTERS), 1e-9)
    for row, given in zip(out, chances, strict=True):
        for letter, chance in given.items():
            row[1 + LETTERS.index(letter)] = chance
        row[0] = 1 - row[1:].sum()
    return np.log(out).astype(np.float32)


def certain(text: str) -> np.ndarray:
    return rows(*[row for letter in text for row in ({letter: 0.99}, {})])


def most_likely(chances: np.ndarray, alphabet: str, words: tuple[str, ...]) -> str:
    """Of every way through the rows, summed by what it spells, times the chances of its words."""
    weight = [1 / (50 + place) for place in range(len(words))]
    chance_of = {word: one / sum(weight) for word, one in zip(words, weight, strict=True)}
    sums: dict[str, float] = defaultdict(float)
    for way in product([0, *spell(alphabet)], repeat=len(chances)):
        heard = sum(float(row[letter]) for row, letter in zip(chances, way, strict=True))
        sums[_as_heard(way)] += exp(heard)
    known = {
        text: log(sum_) + sum(log(chance_of[word]) for word in text.split())
        for text, sum_ in sums.items()
        if set(text.split()) <= set(words) and text == text.lstrip() and "  " not in text
    }
    return max(known, key=known.__getitem__).strip()


def _as_heard(way: tuple[int, ...]) -> str:
    found, before = "", 0
    for letter in way:
        if letter not in (0, before):
            found += LETTERS[letter - 1]
        before = letter
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_ways_is_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    chances = np.full((6, NUM_LETTERS), -60.0, np.float32)
    letters = [0, *spell("ta ")]
    chances[:, letters] = np.log(random.dirichlet(np.full(len(letters), 0.6), size=6))
    words = ("a", "at", "tat", "ta")
    assert Speller(Lexicon(words), ALL)(chances) == most_likely(chances, "ta ", words)


def test_what_is_heard_without_doubt_is_written_so_and_unknown_words_too() -> None:
    text = "It was Quorlby, at the best of times."
    assert Speller(Lexicon(WORDS))(certain(text)) == text == read_letters(certain(text).argmax(1).tolist())


def test_words_are_spelled_as_the_list_spells_them() -> None:
    heard = rows(
        *({letter: 0.9} for letter in "It "),
        {"w": 0.9}, {"i": 0.5, "a": 0.4}, {"s": 0.9}, {" ": 0.9},
        {}, {"t": 0.6, "h": 0.3}, {"h": 0.5}, {"e": 0.9},
    )  # fmt: skip
    assert read_letters(heard.argmax(1).tolist()) == "It wis the"
    assert Speller(Lexicon(WORDS))(heard) == "It was the"


def test_silence_says_nothing() -> None:
    assert Speller(Lexicon(WORDS))(rows({}, {}, {})) == ""
    assert Speller(Lexicon(WORDS))(np.zeros((0, NUM_LETTERS), np.float32)) == ""


def test_neither_spaces_nor_marks_come_before_words() -> None:
    heard = rows(
        {" ": 0.9}, {}, {",": 0.9}, {"a": 0.9}, {"t": 0.9}, {" ": 0.8}, {}, {" ": 0.8}, {"i": 0.9}, {"t": 0.9}
    )
    assert Speller(Lexicon(WORDS))(heard) == "at it"


def test_a_word_list_is_read_from_its_file(tmp_path) -> None:
    (tmp_path / HEARD_WORDS).write_text("the\nit\nit's\n")
    lexicon = read_words(tmp_path / HEARD_WORDS)
    the, it = lexicon.whole("the"), lexicon.whole("it")
    assert the is not None
    assert it is not None
    assert the > it
    assert lexicon.whole("i") is None
    assert lexicon.begun("i") == it
    assert lexicon.begun("it'") == lexicon.whole("it's")
    assert lexicon.begun("x") is None


def test_what_noise_begins_is_neither_looked_up_nor_kept_for_ever() -> None:
    lexicon = Lexicon(WORDS)
    text = "xylxylxylxyl"
    assert Speller(lexicon)(certain(text)) == text
    looked_up = lexicon.begun.cache_info()
    assert looked_up.misses <= len(set(text))  # nothing begins with them: what is longer is not asked for
    assert looked_up.maxsize is not None
