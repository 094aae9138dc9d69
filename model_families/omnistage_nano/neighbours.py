"""What is read by what stands before or behind it in its line: "5 km", "No. 5", "Henry VIII"."""

from __future__ import annotations

import re

from model_families.omnistage_nano.abbreviations import (
    ALWAYS,
    BEFORE_NAMES,
    BEFORE_NUMBERS,
    BEHIND_NAMES,
    DAYS_BY_START,
    MONTHS_BY_START,
    NO_NAMES,
    OR_ENDS,
    OTHER_WORDS,
    PARTS,
    RULERS,
    SLASHED,
)
from model_families.omnistage_nano.forms import FRACTION, fraction
from model_families.omnistage_nano.numbers import cardinal, ordinal
from model_families.omnistage_nano.units import UNIT, unit_alone, unit_behind

MOST_JOINED = 20  # characters: the longest telephone numbers
OPENING, CLOSING = "\"'([*_", "\"')],;:?!.*_"
_SIGNS = {"<": "is less than", ">": "is greater than", "/": "divided by", "*": "times", "x": "times"}
_DASHES = ("-", "--")
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d(?:[\d,.:/-]*\d)?\Z")
_HOUR = re.compile(r"\d{1,2}(?::\d\d)?\Z")
_NAME = re.compile(r"[A-Z][a-z]+\Z")
_ROMAN = re.compile(r"(X{0,3})(IX|IV|V?I{0,3})")
_ROMAN_ONES = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")

_STOPPED = "|".join({*BEFORE_NUMBERS, *BEFORE_NAMES, *OR_ENDS, *DAYS_BY_START, *MONTHS_BY_START})
_MONTHS = "|".join(start.capitalize() for start in MONTHS_BY_START)
_WAITS = re.compile(
    rf"[\"'(\[*_]*(?:(?i:{_STOPPED.replace('.', r'[.]')})\.|{_MONTHS}|[A-Z]\.|[<>/*x-]|[$£€¥₹]\d\S*|\d?\d:00"
    r"|(?:\+\d{1,3}|0(?!00)\d{2,4})[\d() -]*|\(\d{3}\)[\d -]*)"
)
_SCALES = re.compile(r"(?:thousand|million|billion|trillion|bn|k|m)\b", re.IGNORECASE)
_HALF = re.compile(r"[ap](?:m\b|\.m)", re.IGNORECASE)
_DIGITS = re.compile(r"\(?\d{2,5}\)?(?:-\d{2,5})*[.,;!?]?")
_LOCAL = re.compile(r"\d{3}(?:-\d{4})?[.,;!?]?|\d{4}[.,;!?]?")


def waits(written: str) -> bool:
    """Whether it is read by what stands behind it."""
    return _WAITS.fullmatch(written) is not None


def goes_on(written: str, behind: str) -> bool:
    """Whether what stands behind a blank is part of the same amount, time or telephone number."""
    if len(written) > MOST_JOINED:
        return False
    if written[0] in "$£€¥₹":
        return _SCALES.match(behind) is not None
    if written.endswith(":00"):
        return _HALF.match(behind) is not None
    digits = {"+": _DIGITS, "0": _LOCAL, "(": _LOCAL}.get(written[0])
    return digits is not None and digits.fullmatch(behind) is not None


def by_neighbours(core: str, closed: str, before: str, behind: str) -> tuple[str, str] | None:
    """Words for what stands between opening and `closed`, its closing marks, and what is left of those.
    `before`, `behind`: whole, with their marks. None: it has no other reading for its neighbours."""
    before, behind = before.lstrip(OPENING), behind.lstrip(OPENING)
    if (words := _roman(core, closed, before)) is not None:
        return words, closed
    if closed[:1] == "." and (words := _short(core, closed[1:], before, behind)) is not None:
        return words, closed[1:] if not _ends_too(core, behind) else closed
    words = (
        SLASHED.get(core.lower())
        or _behind_number(core, before, behind)
        or (_month(core) if behind[:1].isdigit() else None)
        or unit_alone(core)
    )
    if words is None and core in _DASHES:
        words = ","
    return None if words is None else (words, closed)


# --- short forms --------------------------------------------------------------------------------------------
def _short(core: str, closed: str, before: str, behind: str) -> str | None:
    """Of what a stop stands behind, and `closed` behind that."""
    lower, capital = core.lower(), core[:1].isupper()
    if lower in ALWAYS or lower in OR_ENDS:
        return ALWAYS.get(lower) or OR_ENDS[lower]
    if lower in BEFORE_NUMBERS and behind[:1].isdigit():
        return BEFORE_NUMBERS[lower]
    if lower in BEFORE_NAMES and capital:
        if behind[:1].isupper() and not _begins_sentence(behind):
            return BEFORE_NAMES[lower]
        return BEHIND_NAMES.get(lower)
    date = MONTHS_BY_START.get(lower) or DAYS_BY_START.get(lower)
    if date is not None and capital:
        sure = behind[:1].isdigit() or closed[:1] == "," or _month(behind[:3]) is not None
        return date if sure or (behind[:1].islower() and lower not in OTHER_WORDS) else None
    if len(core) == 1 and capital and behind[:1].isupper() and not _begins_sentence(behind):
        return core if not before or _NAME.search(before) or len(before) == 2 else None
    return None


def _ends_too(core: str, behind: str) -> bool:
    return core.lower() in (*OR_ENDS, *BEHIND_NAMES) and behind[:1].isupper() and _begins_sentence(behind)


def _begins_sentence(word: str) -> bool:
    return word.strip(CLOSING).lower() in NO_NAMES


def _month(core: str) -> str | None:
    return MONTHS_BY_START.get(core.lower()) if core[:1].isupper() else None


# --- behind numbers -----------------------------------------------------------------------------------------
def _behind_number(core: str, before: str, behind: str) -> str | None:
    if _NUMBER.search(before) is None:
        return None
    if core.lower() in ("am", "pm") and _HOUR.match(before):
        return " ".join(core.upper())
    if before.isdecimal() and (found := FRACTION.fullmatch(core)) is not None:
        return f"and {fraction(found)}"
    if behind[:1].isdigit():
        if core in _SIGNS:
            return _SIGNS[core]
        if core in _DASHES:
            return "minus" if _value(before) > _value(behind) else "to"
    if (unit := UNIT.fullmatch(core)) is not None:
        one = before.lstrip("-+") == "1" or FRACTION.fullmatch(before) is not None
        return unit_behind(unit, one=one, attached=False)
    return None


def _value(number: str) -> float:
    """Of the digits that it begins with."""
    found = re.match(r"[\d,]+(?:\.\d+)?", number.lstrip("-+"))
    return float(found[0].replace(",", "")) if found is not None and found[0].strip(",") else 0.0


# --- Roman numbers ------------------------------------------------------------------------------------------
def _roman(core: str, closed: str, before: str) -> str | None:
    written, owner = (core[:-2], core[-2:]) if core.endswith("'s") else (core, "")
    found = _ROMAN.fullmatch(written)
    name = before.lower()
    if not written or found is None or _NAME.match(before) is None or name in NO_NAMES:
        return None
    if len(written) == 1 and name not in PARTS:
        sure = name in RULERS and (written != "I" or closed or owner)
        if not sure:
            return None
    value = 10 * len(found[1]) + _ROMAN_ONES.index(found[2])
    return f"the {ordinal(value)}{owner}" if name in RULERS else f"{cardinal(value)}{owner}"
