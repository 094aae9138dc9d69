"""How words sound: a dictionary, and rules for the forms of its words that it does not list.

Sounds are written as the speech package that the talker learned from writes them: a character a sound,
`ˈ` and `ˌ` before a vowel that is stressed.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

SPOKEN_WORDS = "spoken_words.txt.gz"
PRIMARY, SECONDARY = "ˈ", "ˌ"
VOWELS = "AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻɐᵊ"
FLAP, FLAPPED_AFTER = "T", "AIOWYiuæɑəɛɪɹʊʌ"
HISSES, VOICELESS = "szʃʒʧʤ", "ptkfθ"
LEAST_PART = 3  # letters, of a word put together of two
MOST_INITIALS = 5
LONGEST = 28  # letters, of a word that is made of others
VOWEL_LETTERS = "aeiouy"
# Words to which a capital gives no weak stress. The talker never heard "the" with one, and said "this".
WITH_CAPITAL = {"an": "ɐn", "in": "ɪn", "that": "ðˈæt", "the": "ðə", "to": "tə"}


class Dictionary:
    """Of words in lower case, with a capital only where that is another word."""

    def __init__(self, sounds: Mapping[str, str]) -> None:
        self._sounds = sounds

    def __contains__(self, word: str) -> bool:
        return self._listed(word) is not None

    def sounds(self, word: str) -> str | None:
        """Of a word of letters and apostrophes; None for what is in no way known."""
        found = self._listed(word)
        if found is None and word.isupper() and 1 < len(word) <= MOST_INITIALS:
            found = self._form(word.lower()) or self._initials(word)
        if found is None and word[:-1].isupper() and word[-1] == "s" and 2 < len(word) <= 1 + MOST_INITIALS:
            found = _s(self._initials(word[:-1]))
        if found is None and len(word) <= LONGEST:
            found = self._derived(word.lower())
        if found is not None and word[:1].isupper() and word != "I":
            found = WITH_CAPITAL.get(word.lower()) or _at_least_weak(found)
        return found

    def _listed(self, word: str) -> str | None:
        return self._sounds.get(word) or self._sounds.get(word.lower())

    def _initials(self, word: str) -> str | None:
        """Letter by letter, the last one stressed."""
        named = [self._listed(letter) for letter in word]
        if None in named:
            return None
        *before, last = [name or "" for name in named]
        return "".join([*(name.replace(PRIMARY, SECONDARY) for name in before), last])

    def _derived(self, word: str) -> str | None:
        return self._form(word) or self._compound(word)

    def _known(self, word: str) -> str | None:
        return self._listed(word) or self._derived(word)

    # --- forms ----------------------------------------------------------------------------------------------
    def _form(self, word: str) -> str | None:
        if word.endswith("'"):
            return self._known(word[:-1])
        if word.endswith("'s"):
            return _s(self._known(word[:-2]))
        return self._with_s(word) or self._with_ed(word) or self._with_ing(word) or self._with_more(word)

    def _with_s(self, word: str) -> str | None:
        if not word.endswith("s") or word.endswith("ss") or len(word) < 3:
            return None
        stems = [word[:-1]]
        if word.endswith("ies"):
            stems.append(word[:-3] + "y")
        elif word.endswith("es"):
            stems.append(word[:-2])
        return _s(self._first(stems))

    def _with_ed(self, word: str) -> str | None:
        if not word.endswith("ed") or len(word) < 4:
            return None
        stem = word[:-2]
        return _ed(
            self._first([*([word[:-3] + "y"] if stem.endswith("i") else [stem]), word[:-1], *_halved(stem)])
        )

    def _with_ing(self, word: str) -> str | None:
        if word.endswith("in'"):
            word = word[:-1] + "g"
        if not word.endswith("ing") or len(word) < 5:
            return None
        stem = word[:-3]
        found = self._first([stem, stem + "e", *_halved(stem)])
        return None if found is None else _before_vowel(found) + "ɪŋ"

    def _with_more(self, word: str) -> str | None:
        """-ly, -ness, -less, -er, un-, re-, non-."""
        for ending, sounds in (
            ("ly", "li"),
            ("ness", "nəs"),
            ("less", "ləs"),
            ("ful", "fᵊl"),
            ("like", "lˌIk"),
        ):
            if word.endswith(ending) and (found := self._first([word.removesuffix(ending)])):
                return found.removesuffix("l") + sounds if ending == "ly" else found + sounds
        if word.endswith("er") and len(word) > 4:
            stem = word[:-2]
            if found := self._first([stem, word[:-1], *_halved(stem)]):
                return _before_vowel(found) + "əɹ"
        for start, sounds in (
            ("un", "ˌʌn"),
            ("re", "ɹˌi"),
            ("non", "nˌɑn"),
            ("mis", "mˌɪs"),
            ("over", "ˌOvəɹ"),
        ):
            if word.startswith(start) and (found := self._first([word.removeprefix(start)])):
                return sounds + found
        return None

    def _first(self, stems: list[str]) -> str | None:
        """What is listed, and only then what other rules make."""
        some = [stem for stem in stems if len(stem) > 1]
        listed = next((found for stem in some if (found := self._listed(stem))), None)
        return listed or next((found for stem in some if (found := self._derived(stem))), None)

    def _compound(self, word: str) -> str | None:
        """Two words, of which the first is as long as can be."""
        for cut in range(len(word) - LEAST_PART, LEAST_PART - 1, -1):
            first, second = self._listed(word[:cut]), self._listed(word[cut:])
            if first is not None and second is not None:
                return first + second.replace(PRIMARY, SECONDARY)
        return None


def _halved(stem: str) -> list[str]:
    """ "stopp" → "stop"."""
    doubled = len(stem) > 2 and stem[-1] == stem[-2] and stem[-1] not in VOWEL_LETTERS
    return [stem[:-1]] if doubled else []


def _s(stem: str | None) -> str | None:
    if stem is None:
        return None
    return stem + ("ᵻz" if stem[-1] in HISSES else "s" if stem[-1] in VOICELESS else "z")


def _ed(stem: str | None) -> str | None:
    if stem is None:
        return None
    if stem[-1] in "td":
        return _before_vowel(stem) + "ᵻd"
    return stem + ("t" if stem[-1] in VOICELESS + "sʃʧ" else "d")


def _before_vowel(stem: str) -> str:
    """Between vowels a t is flapped."""
    return stem[:-1] + FLAP if stem[-1] == "t" and stem[-2:-1] in tuple(FLAPPED_AFTER) else stem


def begins_with_vowel(sounds: str) -> bool:
    return sounds.lstrip(PRIMARY + SECONDARY)[:1] in tuple(VOWELS)


def _at_least_weak(sounds: str) -> str:
    """A word with a capital has some stress."""
    if PRIMARY in sounds or SECONDARY in sounds:
        return sounds
    at = next((index for index, sound in enumerate(sounds) if sound in VOWELS), None)
    return sounds if at is None else sounds[:at] + SECONDARY + sounds[at:]


def read_words(path: Path) -> Dictionary:
    """A line is a word, a tab, its sounds."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return Dictionary(dict(line.rstrip("\n").split("\t") for line in file))


def write_words(path: Path, sounds: Mapping[str, str]) -> None:
    text = "".join(f"{word}\t{sounds[word]}\n" for word in sorted(sounds))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
