"""Forms that hold digits → the words that are said: dates, money, times, amounts, telephone numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

from model_families.omnistage_nano.numbers import (
    MOST_DIGITS,
    ONES,
    cardinal,
    count,
    digits_of,
    number,
    ordinal,
    plural,
    whole,
    year,
)
from model_families.omnistage_nano.units import PER, UNIT, per_words, unit_behind

MONTHS = tuple(
    "January February March April May June July August September October November December".split()  # noqa: SIM905
)
MONEY = {
    "$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent"), "¥": ("yen", "sen"),
    "₹": ("rupee", "paisa"),
}  # fmt: skip
SCALES = {"k": "thousand", "m": "million", "mn": "million", "bn": "billion", "b": "billion", "tn": "trillion"}
FRACTIONS = {(24, 7): "twenty four seven", (9, 11): "nine eleven", (50, 50): "fifty fifty"}
DEGREES = {"C": "Celsius", "F": "Fahrenheit"}
SEVERAL = {"x": "times", "k": "thousand", "M": "million"}
MOST_PARTS = 9  # of a fraction that has a name of its own: above it may be anything
LEAST_PHONE = 7  # digits

_N = r"\d+(?:,\d{3})*"
_SOONER, _LATER = r"(?<![\d.,])", r"(?!\w)"
_SIGNS = "".join(MONEY)
_SCALE = r"(?:\s*(?P<scale>thousand|million|billion|trillion|[bmt]n|[kmb])\b)?"


def _money(found: re.Match[str]) -> str:
    unit, part = MONEY[found["sign"]]
    amount, cents, scale = found["amount"].replace(",", ""), found["cents"], (found["scale"] or "").lower()
    minus = "minus " if found["minus"] else ""
    if found["least"]:  # "$5-10"
        minus += f"{count(found['least'])} to "
    if scale or (cents is not None and len(cents) != 2):
        amount = f"{count(amount)} point {digits_of(cents)}" if cents else count(amount)
        return minus + " ".join([amount, *filter(None, [SCALES.get(scale, scale)]), plural(unit)])
    said = []
    if amount.strip("0") or not cents:
        said += [count(amount), unit if amount == "1" and not found["least"] else plural(unit)]
    if cents and int(cents):
        said += [*(["and"] if said else []), cardinal(int(cents)), part if int(cents) == 1 else plural(part)]
    return minus + " ".join(said)


def _money_behind(found: re.Match[str]) -> str:
    unit = "cent" if found["sign"] == "¢" else MONEY[found["sign"]][0]
    return f"{number(found['amount'])} {unit if found['amount'] == '1' else plural(unit)}"


def _time(found: re.Match[str]) -> str:
    hour, minute, half = int(found["hour"]), found["minute"], found["half"]
    said = [cardinal(hour)]
    if minute == "00":
        said = ["midnight"] if hour == 0 else said
        said += [] if half or not hour else ["o'clock"] if hour <= 12 else ["hundred"]
    elif minute:
        said.append(f"oh {ONES[int(minute)]}" if minute[0] == "0" else cardinal(int(minute)))
    return " ".join([*said, *half.upper().replace(".", "")] if half else said)


def _time_with_seconds(found: re.Match[str]) -> str:
    *before, seconds = found[0].split(":")
    return " ".join(cardinal(int(part)) for part in (*before, *([] if seconds == "00" else [seconds])))


def _date(found: re.Match[str]) -> str:
    """What can be no date is left as it is."""
    first, second, year_digits = found["a"], found["b"], found["year"]
    month, day = int(first), int(second)
    if found.re is _DOTTED_DATE or month > len(MONTHS):
        month, day = day, month
    if not (1 <= month <= len(MONTHS) and 1 <= day <= 31):
        return found[0]
    if len(year_digits) == 2:
        year_digits = ("19" if int(year_digits) >= 50 else "20") + year_digits
    at = " at " if "time" in found.re.groupindex and found["time"] else ""
    return f"{MONTHS[month - 1]} {ordinal(day)} , {year(int(year_digits))} {at}"


def _amount(found: re.Match[str]) -> str:
    amount = found["amount"]
    words = unit_behind(found, one=amount == "1", attached=True)
    return found[0] if words is None else f" {number(amount)} {words} "


def _several(found: re.Match[str]) -> str:
    return f" {number(found['amount'])} {SEVERAL[found['unit']]} "


def _height(found: re.Match[str]) -> str:
    return f" {cardinal(int(found[1]))} foot {cardinal(int(found[2]))} "


def _decade(found: re.Match[str]) -> str:
    century, tens = (found["year"][:-2], found["year"][-2:])
    last = "hundred" if tens == "00" else cardinal(int(tens))
    return " ".join([*([cardinal(int(century))] if century else []), plural(last)])


def fraction(written: re.Match[str]) -> str:
    """Of a match of FRACTION."""
    parts, whole_ = int(written[1]), int(written[2])
    if (parts, whole_) in FRACTIONS:
        return FRACTIONS[parts, whole_]
    if not (0 < parts < whole_ <= MOST_PARTS or (parts == 3 and whole_ == 2)):
        return f"{number(written[1])} over {number(written[2])}"
    name = {2: "half", 4: "quarter"}.get(whole_) or ordinal(whole_)
    return f"{cardinal(parts)} {name if parts == 1 else plural(name)}"


def _phone(found: re.Match[str]) -> str:
    """Digit by digit, and a rest between the groups; short groups are numbers in a row."""
    groups = re.findall(r"\d+", found[0])
    say = whole if sum(map(len, groups)) < LEAST_PHONE else digits_of
    return f"{'plus ' if found[0][0] == '+' else ''}{' , '.join(map(say, groups))} "


def _short_phone(found: re.Match[str]) -> str:
    """Seven digits; round ones are from one amount to another."""
    first, second = found[1], found[2]
    if int(second) % 50 == 0 and int(second) > int(first):
        return f"{whole(first)} to {whole(second)}"
    return f"{digits_of(first)} , {digits_of(second)}"


def _dotted(found: re.Match[str]) -> str:
    groups = found[0].split(".")
    if all(len(group) == 3 for group in groups[1:]) and 0 < len(groups[0]) <= 3 and groups[0] != "0":
        return count("".join(groups))  # thousands, as some languages write them
    return (" dot " if len(groups) == 4 else " point ").join(map(count, groups))


def _ordinal(found: re.Match[str]) -> str:
    digits = found[1].replace(",", "")
    return ordinal(int(digits)) if len(digits) <= MOST_DIGITS else count(digits)


def _power(found: re.Match[str]) -> str:
    match found[1]:
        case "2" | "3" as small:
            return " squared " if small == "2" else " cubed "
        case digits:
            minus = "minus " if digits.startswith("-") else ""
            return f" to the power of {minus}{count(digits.lstrip('-+'))} "


def _scientific(found: re.Match[str]) -> str:
    minus = "minus " if found[2].startswith("-") else ""
    return f" {number(found[1])} times ten to the power of {minus}{count(found[2].lstrip('-+'))} "


Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


def _rule(pattern: str | re.Pattern[str], said: Callable[[re.Match[str]], str] | str) -> Rule:
    made = re.compile(pattern, re.IGNORECASE) if isinstance(pattern, str) else pattern
    return made, (lambda _: said) if isinstance(said, str) else said


_DOTTED_DATE = re.compile(r"(?<![\d.])(?P<a>\d{1,2})\.(?P<b>\d{1,2})\.(?P<year>\d{4})(?!\.?\d)")
FRACTION = re.compile(r"(?<![\d/.,])(\d{1,3})/(\d{1,3})(?![\d/])")
_CLOCK = r"(?<![\d:])(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)"
_HALF = r"\s?(?P<half>[ap]m\b|[ap]\.m\.?)"
RULES: tuple[Rule, ...] = (
    # what would be cut up by others: from … to …, rates, dates
    _rule(rf"(?<=\d)-(?=[{_SIGNS}]\d|\d?\d:\d\d)|(?:(?<=[%°])|(?<=°[CF])|(?<=\d[ap]m))-(?=\d)", " to "),
    _rule(r"(?<=°)\s?([CF])\b", lambda found: f" {DEGREES[found[1].upper()]}"),
    _rule(rf"(?:(?<=[\d%])|(?<=\d[kmb])){PER.pattern}", lambda found: f" {per_words(found)}"),
    _rule(
        r"(?<![\d/-])(?P<year>\d{4})(?P<sep>[-/])(?P<a>\d\d?)(?P=sep)(?P<b>\d\d?)(?:(?P<time>T)(?=\d)|(?![\d/-]))",
        _date,
    ),
    _rule(r"(?<![\d/-])(?P<a>\d{1,2})/(?P<b>\d{1,2})/(?P<year>\d{4}|\d\d)(?![\d/-])", _date),
    _rule(r"(?<![\d/-])(?P<a>\d{1,2})-(?P<b>\d{1,2})-(?P<year>\d{4})(?![\d/-])", _date),
    _rule(_DOTTED_DATE, _date),
    # money, times
    _rule(
        r"(?:(?<![A-Z])(?:US|AU|CA|NZ|HK|[AC]))?"
        rf"(?P<minus>-)?(?P<sign>[{_SIGNS}])(?:(?P<least>{_N})-)?(?P<amount>{_N})(?:\.(?P<cents>\d+))?{_SCALE}",
        _money,
    ),
    _rule(rf"(?P<amount>{_N}(?:\.\d+)?)\s?(?P<sign>[{_SIGNS}¢])(?!\d)", _money_behind),
    _rule(r"(?<![\d:])(?:[01]?\d|2[0-3]):[0-5]\d:[0-5]\d(?![\d:])", _time_with_seconds),
    _rule(rf"{_CLOCK}(?:{_HALF})?(?![:\d])", _time),
    _rule(rf"\b(?P<hour>1[0-2]|0?[1-9])(?P<minute>){_HALF}", _time),
    _rule(r"(?<=\d):(?=\d\b)|(?<=\b\d):(?=\d)", " to "),
    _rule(r"(?<=\d):(?=\d)", " "),
    # rows of digits
    _rule(r"(?:\+\d{1,3}|\(\d{2,4}\)|(?<!\S)0\d{1,4})(?:[ -]\(?\d{2,5}\)?|(?<=\))\d{2,5})+(?![\w-])", _phone),
    _rule(r"(?<![\w-])\+?\d{1,5}(?:-\d{1,7}){2,}(?![\w-])", _phone),
    _rule(r"(?<![\w.])\+?(?:\d{1,3}\.)?\d{3}\.\d{3}\.\d{4}(?![\w.])", _phone),
    _rule(r"(?<![\w,.-])(\d{3})-(\d{4})(?![\w-])", _short_phone),
    # amounts
    _rule(r"(?<=[a-z\d])-(?=\d[^=]*=)", " minus "),
    _rule(r"(?<![\w.,])(?<!\w-)(\d[\d.,]*)-(?=\d)", lambda found: f"{found[1]} to "),
    _rule(rf"{_SOONER}({_N})(?:st|nd|rd|th){_LATER}", _ordinal),
    _rule(rf"{_SOONER}'?(?P<year>(?:1[1-9]|20)?\d0)'?s{_LATER}", _decade),
    _rule(r"(?<!\w)(\d{1,2})'(\d{1,2})(?:\"|'')?(?!\w)", _height),
    _rule(r"(?<=\d)x(?=\d)", " by "),
    _rule(r"(?<=\d)\*(?=\d)", " times "),
    _rule(re.compile(rf"(?<![\w.,])(?P<amount>{_N}(?:\.\d+)?)(?P<unit>[xkM])(?![\w/])"), _several),
    _rule(rf"(?<![\w.,])(?P<amount>{_N}(?:\.\d+)?){UNIT.pattern}", _amount),
    _rule(r"(?<![\d.])1°", "one degree "),
    _rule(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?\d{1,3})(?!\w)", _scientific),
    _rule(r"(?<=\w)\^\(?(-?\d+)\)?", _power),
    _rule(FRACTION, fraction),
    # numbers
    _rule(r"#(?=\d)", " number "),
    _rule(r"(?<!\w)-(?=\.?\d)", "minus "),
    _rule(r"\d+(?:\.\d+){2,}", _dotted),
    _rule(rf"{_N}\.\d+|{_N}", lambda found: f" {number(found[0])} "),
)
POINT = re.compile(r"(?<![\w.])\.(\d+)")


def say_digits(plain: str) -> str:
    """With words in the place of all digits."""
    plain = POINT.sub(lambda found: f" point {digits_of(found[1])} ", plain)
    for pattern, said in RULES:
        plain = pattern.sub(said, plain)
    return plain
