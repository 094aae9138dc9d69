"""What is said to the ears: the speaking half's sentences and spoken questions, in letters alone.

Held out by the same rule as the speaking half's: by the letters of the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import exp
from random import Random

from model_families.omnistage_nano.letters import LETTERS
from training.speaking.judge_words import number_words
from training.speaking.sentences import Sentences, is_held_out

HEARD_RATE = 16_000
# The corpus's files of held-out sentences; those of workers count from 0.
PLAIN, VARIED, LEFT_OUT = 1000, 1001, 1002
# Who says them, and of how many: the speech package, the voices of `voices.py`.
PACKAGE, PIPER, FLITE = "package", "joe", ("awb", "rms", "slt", "kal16")
SHARES = {PACKAGE: 0.34, PIPER: 0.22, **dict(zip(FLITE, (0.13, 0.13, 0.13, 0.05), strict=True))}
QUESTION_SHARE = 0.12
CHAINED_SHARE = 0.3  # of training sentences
CAPITALS = (
    *("France", "Spain", "Italy", "Germany", "England", "Japan", "China", "India", "Egypt", "Russia"),
    *("Canada", "Mexico", "Brazil", "Greece", "Norway", "Sweden", "Poland", "Ireland", "Turkey", "Cuba"),
)
THINGS = (
    *("the sky", "grass", "snow", "a banana", "a lemon", "the sun", "coal", "blood", "milk", "the sea"),
    *("an orange", "a carrot", "chocolate", "a tomato", "a cloud", "a leaf", "gold", "ice"),
)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "twenty")
ANIMALS = ("dog", "cat", "cow", "horse", "bird", "fish", "sheep", "lion", "duck", "pig", "bee", "frog")
OPPOSITES = ("hot", "big", "fast", "up", "good", "day", "old", "wet", "light", "open", "early", "happy")
ASKED = ("what", "who", "how", "where", "why", "when", "which")  # with these a question begins
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def letters_only(text: str) -> str:
    """Numbers as words; marks that have no letter fall away."""
    text = re.sub(r"(\d),(?=\d{3})", r"\1", text)
    text = re.sub(r"(?<=\d):(?=\d)", " ", text)
    text = re.sub(r"\d+", lambda found: number_words(found[0]), text)
    kept = "".join(character if character in LETTERS else " " for character in text)
    return re.sub(r" (?=[.,?!])", "", " ".join(kept.split()))


def question(random: Random) -> str:
    one, other = random.choice(NUMBERS), random.choice(NUMBERS)
    animal = random.choice(ANIMALS)
    article = "an" if animal[0] in "aeiou" else "a"
    return random.choice(
        (
            f"What is the capital of {random.choice(CAPITALS)}?",
            f"Which city is the capital of {random.choice(CAPITALS)}?",
            f"Where is {random.choice(CAPITALS)}?",
            f"What color is {random.choice(THINGS)}?",
            f"What is the color of {random.choice(THINGS)}?",
            f"What is {one} plus {other}?",
            f"How much is {one} and {other}?",
            f"What is {one} minus {other}?",
            f"What is {one} times {other}?",
            f"What does {article} {animal} eat?",
            f"How many legs does {article} {animal} have?",
            f"What is the opposite of {random.choice(OPPOSITES)}?",
            f"What day comes after {random.choice(DAYS)}?",
            f"What day comes before {random.choice(DAYS)}?",
            f"Tell me about {random.choice(CAPITALS)}.",
            f"Repeat this: {random.choice(THINGS)}.",
        )
    )


class Chains:
    """Common words in the order in which they are common: what is said mostly, and said fast.

    `pairs`: as the ears' table of which words follow which is stored (`omnistage_nano/ears.py`).
    """

    def __init__(self, pairs: str) -> None:
        self._followers: dict[str, tuple[list[str], list[float]]] = {}
        for line in pairs.splitlines():
            word, *rest = line.split(" ")
            self._followers[word] = (rest[::2], [exp(-int(tenths) / 10) for tenths in rest[1::2]])

    def sentence(self, random: Random) -> str:
        """3 to 16 words; fewer where nothing is known to follow."""
        count, words = random.randint(3, 16), [""]
        while len(words) <= count and words[-1] in self._followers:
            followers, chances = self._followers[words[-1]]
            words.append(random.choices(followers, chances)[0])
        said = " ".join(
            "I" + word[1:] if word == "i" or word.startswith("i'") else word for word in words[1:]
        )
        if random.random() < 0.2:
            said = said.replace(" and ", ", and ").replace(" but ", ", but ")
        return said[0].upper() + said[1:] + ("?" if words[1] in ASKED else ".")


class Said:
    """`text(index)` is the same for ever, and so is what is held out, with chains or without."""

    def __init__(self, sentences: Sentences, chains: Chains | None = None) -> None:
        self._sentences = sentences
        self._chains = chains

    def text(self, index: int) -> str:
        random = Random(f"said {index}")
        asked = random.random() < QUESTION_SHARE
        text = letters_only(question(random) if asked else self._sentences.sentence(index))
        return text[0].upper() + text[1:]

    def training(self, first: int, step: int) -> Iterator[tuple[int, str]]:
        index = first
        while True:
            random = Random(f"chained {index}")
            chained = self._chains is not None and random.random() < CHAINED_SHARE
            text = self._chains.sentence(random) if self._chains is not None and chained else self.text(index)
            if not is_held_out(text):
                yield index, text
            index += step

    def held_out(self, count: int) -> list[str]:
        found: list[str] = []
        index = 0
        while len(found) < count:
            text = self.text(index)
            if is_held_out(text) and 3 <= len(text.split()) <= 20 and text not in found:
                found.append(text)
            index += 1
        return found
