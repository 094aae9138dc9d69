"""The front end of omnistage-nano's talker: what is written is said, as it should sound, while it streams."""

from __future__ import annotations

import random

import pytest

from model_families.default_model.shipped import SPEAKING
from model_families.omnistage_nano.front import MOST_UNBROKEN, Front, FrontSpeller, Reader, spoken_of
from model_families.omnistage_nano.numbers import cardinal, ordinal, year
from model_families.omnistage_nano.pieces import MOST_AHEAD, SPOKEN_PIECES, Pieces, read_pieces, write_pieces
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS, Dictionary, read_words, write_words
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
        ("at 7:05 pm, 7:30 or 12:00", "at seven oh five P M , seven thirty or twelve o'clock"),
        ("9am, 10:15pm", "nine A M , ten fifteen P M"),
        ("50% of 3.14", "fifty percent of three point one four"),
        ("-5°C, 10-20 km, 5km, 1 kg", "minus five degrees Celsius , ten to twenty kilometers , five"
         " kilometers , one kilogram"),
        ("the 1990s, 80s", "the nineteen nineties , eighties"),
        ("1/2 cup, 7/8", "one half cup , seven eighths"),
        ("version 1.2.3", "version one point two point three"),
        ("007 and 12345678901234567", "zero zero seven and one two three four five six seven eight nine"
         " zero one two three four five six seven"),
        ("Dr. Lee, e.g. U.S. law etc.", "doctor Lee , for example U S law etc"),
        ("**Bold** `code` #1\n- item", "Bold code number one . item"),
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


LONG = (
    "a" * 1500,
    "x1" * 5000,
    "9" * 20_000,
    "$" + "9" * 5000,
    "1." * 3000,
    "-" * 5000,
    "'" * 5000,
    "A." * 4000,
)


@pytest.mark.parametrize("text", LONG)
def test_what_no_blank_breaks_is_read_up_to_a_bound(text):
    shown = "".join(word for word in said(text).split() if word not in ",.?!")
    assert len(shown) < 12 * MOST_UNBROKEN
    assert said(f"so {text} it is").split()[0] == "so"
    assert said(f"so {text} it is").split()[-2:] == ["it", "is"]
    assert len(spoken_of(text)) <= MOST_UNBROKEN
    assert said(spoken_of(text)) == said(text)


def test_marks_and_blanks_break_a_long_text():
    for joint in (", ", ",", " ", "—", "\n"):
        text = joint.join(["word"] * 1000)
        assert said(text).split().count("word") == 1000
        assert spoken_of(text) == text


@pytest.mark.parametrize(("text", "sayable"), [
    ("Hello", True), ("😀 5", True), ("π", True), ("&", True),
    ("😀", False), ("... !?", False), ("漢字", False), (" \n", False), ("- * _", False), ("'\"()", False),
])  # fmt: skip
def test_what_can_be_said_is_known_beforehand(text, sayable):
    assert spoken_of(text) == (text if sayable else "")


ENDS = (
    "the cat,",
    "the cat;",
    "the cat:",
    "the cat -",
    "the cat —",
    "the cat...",
    "the cat (",
    "the cat, \n",
)


@pytest.mark.parametrize("text", ENDS)
def test_a_mark_at_the_end_is_no_rest(front, text):
    """The talker would have gone on."""
    assert rows_of(front, text) == rows_of(front, "the cat.")


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
    "place": "plˈAs", "try": "tɹˈI", "the": "ðə", "in": "ɪn", "A": "ˈA", "D": "dˈi", "Z": "zˈi", "c": "sˈi",
    "p": "pˈi",
}  # fmt: skip


@pytest.mark.parametrize(
    ("word", "sounds"),
    [
        ("cat", "kˈæt"), ("Cat", "kˈæt"), ("CAT", "kˈæt"), ("cats", "kˈæts"), ("cat's", "kˈæts"),
        ("cats'", "kˈæts"), ("cities", "sˈɪTiz"), ("buses", "bˈʌsᵻz"), ("stopped", "stˈɑpt"),
        ("stopping", "stˈɑpɪŋ"), ("waited", "wˈATᵻd"), ("tried", "tɹˈId"), ("making", "mˈAkɪŋ"),
        ("maker", "mˈAkəɹ"), ("fireplaces", "fˈIəɹplˌAsᵻz"), ("unpolished", "ˌʌnpˈɑlɪʃt"),
        ("Polish", "pˈOlɪʃ"), ("polish", "pˈɑlɪʃ"), ("US", "jˌuˈɛs"),
        ("ZAP", "zˌiˌApˈi"), ("CDs", "sˌidˈiz"),
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
    "On 2024-12-25 at 9:00 a.m. No. 5, St. James, Dec. 3 - Henry VIII - ran 5 km at 10 km/h, 3 - 5 (twice).",
    "Call +1 (555) 123-4567 or (555) 123-4567, mail me@example.com; it's 5'10\" — $5 million — 20 °C.\nNo.",
    "aaaaaaaaaa" * 30 + " $",
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
    assert heard(",") == " dˈɔɡ"
    assert heard(" 3") == ""
    assert heard("rd") == ""
    assert heard("", last=True) == ", θˈɜɹd."


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
