"""Sentences by program: every index is one sentence, and whether it is held out depends on its words
alone."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from random import Random

from training.speaking.vocabulary import (
    CONTRACTIONS,
    DAYS,
    JOINS,
    MODALS,
    MONTHS,
    OPENERS,
    PLACES,
    PREPOSITIONS,
    SMALL_TALK,
    SUBJECTS,
    VERBS,
    past,
    third,
)
from training.speaking.words import Words

HELD_OUT = 64  # one sentence in so many


class Sentences:
    """`sentence(index)` is the same for ever. Sentences have 1 to about 22 words."""

    def __init__(self, words: Words, seed: int = 0) -> None:
        self._words = words
        self._seed = seed
        kinds = (
            (self._statement, 26), (self._question, 10), (self._with_number, 13), (self._fact, 12),
            (self._compound, 13), (self._list, 6), (self._salad, 16), (self._small_talk, 1), (self._short, 3),
        )  # fmt: skip
        self._kinds = [kind for kind, _ in kinds]
        self._weights = [weight for _, weight in kinds]

    def sentence(self, index: int) -> str:
        return self._drawn(index)[0]

    def _drawn(self, index: int) -> tuple[str, bool]:
        """And whether its words are a sentence's, not a row of any."""
        random = Random(f"{self._seed}:{index}")
        kind = random.choices(self._kinds, self._weights)[0]
        text = kind(random)
        return text[0].upper() + text[1:], kind != self._salad

    def training(self, first: int, step: int) -> Iterator[str]:
        index = first
        while True:
            if not is_held_out(text := self.sentence(index)):
                yield text
            index += step

    def held_out(
        self, count: int, min_words: int = 3, max_words: int = 20, *, grammatical: bool | None = None
    ) -> list[str]:
        """The first so many. `grammatical`: sentences alone (numbers, dates and lists among them), or rows of
        words without grammar alone; None: as they come, about one of seven such a row."""
        found: list[str] = []
        index = 0
        while len(found) < count:
            text, is_sentence = self._drawn(index)
            fits = grammatical is None or grammatical == is_sentence
            if (
                fits
                and is_held_out(text)
                and min_words <= len(text.split()) <= max_words
                and text not in found
            ):
                found.append(text)
            index += 1
        return found

    # --- words ----------------------------------------------------------------------------------------------
    def _pick(self, random: Random, words: tuple[str, ...]) -> str:
        """Common words more often: half of the draws fall into the first quarter."""
        return words[int(len(words) * random.random() ** random.choice((1.0, 2.0, 3.0)))]

    def _noun(self, random: Random) -> str:
        if random.random() < 0.08:
            return random.choice(self._words.rare)
        return self._pick(random, self._words.nouns)

    def _noun_phrase(self, random: Random) -> str:
        words = self._words
        form = random.random()
        adjective = self._pick(random, words.adjectives)
        noun, plural = self._noun(random), self._pick(random, words.plurals)
        article = random.choice(
            ("the", "the", "the", "this", "that", "my", "your", "her", "his", "our", "their")
        )
        if form < 0.3:
            return f"{article} {noun}"
        if form < 0.45:
            return f"{article} {adjective} {noun}"
        if form < 0.55:
            return f"{_a(adjective)} {noun}"
        if form < 0.63:
            return _a(noun)
        if form < 0.72:
            return f"{article} {adjective} {plural}"
        if form < 0.8:
            return f"{random.choice(('some', 'many', 'these', 'those', 'few', 'all', 'most'))} {plural}"
        if form < 0.9:
            return self._pick(random, words.names)
        return f"{article} {noun} of {article} {self._noun(random)}"

    def _place_phrase(self, random: Random) -> str:
        return f"{random.choice(PREPOSITIONS)} {self._noun_phrase(random)}"

    # --- kinds ----------------------------------------------------------------------------------------------
    def _clause(self, random: Random) -> str:
        verb = random.choice(VERBS)
        subject = random.choice(SUBJECTS) if random.random() < 0.45 else self._noun_phrase(random)
        adjective = self._pick(random, self._words.adjectives)
        form = random.random()
        if form < 0.35:
            action = past(verb)
        elif form < 0.5:
            action = f"{random.choice(MODALS)} {verb}"
        elif form < 0.7:
            action = verb if subject in ("I", "you", "we", "they") else third(verb)
        elif form < 0.8:
            be = {"I": "am", "you": "are", "we": "are", "they": "are"}.get(subject, "is")
            action = f"{be} {self._pick(random, self._words.actions)}"
        elif form < 0.9:
            be = {"I": "was", "he": "was", "she": "was", "it": "was"}.get(subject, "were")
            return f"{subject} {be} {random.choice(('very ', '', 'not ', 'so '))}{adjective}"
        else:
            return f"{random.choice(CONTRACTIONS)} {adjective} {self._place_phrase(random)}"
        parts = [subject, action]
        if random.random() < 0.8:
            parts.append(self._noun_phrase(random))
        if random.random() < 0.4:
            parts.append(self._place_phrase(random))
        if random.random() < 0.2:
            parts.append(self._pick(random, self._words.adverbs))
        return " ".join(parts)

    def _statement(self, random: Random) -> str:
        opener = random.choice(OPENERS) if random.random() < 0.15 else ""
        return f"{opener}{self._clause(random)}{random.choice('......!')}"

    def _compound(self, random: Random) -> str:
        comma = random.choice((",", ""))
        return f"{self._clause(random)}{comma} {random.choice(JOINS)} {self._clause(random)}."

    def _question(self, random: Random) -> str:
        noun, verb = self._noun_phrase(random), random.choice(VERBS)
        who = random.choice(("you", "they", "we", noun))
        return random.choice(
            (
                f"What is {noun}?",
                f"Where is {noun}?",
                f"Who {past(verb)} {noun}?",
                f"Why did {who} {verb} {self._noun_phrase(random)}?",
                f"How do you {verb} {noun}?",
                f"Can you {verb} {noun} {self._place_phrase(random)}?",
                f"Is {noun} {self._pick(random, self._words.adjectives)}?",
                f"Do you like {self._pick(random, self._words.plurals)}?",
                f"How many {self._pick(random, self._words.plurals)} are there {self._place_phrase(random)}?",
                f"When will {who} {verb} {self._noun_phrase(random)}?",
                f"Which {self._noun(random)} is {self._pick(random, self._words.adjectives)}?",
                f"Could you tell me about {noun}?",
            )
        )

    def _with_number(self, random: Random) -> str:
        number = _number(random)
        plural, noun = self._pick(random, self._words.plurals), self._noun_phrase(random)
        counted = ", ".join(str(random.randint(0, 99)) for _ in range(random.randint(2, 6)))
        return random.choice(
            (
                f"There are {number} {plural} {self._place_phrase(random)}.",
                f"{noun} costs {random.randint(2, 99)} dollars.",
                f"The answer is {number}.",
                f"We {past(random.choice(VERBS))} {number} {plural}.",
                f"Meet me at {random.randint(1, 12)} o'clock on {random.choice(DAYS)}.",
                f"It is {random.randint(1, 12)}:{random.randint(10, 59)} now.",
                f"My birthday is {random.choice(MONTHS)} {random.randint(1, 28)}.",
                f"In {random.randint(1700, 2029)}, {self._clause(random)}.",
                f"{random.randint(0, 20)} plus {random.randint(0, 20)} is {random.randint(0, 40)}.",
                f"About {random.randint(1, 99)} percent of {plural} {random.choice(VERBS)} {noun}.",
                f"Page {random.randint(1, 400)} is about {noun}.",
                f"She is {random.randint(1, 99)} years old.",
                f"On {random.choice(DAYS)}, {random.choice(MONTHS)} {random.randint(1, 28)}, {noun} arrived.",
                f"Count with me: {counted}.",
            )
        )

    def _fact(self, random: Random) -> str:
        words = self._words
        noun, name = self._noun(random), self._pick(random, words.names)
        adjective, verb, phrase = (
            self._pick(random, words.adjectives),
            random.choice(VERBS),
            self._noun_phrase(random),
        )
        return random.choice(
            (
                f"The {noun} of {name} is {self._pick(random, words.names)}.",
                f"The capital of {name} is {self._pick(random, words.names)}.",
                f"{name} is {_a(adjective)} {random.choice(PLACES)} in {self._pick(random, words.names)}.",
                f"{_a(noun)} is {_a(adjective)} {self._noun(random)} that {third(verb)} {phrase}.",
                f"The most {adjective} {noun} is {self._noun_phrase(random)}.",
                f"{name} {past(verb)} {phrase} in {self._pick(random, words.names)}.",
                f"{self._pick(random, words.plurals)} are {adjective} {self._pick(random, words.plurals)}.",
                f"There is {_a(adjective)} {noun} {self._place_phrase(random)}.",
                f"{self._pick(random, words.actions)} {self._noun_phrase(random)} is {adjective}.",
            )
        )

    def _list(self, random: Random) -> str:
        kinds = (self._words.plurals, self._words.nouns, self._words.adjectives, self._words.names)
        kind = random.choice(kinds)
        items = [self._pick(random, kind) for _ in range(random.randint(2, 5))]
        lead = random.choice(
            ("I like", "We need", "Please bring", "She sells", "It has", "They are", "You can see")
        )
        return f"{lead} {', '.join(items)}, and {self._pick(random, kind)}."

    def _salad(self, random: Random) -> str:
        """Every word as often as any other, so that all of them are heard."""
        pool = self._words.common
        words = [
            random.choice(self._words.rare) if random.random() < 0.15 else random.choice(pool)
            for _ in range(random.randint(2, 14))
        ]
        join = random.choice((" ", " ", ", "))
        return join.join(words) + random.choice((".", ".", "?", "!"))

    def _small_talk(self, random: Random) -> str:
        return random.choice(SMALL_TALK)

    def _short(self, random: Random) -> str:
        one = self._pick(random, self._words.common)
        return random.choice((f"{one}.", f"{self._noun_phrase(random)}.", f"{one}?", _number(random) + "."))


def is_held_out(text: str) -> bool:
    """Depends on the letters alone, so no training sentence differs from a held-out one by a mark or a
    capital."""
    letters = "".join(c for c in text.lower() if c.isalnum() or c == " ")
    return blake2b(letters.encode(), digest_size=4).digest()[0] % HELD_OUT == 0


def _a(word: str) -> str:
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def _number(random: Random) -> str:
    top = random.choice((10, 20, 100, 100, 1000, 10_000, 1_000_000))
    value = random.randint(0, top)
    return random.choice((str(value), str(value), f"{value:,}"))
