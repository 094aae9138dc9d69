"""What is written → the words that are said: numbers, abbreviations, signs, addresses."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from model_families.omnistage_nano.addresses import ADDRESS, read_out
from model_families.omnistage_nano.forms import say_digits
from model_families.omnistage_nano.neighbours import CLOSING, OPENING, by_neighbours

SIGNS = {
    "%": "percent", "&": "and", "@": "at", "+": "plus", "=": "equals", "°": "degrees", "×": "times",
    "÷": "divided by", "§§": "sections", "§": "section", "±": "plus or minus", "≈": "about", "~": "about",
    "≤": "at most", "≥": "at least", "≠": "is not", "∞": "infinity", "√": "the square root of", "π": "pi",
    "€": "euros", "£": "pounds", "¥": "yen", "¢": "cents", "₹": "rupees", "--": ",",
}  # fmt: skip
PLAIN = str.maketrans("‘’“”′″‐‑–−", "''\"\"'\"----") | str.maketrans({
    "—": "--", "™": "", "²": "^2", "³": "^3", "¼": " 1/4", "½": " 1/2", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3",
})  # fmt: skip
_MIXED = re.compile(r"(?<=\d)(?=[¼½¾⅓⅔])")
MARK_OF = {";": ",", ":": ",", "(": ",", ")": ","}

_RAISED = re.compile("[⁺⁻]?[⁰¹⁴⁵⁶⁷⁸⁹]+|⁻[²³]")
_SIGN = re.compile("|".join(map(re.escape, sorted(SIGNS, key=len, reverse=True))))
_PARTS = re.compile(rf"([{re.escape(OPENING)}]*)(.*?)([{re.escape(CLOSING)}]*)", re.DOTALL)
_ACRONYMS = re.compile(r"\b([A-Z]{1,3})&([A-Z]{1,3})\b")
_COMPARED = re.compile(r"([<>])(?=[\d$])")
_SHARP = re.compile(r"(?<=\b[CF])#")
_DOTS = re.compile(r"(?<=[A-Za-z0-9])\.(?=[A-Za-z0-9])")
_NEW_SENTENCE = re.compile(r"(?<=[a-z]{2})\.(?=[A-Z][a-z])")  # a blank was forgotten
_INITIALS = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]")
_TOKENS = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*'?|[,.;:?!()-]")


def say(written: str, before: str = "", behind: str = "") -> Iterator[str]:
    """Of what stands between blanks: words of letters and apostrophes, and the marks `,.?!`.

    `before`, `behind`: what stands before and behind it in its line, where that is known
    (`neighbours.waits` tells what is read by what stands behind).
    """
    opened, core, closed = _parts(_plain(written))
    if core in ("a", "A") and _is_article(core, closed, before):
        yield "a"
        yield from _tokens(closed)
        return
    if (words := by_neighbours(core, closed, before, behind)) is not None:
        yield from _tokens(f"{opened}{words[0]}{words[1]}")
        return
    if (address := ADDRESS.fullmatch(core)) is not None:
        core = read_out(address)
    for part in _spelled_out(f"{opened}{core}{closed}").split():
        yield from _say_part(part)


def _is_article(core: str, closed: str, before: str) -> bool:
    """Rather than a letter's name."""
    if core == "a":
        return closed[:1] != ")"
    return not closed.strip("\"'*_") and before[-1:] in ("", *".!?:\"'")


def _plain(written: str) -> str:
    """In signs that the rules know, without accents."""
    written = _MIXED.sub(" and", written)
    raised = _RAISED.sub(lambda found: f"^{unicodedata.normalize('NFKC', found[0])}", written)
    plain = unicodedata.normalize("NFKC", raised.translate(PLAIN)).translate(PLAIN)
    return "".join(c for c in unicodedata.normalize("NFD", plain) if not unicodedata.combining(c))


def _parts(plain: str) -> tuple[str, str, str]:
    """What opens, what stands between, and what closes."""
    if plain == "*":
        return "", plain, ""
    found = _PARTS.fullmatch(plain)
    assert found is not None, "it matches anything"
    return found[1], found[2], found[3]


def _spelled_out(plain: str) -> str:
    """Without digits and signs."""
    plain = _ACRONYMS.sub(lambda found: " ".join([*found[1], "and", *found[2]]), plain)
    plain = _COMPARED.sub(lambda found: " less than " if found[1] == "<" else " more than ", plain)
    plain = _SHARP.sub(" sharp", plain)
    plain = say_digits(plain)
    plain = _SIGN.sub(lambda found: f" {SIGNS[found[0]]} ", plain)
    return _NEW_SENTENCE.sub(". ", plain)


def _say_part(part: str) -> Iterator[str]:
    _, core, closed = _parts(part)
    if _INITIALS.fullmatch(core):
        yield from core.replace(".", "").upper()
        yield from _tokens(closed.removeprefix("."))
    else:
        yield from _tokens(_DOTS.sub(" dot ", part))


def _tokens(text: str) -> Iterator[str]:
    """A letter that stands alone has its name."""
    for found in _TOKENS.findall(text):
        if found[0].isalpha():
            yield found.upper() if len(found) == 1 else found
        elif found != "-":
            yield MARK_OF.get(found, found)
