"""Units of measurement as they are written, in words: "km/h" → "kilometers per hour"."""

from __future__ import annotations

import re

from model_families.omnistage_nano.numbers import plural

# As they are written: one letter, or what another case makes another unit.
_EXACT = {
    "m": "meter", "g": "gram", "s": "second", "h": "hour", "l": "liter", "L": "liter", "W": "watt",
    "V": "volt", "J": "joule", "MW": "megawatt", "mW": "milliwatt", "Mb": "megabit", "Gb": "gigabit",
}  # fmt: skip
_ANY_CASE = {
    "km": "kilometer", "cm": "centimeter", "mm": "millimeter", "nm": "nanometer", "ft": "foot", "mi": "mile",
    "yd": "yard", "kg": "kilogram", "mg": "milligram", "lb": "pound", "lbs": "pound", "oz": "ounce",
    "ml": "milliliter", "dl": "deciliter", "cl": "centiliter", "kb": "kilobyte", "mb": "megabyte",
    "gb": "gigabyte", "tb": "terabyte", "hz": "hertz", "khz": "kilohertz", "mhz": "megahertz",
    "ghz": "gigahertz", "kw": "kilowatt", "gw": "gigawatt", "wh": "watt hour", "kwh": "kilowatt hour",
    "kj": "kilojoule", "cal": "calorie", "kcal": "kilocalorie", "db": "decibel", "px": "pixel",
    "ms": "millisecond", "ns": "nanosecond", "sec": "second", "secs": "second", "min": "minute",
    "mins": "minute", "hr": "hour", "hrs": "hour", "ha": "hectare", "deg": "degree",
}  # fmt: skip
# Written as one, said as two with "per" between.
_RATES = {
    "mph": ("mile", "hour"), "kph": ("kilometer", "hour"), "kmh": ("kilometer", "hour"),
    "fps": ("frame", "second"), "rpm": ("revolution", "minute"), "kbps": ("kilobit", "second"),
    "mbps": ("megabit", "second"), "gbps": ("gigabit", "second"), "mpg": ("mile", "gallon"),
}  # fmt: skip
# Without a blank behind the number alone: by themselves they are other words.
_ATTACHED = {"in": "inch"}
# What no English word looks like, with or without a number before it.
_ALWAYS = ("km", "cm", "mm", "kg", "mg", "ml", "kwh", "khz", "mhz", "ghz", "mph", "kph")
_SPANS = {
    **{"month": "month", "mo": "month", "year": "year", "yr": "year", "week": "week", "wk": "week"},
    **{"day": "day", "hour": "hour", "minute": "minute", "second": "second", "night": "night"},
    **{"person": "person", "unit": "unit", "gal": "gallon"},
}
_SQUARED, _CUBED = "2", "3"

_NAMES = "|".join(sorted((*_EXACT, *_ANY_CASE, *_RATES, *_ATTACHED), key=len, reverse=True))
_PER = "|".join(sorted((*_EXACT, *_ANY_CASE, *_SPANS), key=len, reverse=True))
PER = re.compile(rf"/(?P<per>{_PER})(?:\^?(?P<per_power>[23]))?(?!\w)", re.IGNORECASE)
UNIT = re.compile(rf"(?P<unit>{_NAMES})(?:\^?(?P<power>[23]))?(?:{PER.pattern})?(?!\w)", re.IGNORECASE)


def unit_behind(found: re.Match[str], *, one: bool, attached: bool) -> str | None:
    """Of a match of UNIT behind a number. `attached`: without a blank between. None: no unit."""
    name = found["unit"]
    single = _EXACT.get(name) or _ANY_CASE.get(name.lower())
    if single is None and attached:
        single = _ATTACHED.get(name)
    per = _RATES.get(name.lower())
    if single is None and per is None:
        return None
    if per is not None:
        single, over = per
        return f"{single if one else plural(single)} per {over}"
    assert single is not None
    if found["power"] is not None:
        if not single.endswith(("meter", "foot", "mile", "inch", "yard")):
            return None
        single = f"{'square' if found['power'] == _SQUARED else 'cubic'} {single}"
    words = single if one else plural(single)
    return f"{words} {per_words(found)}" if found["per"] else words


def unit_alone(written: str) -> str | None:
    """Of what stands by itself, without a number before it."""
    found = UNIT.fullmatch(written)
    if found is None or not (found["unit"].lower() in _ALWAYS or (found["per"] and len(written) > 2)):
        return None
    return unit_behind(found, one=False, attached=False)


def per_words(found: re.Match[str]) -> str:
    """Of a match of PER."""
    name, power = found["per"], found["per_power"]
    unit = _EXACT.get(name) or _ANY_CASE.get(name.lower()) or _SPANS.get(name.lower())
    if unit is None:  # a letter of the other case
        return f"per {name}"
    if power is None:
        return f"per {unit}"
    if unit == "second":
        return f"per second {'squared' if power == _SQUARED else 'cubed'}"
    return f"per {'square' if power == _SQUARED else 'cubic'} {unit}"
