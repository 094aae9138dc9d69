"""Words of a text as they are said, and how many of them differ."""

from __future__ import annotations

import re

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def words_of(text: str) -> list[str]:
    """Lower case, no marks, numbers as words: what is said, not how it is written."""
    text = re.sub(r"(\d),(?=\d{3})", r"\1", text.lower())
    text = re.sub(r"\$(\d+(?:\.\d+)?)", r"\1 dollars", text).replace("%", " percent").replace("&", " and ")
    text = re.sub(r"(\d+)(?:st|nd|rd|th)\b", r"\1", text)
    text = re.sub(r"\d+", lambda found: f" {number_words(found[0])} ", text)
    return re.sub(r"[^a-z' ]+", " ", text).replace("'", "").split()


def number_words(digits: str) -> str:
    """As it is said."""
    value = int(digits)
    if len(digits) > 6 or (len(digits) > 1 and digits[0] == "0"):
        return " ".join(_ONES.split()[int(digit)] for digit in digits)
    if 1100 <= value <= 2099 and value % 1000 >= 10 and len(digits) == 4:  # a year
        return f"{_small(value // 100)} {_small(value % 100) if value % 100 else 'hundred'}"
    return _small(value)


def _small(value: int) -> str:
    if value < 20:
        return _ONES.split()[value]
    if value < 100:
        return _TENS.split()[value // 10 - 2] + (f" {_small(value % 10)}" if value % 10 else "")
    size, name = (100, "hundred") if value < 1000 else (1000, "thousand")
    return f"{_small(value // size)} {name}" + (f" {_small(value % size)}" if value % size else "")


def distance(wanted: list[str], found: list[str]) -> int:
    """Words to put in, take out or change."""
    row = list(range(len(found) + 1))
    for index, word in enumerate(wanted, 1):
        last, row[0] = row[0], index
        for place, other in enumerate(found, 1):
            last, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, last + (word != other))
    return row[-1]
