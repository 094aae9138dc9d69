"""The front end of omnistage-nano's talker: what is written is said, as it should sound, while it streams."""

from __future__ import annotations

import random

import pytest

from model_families.default_model.shipped import SPEAKING
from model_families.omnistage_nano.front import Front, FrontSpeller, Reader
from model_families.omnistage_nano.pieces import MOST_AHEAD, SPOKEN_PIECES, Pieces, read_pieces, write_pieces
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS, Dictionary, read_words, write_words
from model_families.omnistage_nano.said import cardinal, ordinal, year
from tests.tiny_models import build_tokenizer

PAD = 7


def said(text):
    return " ".join(Reader().read(text, last=True))


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("It is 42.", "It is forty two ."),
        ("1,250 people in 1987, 2005 and 1905", "one thousand two hundred fifty people in nineteen"
         " eighty seven , two thousand five and nineteen oh five"),
        ("the 3rd, 21st and 1,000th", "the third , twenty first and one thousandth"),
        ("$9.99 or $1, £0.50, $3 million!", "nine dollars and ninety nine cents or one dollar , fifty pence ,"
         " three million dollars !"),
        ("at 7:05 pm, 7:30 or 12:00", "at seven oh five pm , seven thirty or twelve o'clock"),
        ("9am, 10:15pm", "nine a m , ten fifteen p m"),
        ("50% of 3.14", "fifty percent of three point one four"),
        ("-5°C, 10-20 km, 5km, 1 kg", "minus five degrees C , ten to twenty km , five kilometers , one kg"),
        ("the 1990s, 80s", "the nineteen nineties , eighties"),
        ("1/2 cup, 7/8", "one half cup , seven over eight"),
        ("version 1.2.3", "version one point two point three"),
        ("007 and 12345678901234567", "zero zero seven and one two three four five six seven eight nine"
         " zero one two three four five six seven"),
        ("Dr. Lee, e.g. U.S. law etc.", "doctor Lee , for example U S law et cetera"),
        ("**Bold** `code` #1\n- item", "Bold code one . item"),
        ("well-known: (yes); “no”…", "well known , yes , no ."),
        ("café naïve", "cafe naive"),
        ("A cat & a dog @ example.com", "a cat and a dog at example dot com"),
        ("Wait... what?!", "Wait . what ?"),
        ("... \n 😀 漢字", ""),
        ("I can't, won't; didn't", "I can't , won't , didn't"),
    ],
)  # fmt: skip
def test_what_is_written_is_said(written, spoken):
    assert said(written) == spoken


def test_numbers():
    assert [ordinal(n) for n in (1, 12, 20, 23, 40, 105)] == [
        *("first", "twelfth", "twentieth", "twenty third", "fortieth", "one hundred fifth")
    ]
    assert cardinal(10**15 - 1).startswith("nine hundred ninety nine trillion nine hundred")
    assert [year(n) for n in (1900, 2000, 2024, 999)] == [
        *("nineteen hundred", "two thousand", "twenty twenty four", "nine hundred ninety nine")
    ]


SOUNDS = {
    "cat": "kˈæt", "stop": "stˈɑp", "city": "sˈɪTi", "bus": "bˈʌs", "make": "mˈAk", "wait": "wˈAt",
    "he": "hi", "polish": "pˈɑlɪʃ", "Polish": "pˈOlɪʃ", "U": "jˈu", "S": "ˈɛs", "fire": "fˈIəɹ",
    "place": "plˈAs", "try": "tɹˈI", "the": "ðə", "in": "ɪn",
}  # fmt: skip


@pytest.mark.parametrize(
    ("word", "sounds"),
    [
        ("cat", "kˈæt"), ("Cat", "kˈæt"), ("CAT", "kˈæt"), ("cats", "kˈæts"), ("cat's", "kˈæts"),
        ("cats'", "kˈæts"), ("cities", "sˈɪTiz"), ("buses", "bˈʌsᵻz"), ("stopped", "stˈɑpt"),
        ("stopping", "stˈɑpɪŋ"), ("waited", "wˈATᵻd"), ("tried", "tɹˈId"), ("making", "mˈAkɪŋ"),
        ("maker", "mˈAkəɹ"), ("fireplaces", "fˈIəɹplˌAsᵻz"), ("unpolished", "ˌʌnpˈɑlɪʃt"),
        ("Polish", "pˈOlɪʃ"), ("polish", "pˈɑlɪʃ"), ("US", "jˌuˈɛs"),
        ("He", "hˌi"), ("he", "hi"), ("the", "ðə"), ("The", "ðə"), ("In", "ɪn"), ("zyx", None), ("ZQ", None),
    ],
)  # fmt: skip
def test_forms_of_words(word, sounds):
    assert Dictionary(SOUNDS).sounds(word) == sounds


def test_words_and_pieces_are_read_as_they_were_written(tmp_path):
    write_words(tmp_path / SPOKEN_WORDS, SOUNDS)
    assert read_words(tmp_path / SPOKEN_WORDS).sounds("cat") == "kˈæt"
    write_pieces(tmp_path / SPOKEN_PIECES, [(" ðə", 1.25), ("=a", 0.5)])
    assert read_pieces(tmp_path / SPOKEN_PIECES) == Pieces((" ðə", "=a"), (1.25, 0.5))


@pytest.fixture(scope="module")
def front():
    tokenizer = build_tokenizer(merges=[("h", "o"), ("Ġ", "s"), ("l", "d")]).backend_tokenizer
    folder = SPEAKING.parent
    return Front(tokenizer, read_pieces(folder / SPOKEN_PIECES), read_words(folder / SPOKEN_WORDS))


def spelled(front, rows):
    return [front.pieces.pieces[row - front.pieces.ids.start] for row in rows if row != PAD]


def test_sounds_come_in_pieces_and_unknown_words_in_letters(front):
    pieces = spelled(front, rows_of(front, "Hello there, zxqj."))
    assert "".join(pieces[: pieces.index(",")]) == " həlˈO ðɛɹ"
    assert pieces[pieces.index(",") + 1 :] == ["= z", "=x", "=q", "=j", "."]


def rows_of(front, text):
    tokens = front.bytes_of._tokenizer.encode(text, add_special_tokens=False).ids
    return FrontSpeller(front, PAD)(tokens, True)


TEXTS = (
    "Hello there, zxqj. It's $3 million, or $4.50 — at 7:05 p.m. on the 3rd!\nNaïve “words”… 1,250 (U.S.)",
    "no blank at all",
    "The apple on the 8th of the",
    "\n\n  x",
    "$5",
    "$5 million",
    "wait,,, what?!?! 😀 ok",
)


@pytest.mark.parametrize("text", TEXTS)
def test_rows_are_the_same_however_tokens_are_parted(front, text):
    tokens = front.bytes_of._tokenizer.encode(text, add_special_tokens=False).ids
    wanted = FrontSpeller(front, PAD)(tokens, True)
    assert wanted
    draw = random.Random(3)
    for most in (1, 2, 3, 7):
        speller, rows, left = FrontSpeller(front, PAD), [], list(tokens)
        while left:
            count = draw.randint(1, most)
            rows += speller(left[:count], False)
            left = left[count:]
        assert rows + speller([], True) == wanted


def test_a_word_is_said_once_its_end_is_seen_and_no_later(front):
    speller = FrontSpeller(front, PAD)
    ids = front.bytes_of._tokenizer.encode

    def heard(text, last=False):
        return "".join(spelled(front, speller(ids(text, add_special_tokens=False).ids, last)))

    assert heard("cat") == ""
    assert heard("s") == ""
    assert heard(" d") == " kˈæts"
    assert heard("og") == ""
    assert heard(",") == " dˈɔɡ,"
    assert heard(" 3") == ""
    assert heard("rd") == ""
    assert heard("", last=True) == " θˈɜɹd."


def test_the_sounds_by_the_word_behind_it(front):
    assert "".join(spelled(front, rows_of(front, "The apple, the cat, the hour and the"))) == (
        " ði ˈæpᵊl, ðə kˈæt, ði ˈWəɹ ænd ðə."
    )
    speller = FrontSpeller(front, PAD)
    ids = front.bytes_of._tokenizer.encode

    def heard(text):
        return "".join(spelled(front, speller(ids(text, add_special_tokens=False).ids, False)))

    assert heard("the ") == heard("app") == ""
    assert heard("le ") == " ði ˈæpᵊl"


@pytest.mark.parametrize(("text", "end"), [("the cat", "."), ("the cat.", ""), ("the cat?", ""), ("😀", "")])
def test_every_text_ends_as_a_sentence_does(front, text, end):
    """The talker has heard no other, and would go on with a sentence of its own."""
    rows = [row for row in rows_of(front, text) if row != PAD]
    assert rows == [row for row in rows_of(front, text + end) if row != PAD]
    assert not rows or "".join(spelled(front, rows))[-1] in ".?"


def test_pieces_come_no_further_ahead_than_they_may(front):
    rows = rows_of(front, "The house is near the river, and the river is long. " * 5)
    first = front.pieces.ids.start
    due = 0.0
    for rows_seen, row in enumerate(rows, 1):
        if row != PAD:
            assert rows_seen >= due - MOST_AHEAD - 1
            due += front.pieces.frames[row - first]
    assert abs(len(rows) - (due - MOST_AHEAD)) <= 1
