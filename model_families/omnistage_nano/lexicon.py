"""From letters that may have been heard to the words that are likeliest to have been said.

The ears write by ear ("at wis the woast of tims"); a list of English words knows how those are spelled, and
a table of pairs, where there is one, which words follow which.
Prefix beam search over connectionist temporal classification with words (Hannun et al. 2014): the chance of
all ways to hear a text, times that of its words. Shapes: R rows, L letters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, log, log1p

import numpy as np
import numpy.typing as npt

from model_families.omnistage_nano.letters import LETTERS, NUM_LETTERS

NONE = 0
MAX_KNOWN_BEGINNINGS = 1 << 16  # noise begins words without end
MAX_KNOWN_PREVIOUS = 1 << 9  # words whose followers are kept as they are looked up
IN_WORDS = frozenset("'abcdefghijklmnopqrstuvwxyz")
SENTENCE_ENDS = frozenset(".?!")
PAIRED = 0.5  # of a word's chance: how much the word before it decides

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    """How much words count beside letters, in nats."""

    words: float = 0.7  # times the logarithm of a word's chance
    word: float = 3.0  # for every word: else few long ones were preferred
    unknown: float = -4.0  # for a word that is in no list
    unknown_letter: float = -1.0  # and for every letter of it
    beam: int = 32
    unlikely: float = -8.0  # letters below are passed over
    letters: int = 12  # of a row, the likeliest: noise could be any
    certain: float = -0.002  # no letter, and nothing else comes into question


ALONE, WITH_PAIRS = Weights(), Weights(words=0.6, word=2.0)  # a word that is expected costs less by itself


@dataclass(frozen=True, slots=True)
class Following:
    """What comes behind one word. Logarithms of chances, mixed with those of the words alone."""

    whole: Mapping[str, float]
    begun: Mapping[str, float]  # by all beginnings of those words: the likeliest's
    others: float  # what is left for the words that are not listed here, times their chances alone


class Lexicon:
    """Words in lower case, the commonest first, and of some the likeliest followers.

    P(word | previous) = PAIRED * P_pair + (1 - PAIRED * sum of that row's P_pair) * P_word: what a row of
    pairs does not list is shared out as if no word came before, so that the chances of all words are 1.
    `pairs`: of a word ("" is the beginning of a sentence) its followers, all of them in the list, with their
    chances; a row's sum is at most 1.
    """

    def __init__(self, words: Sequence[str], pairs: Mapping[str, Mapping[str, float]] | None = None) -> None:
        chances = np.log(1.0 / (np.arange(len(words)) + 50.0))
        chances -= np.log(np.exp(chances).sum())
        order = sorted(range(len(words)), key=words.__getitem__)
        self._words = [words[index] for index in order]
        self._chances = chances[order]
        self._pairs = pairs or {}
        self.begun_alone = lru_cache(MAX_KNOWN_BEGINNINGS)(self._begun_alone)
        self.following = lru_cache(MAX_KNOWN_PREVIOUS)(self._following)

    @property
    def weights(self) -> Weights:
        """Chosen on training sentences."""
        return WITH_PAIRS if self._pairs else ALONE

    def _begun_alone(self, prefix: str) -> float | None:
        low = bisect_left(self._words, prefix)
        high = bisect_left(self._words, prefix + "{", low)  # behind every letter
        return float(self._chances[low:high].max()) if high > low else None

    def after(self, previous: str) -> Following | None:
        """None: nothing is known of what follows it."""
        return self.following(previous) if previous in self._pairs else None

    def _following(self, previous: str) -> Following:
        pairs = self._pairs[previous]
        others = 1 - PAIRED * sum(pairs.values())
        whole: dict[str, float] = {}
        begun: dict[str, float] = {}
        for word, chance in pairs.items():
            alone = self.whole(word)
            assert alone is not None, f"{word!r} is not in the list"
            whole[word] = mixed = log(PAIRED * chance + others * exp(alone))
            for end in range(1, len(word) + 1):
                begun[word[:end]] = max(begun.get(word[:end], -inf), mixed)
        return Following(whole, begun, log(others))

    def begun(self, prefix: str, after: Following | None = None) -> float | None:
        """The logarithm of the chance of the likeliest word that begins so."""
        alone = self.begun_alone(prefix)
        if alone is None or after is None:
            return alone
        others, paired = alone + after.others, after.begun.get(prefix)
        return others if paired is None or paired < others else paired

    def whole(self, word: str, after: Following | None = None) -> float | None:
        if after is not None and word in after.whole:
            return after.whole[word]
        at = bisect_left(self._words, word)
        if at < len(self._words) and self._words[at] == word:
            return float(self._chances[at]) + (0.0 if after is None else after.others)
        return None


@dataclass(slots=True)
class _Heard:
    """A text so far. Chances are logarithms."""

    word: str  # the one that is being spelled
    finished: float  # of the words before it, weighted
    words: float  # of all, the begun one as the likeliest that it can become
    after: Following | None  # what follows the word before it
    unknown: bool = False  # no word begins as this one
    after_none: float = -inf
    after_letter: float = -inf

    @property
    def chance(self) -> float:
        return _add(self.after_none, self.after_letter)


def _add(a: float, b: float) -> float:
    if a < b:
        a, b = b, a
    return a if b == -inf else a + log1p(exp(b - a))


def _may_follow(character: str, last: str) -> bool:
    """Marks stand behind words, a space behind anything but another."""
    if character == " ":
        return last not in ("", " ")
    return character.lower() in IN_WORDS or (last.lower() in IN_WORDS and last != "")


class Speller:
    def __init__(self, lexicon: Lexicon, weights: Weights | None = None) -> None:
        self._lexicon, self._weights = lexicon, weights or lexicon.weights

    def __call__(self, chances_RL: Floats) -> str:
        """Of the logarithms of the letters' chances, of one sound."""
        assert chances_RL.ndim == 2
        assert chances_RL.shape[1] == NUM_LETTERS
        weights = self._weights
        beam = {"": _Heard("", 0.0, 0.0, self._lexicon.after(""), after_none=0.0)}
        for row_L in chances_RL:
            row = row_L.tolist()
            if row[NONE] > weights.certain:
                for heard in beam.values():
                    heard.after_none, heard.after_letter = heard.chance + row[NONE], -inf
                continue
            likeliest = sorted(np.flatnonzero(row_L > weights.unlikely).tolist(), key=row.__getitem__)
            letters = [(letter, row[letter]) for letter in likeliest[-weights.letters :] if letter != NONE]
            beam = self._row(beam, row[NONE], letters)
        best = max(beam.items(), key=lambda item: item[1].chance + self._ended(item[1]))
        return " ".join(best[0].split())

    def _row(
        self, beam: dict[str, _Heard], none: float, letters: list[tuple[int, float]]
    ) -> dict[str, _Heard]:
        grown: dict[str, _Heard] = {}
        for text, heard in beam.items():
            chance = heard.chance
            same = grown.get(text)
            if same is None:
                same = grown[text] = _Heard(
                    heard.word, heard.finished, heard.words, heard.after, heard.unknown
                )
            same.after_none = _add(same.after_none, chance + none)
            last = text[-1:]
            for letter, likely in letters:
                character = LETTERS[letter - 1]
                before = chance
                if character == last:
                    same.after_letter = _add(same.after_letter, heard.after_letter + likely)
                    before = heard.after_none  # said again only behind none
                if before == -inf or not _may_follow(character, last):
                    continue
                longer = grown.get(text + character)
                if longer is None:
                    longer = grown[text + character] = self._spelled(heard, character)
                longer.after_letter = _add(longer.after_letter, before + likely)
        if len(grown) <= self._weights.beam:
            return grown
        kept = sorted(grown.items(), key=lambda item: item[1].chance + item[1].words, reverse=True)
        return dict(kept[: self._weights.beam])

    def _spelled(self, heard: _Heard, character: str) -> _Heard:
        lower = character.lower()
        if lower not in IN_WORDS:  # the word is over
            finished, after = self._ended(heard), heard.after
            if lower in SENTENCE_ENDS:
                after = self._lexicon.after("")
            elif heard.word:
                after = self._lexicon.after(heard.word)
            return _Heard("", finished, finished, after)
        word = heard.word + lower
        begun = None if heard.unknown else self._lexicon.begun(word, heard.after)
        ahead = self._weights.unknown + self._unknown(word) if begun is None else self._known(begun)
        return _Heard(word, heard.finished, heard.finished + ahead, heard.after, unknown=begun is None)

    def _ended(self, heard: _Heard) -> float:
        """Of all words, the last of which has ended here."""
        if not heard.word:
            return heard.finished
        whole = self._lexicon.whole(heard.word, heard.after)
        if whole is None:
            return heard.finished + self._weights.unknown + self._unknown(heard.word)
        return heard.finished + self._known(whole)

    def _known(self, chance: float) -> float:
        return self._weights.words * chance + self._weights.word

    def _unknown(self, word: str) -> float:
        """As a rare word, and the rarer the longer: what runs words together is no word."""
        return self._known(-log(50_000.0)) + self._weights.unknown_letter * len(word)
