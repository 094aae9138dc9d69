"""The words that were likeliest said, against a count of every way to hear them."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from math import exp, log

import numpy as np
import pytest

from contracts.errors import EngineError
from model_families.omnistage_nano.ears import HEARD_PAIRS, HEARD_WORDS, read_lexicon
from model_families.omnistage_nano.letters import LETTERS, NUM_LETTERS, read_letters, spell
from model_families.omnistage_nano.lexicon import PAIRED, Lexicon, Speller, Weights

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


Pairs = dict[str, dict[str, float]]


def most_likely(chances: np.ndarray, alphabet: str, words: tuple[str, ...], pairs: Pairs) -> str:
    """Of every way through the rows, summed by what it spells, times the chances of its words."""
    weight = [1 / (50 + place) for place in range(len(words))]
    chance_of = {word: one / sum(weight) for word, one in zip(words, weight, strict=True)}
    sums: dict[str, float] = defaultdict(float)
    for way in product([0, *spell(alphabet)], repeat=len(chances)):
        heard = sum(float(row[letter]) for row, letter in zip(chances, way, strict=True))
        sums[_as_heard(way)] += exp(heard)

    def chance(previous: str, word: str) -> float:
        row = pairs.get(previous, {})
        return PAIRED * row.get(word, 0.0) + (1 - PAIRED * sum(row.values())) * chance_of[word]

    known = {
        text: log(sum_) + sum(log(chance(*pair)) for pair in pairwise(["", *text.split()]))
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


ALONE: Pairs = {}
PAIRS: Pairs = {"": {"a": 0.1, "tat": 0.6}, "a": {"ta": 0.9}, "at": {"at": 0.3, "a": 0.3}, "tat": {"a": 1.0}}


@pytest.mark.parametrize("pairs", [ALONE, PAIRS], ids=["alone", "pairs"])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_ways_is_found(seed: int, pairs: Pairs) -> None:
    random = np.random.default_rng(seed)
    chances = np.full((6, NUM_LETTERS), -60.0, np.float32)
    letters = [0, *spell("ta ")]
    chances[:, letters] = np.log(random.dirichlet(np.full(len(letters), 0.6), size=6))
    chances[3, letters] = np.log([0.05, 0.05, 0.05, 0.85])  # two words
    words = ("a", "at", "tat", "ta")
    assert Speller(Lexicon(words, pairs), ALL)(chances) == most_likely(chances, "ta ", words, pairs)


@pytest.mark.parametrize("previous", ["", *WORDS])
def test_the_chances_of_all_words_behind_one_are_1_together(previous: str) -> None:
    lexicon = Lexicon(WORDS, {"": {"it": 0.5}, "it": {"was": 1.0}, "of": {"times": 0.3, "the": 0.2}})
    after = lexicon.after(previous)
    chances = {word: lexicon.whole(word, after) for word in WORDS}
    assert sum(map(exp, chances.values())) == pytest.approx(1)
    for begun in {word[:end] for word in WORDS for end in range(1, len(word) + 1)}:
        assert lexicon.begun(begun, after) == max(chances[word] for word in WORDS if word.startswith(begun))


def unsure(text: str, *one_of: str) -> np.ndarray:
    """`text`, then letters that all are as likely."""
    return np.concatenate([certain(text), rows(dict.fromkeys(one_of, 0.99 / len(one_of)), {}), certain("t")])


@pytest.mark.parametrize(
    ("before", "heard"),
    [
        ("it ", "it at"),
        ("it, ", "it, at"),
        ("it. ", "it. it"),
        ("at ", "at it"),
        ("", "it"),
        ("Quorl ", "Quorl it"),
    ],
)
def test_the_word_before_decides_up_to_the_end_of_its_sentence(before: str, heard: str) -> None:
    """ "it" is the commoner one where nothing is known."""
    lexicon = Lexicon(WORDS, {"it": {"at": 0.9}, "was": {"at": 0.9}})
    assert Speller(lexicon)(unsure(before, "i", "a")) == heard


def test_a_sentence_begins_with_what_begins_sentences() -> None:
    lexicon = Lexicon(WORDS, {"": {"at": 0.9}, "it": {"it": 0.9}})
    assert Speller(lexicon)(unsure("", "i", "a")) == "at"
    assert Speller(lexicon)(unsure("it? ", "i", "a")) == "it? at"


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
    assert read_lexicon(tmp_path) is None
    (tmp_path / HEARD_WORDS).write_text("the\nit\nit's\n")
    lexicon = read_lexicon(tmp_path)
    assert lexicon is not None
    the, it = lexicon.whole("the"), lexicon.whole("it")
    assert the is not None
    assert it is not None
    assert the > it
    assert lexicon.whole("i") is None
    assert lexicon.begun("i") == it
    assert lexicon.begun("it'") == lexicon.whole("it's")
    assert lexicon.begun("x") is None
    assert lexicon.after("") is None


def test_pairs_are_read_from_theirs(tmp_path) -> None:
    (tmp_path / HEARD_WORDS).write_text("the\nit\nit's\n")
    (tmp_path / HEARD_PAIRS).write_text(" it 7 the 23\nthe it 5\n")
    lexicon = read_lexicon(tmp_path)
    assert lexicon is not None
    first, the = lexicon.after(""), lexicon.after("the")
    assert first is not None
    assert the is not None
    assert first.whole.keys() == {"it", "the"}
    assert exp(the.others) == pytest.approx(1 - PAIRED * exp(-0.5))
    assert lexicon.after("it") is None


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (HEARD_WORDS, b"\n", "holds no words"),
        (HEARD_WORDS, "the\nna\u00efve\n".encode(), "ASCII"),
        (HEARD_PAIRS, "the na\u00efve 3\n".encode(), "ASCII"),
        (HEARD_PAIRS, b"the it 3\n\n", "line 2: not a word"),
        (HEARD_PAIRS, b"the it\n", "line 1: not a word"),
        (HEARD_PAIRS, b"the it -1\n", "line 1: not a word"),
        (HEARD_PAIRS, b"the it 3.5\n", "line 1: not a word"),
        (HEARD_PAIRS, b"the cat 3\n", "line 1: a word that is not in"),
        (HEARD_PAIRS, b"the it 3 the 9\n", "line 1: chances of more than 1"),
    ],
)
def test_files_of_anything_else_are_refused(tmp_path, name: str, content: bytes, says: str) -> None:
    (tmp_path / HEARD_WORDS).write_text("the\nit\n")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EngineError, match=says) as refused:
        read_lexicon(tmp_path)
    assert name in str(refused.value)


def test_what_noise_begins_is_neither_looked_up_nor_kept_for_ever() -> None:
    lexicon = Lexicon(WORDS)
    text = "xylxylxylxyl"
    assert Speller(lexicon)(certain(text)) == text
    looked_up = lexicon.begun_alone.cache_info()
    assert looked_up.misses <= len(set(text))  # nothing begins with them: what is longer is not asked for
    assert looked_up.maxsize is not None
