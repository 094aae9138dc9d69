"""What is said to the ears: the speaking half's sentences and spoken questions, in letters alone.

Held out by the same rule as the speaking half's: by the letters of the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

from model_families.omnistage_nano.letters import LETTERS
from training.speaking.judge_words import number_words
from training.speaking.sentences import Sentences, is_held_out

HEARD_RATE = 16_000
PLAIN, VARIED = 1000, 1001  # the corpus's files of held-out sentences; those of workers count from 0
QUESTION_SHARE = 0.12
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


class Said:
    """`text(index)` is the same for ever."""

    def __init__(self, sentences: Sentences) -> None:
        self._sentences = sentences

    def text(self, index: int) -> str:
        random = Random(f"said {index}")
        asked = random.random() < QUESTION_SHARE
        text = letters_only(question(random) if asked else self._sentences.sentence(index))
        return text[0].upper() + text[1:]

    def training(self, first: int, step: int) -> Iterator[tuple[int, str]]:
        index = first
        while True:
            if not is_held_out(text := self.text(index)):
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
