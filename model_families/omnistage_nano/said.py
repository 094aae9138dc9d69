"""What is written → the words that are said: numbers, dates, money, times, abbreviations, signs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

ONES = tuple(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "  # noqa: SIM905
    "seventeen eighteen nineteen".split()
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
MOST_DIGITS = 15
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"}
ORDINALS |= {"nine": "ninth", "twelve": "twelfth"}
MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}
PENCE = "pence"
SIGNS = {"%": "percent", "&": "and", "@": "at", "+": "plus", "=": "equals", "°": "degrees", "×": "times"}
ABBREVIATIONS = {
    "mr": "mister", "mrs": "missus", "ms": "miz", "dr": "doctor", "prof": "professor", "st": "saint",
    "vs": "versus", "etc": "et cetera", "approx": "approximately", "dept": "department", "jr": "junior",
    "sr": "senior", "e.g": "for example", "i.e": "that is", "a.m": "a m", "p.m": "p m",
}  # fmt: skip
UNITS = {
    "km": "kilometer", "cm": "centimeter", "mm": "millimeter", "kg": "kilogram", "mg": "milligram",
    "lb": "pound", "ml": "milliliter", "kb": "kilobyte", "mb": "megabyte", "gb": "gigabyte", "tb": "terabyte",
    "hz": "hertz", "khz": "kilohertz", "mhz": "megahertz", "ghz": "gigahertz",
    "kw": "kilowatt", "mph": "miles per hour",
    "m": "meter", "g": "gram", "s": "second", "h": "hour", "k": "thousand", "x": "times",
}  # fmt: skip
UNCHANGED = ("hertz", "hour", "thousand", "times")  # by their ends: no plural
FRACTIONS = {"1/2": "one half", "1/3": "one third", "2/3": "two thirds", "1/4": "one quarter"}
FRACTIONS |= {"3/4": "three quarters"}
PLAIN = str.maketrans("‘’“”–—", "''\"\"--")


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


def whole(digits: str) -> str:
    """Digits with or without commas between the thousands."""
    plain = digits.replace(",", "")
    if len(plain) > MOST_DIGITS or (len(plain) > 1 and plain[0] == "0"):
        return digits_of(plain)
    return year(int(plain)) if len(digits) == 4 else cardinal(int(plain))


def number(written: str) -> str:
    """Of digits, with commas and a point or without."""
    before, point, behind = written.partition(".")
    if not point:
        return whole(before)
    start = cardinal(int(before.replace(",", ""))) if 0 < len(before) <= MOST_DIGITS else "zero"
    return f"{start} point {digits_of(behind)}"


def plural(words: str) -> str:
    ending = "ies" if words.endswith("y") else "es" if words.endswith(("s", "x", "sh", "ch")) else "s"
    return (words[:-1] if ending == "ies" else words) + ending


def _money(found: re.Match[str]) -> str:
    unit, part = MONEY[found["sign"]]
    amount, cents, scale = found["amount"].replace(",", ""), found["cents"], found["scale"]
    if scale or (cents is not None and len(cents) != 2):
        scale = {"k": "thousand", "m": "million", "bn": "billion"}.get(scale or "", scale or "")
        return " ".join([number(amount + (f".{cents}" if cents else "")), *filter(None, [scale]), f"{unit}s"])
    said = (
        []
        if int(amount) == 0 and cents
        else [cardinal(int(amount)), unit if int(amount) == 1 else f"{unit}s"]
    )
    if cents and int(cents):
        several = PENCE if part == "penny" else f"{part}s"
        said += [*(["and"] if said else []), cardinal(int(cents)), part if int(cents) == 1 else several]
    return " ".join(said)


def _time(found: re.Match[str]) -> str:
    hour, minute, half = int(found["hour"]), found["minute"], found["half"]
    said = [cardinal(hour)]
    if minute == "00":
        said += [] if half else ["o'clock"] if 0 < hour <= 12 else ["hundred"]
    elif minute:
        said.append(f"oh {ONES[int(minute)]}" if minute[0] == "0" else cardinal(int(minute)))
    return " ".join([*said, *half.lower().replace(".", "")] if half else said)


def _unit(found: re.Match[str]) -> str:
    amount, unit = found["amount"], UNITS[found["unit"].lower()]
    one = amount == "1" or unit.endswith(UNCHANGED)
    return f"{number(amount)} {unit if one else plural(unit)}"


def _decade(found: re.Match[str]) -> str:
    century, tens = (found["year"][:-2], found["year"][-2:])
    last = "hundred" if tens == "00" else cardinal(int(tens))
    return " ".join([*([cardinal(int(century))] if century else []), plural(last)])


def _fraction(found: re.Match[str]) -> str:
    return FRACTIONS.get(found[0]) or " ".join([number(found[1]), "over", number(found[2])])


def _ordinal(found: re.Match[str]) -> str:
    return ordinal(int(found[1].replace(",", "")))


Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


def _rule(pattern: str, said: Callable[[re.Match[str]], str]) -> Rule:
    return re.compile(pattern, re.IGNORECASE), said


_N = r"\d+(?:,\d{3})*"
_SOONER, _LATER = r"(?<![\d.,])", r"(?!\w)"
RULES: tuple[Rule, ...] = (
    _rule(
        rf"(?P<sign>[$£€])(?P<amount>{_N})(?:\.(?P<cents>\d+))?"
        r"(?:\s*(?P<scale>thousand|million|billion|trillion|bn|k|m)\b)?",
        _money,
    ),
    _rule(r"\b(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?:(?P<half>[ap]m)\b)?(?!:)", _time),
    _rule(r"\b(?P<hour>\d{1,2})(?P<minute>)(?P<half>[ap]m)\b", _time),
    _rule(rf"{_SOONER}({_N})(?:st|nd|rd|th){_LATER}", _ordinal),
    _rule(rf"{_SOONER}'?(?P<year>(?:1[1-9]|20)?\d0)'?s{_LATER}", _decade),
    _rule(rf"{_SOONER}(?P<amount>{_N}(?:\.\d+)?)(?P<unit>{'|'.join(UNITS)}){_LATER}", _unit),
    _rule(r"\b(\d{1,3})/(\d{1,3})\b(?!/)", _fraction),
    _rule(r"(?<=\d)-(?=\d)", lambda _: " to "),
    _rule(r"(?<!\w)-(?=\d)", lambda _: "minus "),
    _rule(r"\d+(?:\.\d+){2,}", lambda found: " point ".join(map(cardinal, map(int, found[0].split("."))))),
    _rule(rf"{_N}\.\d+|{_N}", lambda found: f" {number(found[0])} "),
)
_SIGN = re.compile("|".join(map(re.escape, SIGNS)))
_DOTS = re.compile(r"(?<=[A-Za-z0-9])\.(?=[A-Za-z0-9])")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]?\Z")
_PARTS = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*'?|[,.;:?!()-]|\"")
MARK_OF = {";": ",", ":": ",", "(": ",", ")": ","}


def say(written: str) -> Iterator[str]:
    """Of what stands between blanks: words of letters and apostrophes, and the marks `,.?!`."""
    plain = unicodedata.normalize("NFKC", written.translate(PLAIN))
    plain = "".join(c for c in unicodedata.normalize("NFD", plain) if not unicodedata.combining(c))
    for pattern, said in RULES:
        plain = pattern.sub(said, plain)
    plain = _SIGN.sub(lambda found: f" {SIGNS[found[0]]} ", plain).replace("--", " , ")
    for part in plain.split():
        yield from _say_part(part)


def _say_part(part: str) -> Iterator[str]:
    bare = part.strip("\"'()[],;:?!*_")
    behind = part[part.rfind(bare) + len(bare) :] if bare else part
    lower = bare.lower()
    if lower.rstrip(".") in ABBREVIATIONS and ("." in bare or lower == "vs"):
        yield from ABBREVIATIONS[lower.rstrip(".")].split()
        part = behind
    elif _INITIALS.match(bare) and len(bare) > 2:
        yield from bare.replace(".", "").upper()
        part = behind
    for found in _PARTS.findall(_DOTS.sub(" dot ", part)):
        if found[0].isalpha():
            yield "a" if found == "A" else found  # the letter of that name comes in initials
        elif found not in ('"', "-"):
            yield MARK_OF.get(found, found)
