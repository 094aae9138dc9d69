"""Numbers in English words."""

from __future__ import annotations

ONES = tuple(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "  # noqa: SIM905
    "seventeen eighteen nineteen".split()
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
MOST_DIGITS = 15  # of a number that is said as one; what has more is said digit by digit
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"}
ORDINALS |= {"nine": "ninth", "twelve": "twelfth"}
PLURALS = {"foot": "feet", "penny": "pence", "yen": "yen", "half": "halves"}


def cardinal(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f" {ONES[number % 10]}" if number % 10 else "")
    size, name = next((size, name) for size, name in SCALES if number >= size)
    rest = f" {cardinal(number % size)}" if number % size else ""
    return f"{cardinal(number // size)} {name}{rest}"


def ordinal(number: int) -> str:
    *before, last = cardinal(number).split()
    last = ORDINALS.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return " ".join([*before, last])


def year(number: int) -> str:
    """1999, 2024, 1905, 1900; what is none of a year's kind is a cardinal."""
    century, rest = divmod(number, 100)
    if not 1100 <= number <= 2099 or (century % 10 == 0 and rest < 10):
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {f'oh {ONES[rest]}' if rest < 10 else cardinal(rest)}"


def digits_of(digits: str) -> str:
    return " ".join(ONES[int(digit)] for digit in digits)


def count(digits: str) -> str:
    """Digits with or without commas between the thousands, as how many there are of something."""
    plain = digits.replace(",", "")
    return cardinal(int(plain)) if len(plain) <= MOST_DIGITS else digits_of(plain)


def whole(digits: str) -> str:
    """The same by themselves: four may be a year, and what begins with a zero is no number."""
    plain = digits.replace(",", "")
    if len(plain) > 1 and plain[0] == "0":
        return digits_of(plain)
    return year(int(plain)) if len(digits) == 4 else count(plain)


def number(written: str) -> str:
    """Of digits, with commas and a point or without."""
    before, point, behind = written.partition(".")
    return f"{count(before)} point {digits_of(behind)}" if point else whole(before)


def plural(words: str) -> str:
    *before, last = words.split(" ")
    ending = "ies" if last.endswith("y") else "es" if last.endswith(("s", "x", "sh", "ch")) else "s"
    if last.endswith("hertz"):
        return words
    several = PLURALS.get(last) or (last[:-1] if ending == "ies" else last) + ending
    return " ".join([*before, several])
