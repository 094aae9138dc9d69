"""What the talker's front end knows, out of the speech package: how words sound, and the pieces.

`python -m training.speaking.make_front OUT --tokenizer tokenizer.json` writes OUT/spoken_words.txt.gz and
OUT/spoken_pieces.txt. Which pairs of sounds are pieces, and how long pieces take, is counted in what the
package says of training sentences.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from string import ascii_lowercase

from model_families.omnistage_nano.pieces import (
    BLANK,
    LETTERS,
    MARKS,
    SPOKEN_PIECES,
    STRESSES,
    Pieces,
    write_pieces,
)
from model_families.omnistage_nano.pronouncing import (
    PRIMARY,
    SECONDARY,
    SPOKEN_WORDS,
    VOWELS,
    Dictionary,
    write_words,
)
from training.speaking.pointing import MARK_OF, QUOTES, spell_sentence
from training.speaking.words import read_package

SENTENCES = 2000
CONSONANTS = "bdfhjklmnpstvwzðŋɡɹʃʒʤʧθT"
SOUND_PAIRS, LETTER_PAIRS = 480, 160
LETTER_FRAMES = 0.74
LEADING = 3  # units that remain of the pad at the beginning
UNITS_A_FRAME = 3.2  # of 25 ms
REPLACED = str.maketrans("ɾʔ", "Tt")  # as the package does at last
PUNCTUATION = {*MARK_OF, *QUOTES}
Spoken = tuple[str, list[int]]  # a sentence's sounds; units of each, of a pad before and of one behind


# --- words --------------------------------------------------------------------------------------------------
def listed_words(assets: Path) -> dict[str, str]:
    """Word → sounds. The better of the package's two dictionaries first."""
    found: dict[str, str] = {}
    capital: dict[str, str] = {}
    for name in ("lexicon_us_gold", "lexicon_us_silver"):
        for word, entry in read_package(assets, name).items():
            sounds = entry if isinstance(entry, str) else entry["DEFAULT"]
            if not (word.isascii() and word.replace("'", "").isalpha() and sounds):
                continue
            (found if word.islower() else capital).setdefault(word, sounds.translate(REPLACED))
    for word, sounds in capital.items():
        if len(word) == 1 or word.lower() in found:
            if found.get(word.lower()) != sounds:
                found[word] = sounds
        else:
            found[word.lower()] = sounds
    return found | {"a": "ɐ", "an": "ɐn", "the": "ðə", "to": "tə", "in": "ɪn", "I": "ˌI", "A": "ˈA"}


def underivable(words: Mapping[str, str]) -> dict[str, str]:
    """Without those that the rules make likewise of shorter ones."""
    kept: dict[str, str] = {}
    dictionary = Dictionary(kept)
    for word in sorted(words, key=len):
        if len(word) < 4 or dictionary.sounds(word) != words[word]:
            kept[word] = words[word]
    return kept


# --- pieces -------------------------------------------------------------------------------------------------
def units_of(word: str) -> Iterator[str]:
    """Single sounds, a stress with its vowel."""
    stress = ""
    for sound in word:
        if sound in STRESSES:
            stress = sound
        else:
            yield stress + sound
            stress = ""


def pairs_of(units: list[str]) -> Iterator[str]:
    blanked = [BLANK + units[0], *units[1:]] if units else []
    yield from (a + b for a, b in pairwise(blanked))


def frequent_pieces(spoken: Iterable[Spoken], written: Iterable[str]) -> list[str]:
    """Marks, all single sounds and letters, the commonest pairs of both."""
    vowels = [stress + vowel for vowel in VOWELS for stress in ("", PRIMARY, SECONDARY)]
    single = [*vowels, *CONSONANTS]
    sounds, letters = Counter[str](), Counter[str]()
    for sentence, _ in spoken:
        for word in sentence.split(BLANK):
            sounds.update(
                pairs_of(list(units_of("".join(sound for sound in word if sound not in PUNCTUATION))))
            )
    for word in written:
        letters.update(pair for pair in pairs_of(list(word)) if pair.strip(BLANK).isalpha())
    some = [
        *MARKS,
        *single,
        *(BLANK + sound for sound in single),
        *sorted(pair for pair, _ in sounds.most_common(SOUND_PAIRS)),
    ]
    ones = [*ascii_lowercase, "'"]
    spelled = [
        *ones,
        *(BLANK + one for one in ones),
        *sorted(pair for pair, _ in letters.most_common(LETTER_PAIRS)),
    ]
    return [*some, *(LETTERS + piece for piece in spelled)]


def timed(pieces: list[str], spoken: Iterable[Spoken]) -> list[tuple[str, float]]:
    """With the frames that each takes on the average; a piece not met takes what its sounds do."""
    known = Pieces(tuple(pieces), (0.0,) * len(pieces))
    of_piece: dict[str, list[int]] = {}
    of_sound: dict[str, list[int]] = {}
    for sentence, (_, *later) in spoken:
        units = [LEADING, *later]
        for sound, unit in zip(sentence, units[1:], strict=False):
            of_sound.setdefault(sound, []).append(unit)
        cut = spell_sentence(known, sentence)
        ends = [start for _, start in cut[1:]] + [len(units)]
        for (piece, start), end in zip(cut, ends, strict=True):
            of_piece.setdefault(pieces[piece], []).append(sum(units[start:end]))

    def mean(found: list[int]) -> float:
        return sum(found) / len(found) / UNITS_A_FRAME

    def frames(piece: str) -> float:
        if piece.startswith(LETTERS):
            return LETTER_FRAMES * (len(piece) - 1)
        if len(found := of_piece.get(piece, [])) >= 10:
            return mean(found)
        return sum(mean(of_sound[sound]) for sound in piece if sound in of_sound)

    return [(piece, frames(piece)) for piece in pieces]


def main() -> None:
    from hibari.tts import ASSETS

    from training.speaking.synthesis import Voice, open_sentences

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    given = parser.parse_args()
    words = listed_words(Path(ASSETS))
    kept = underivable(words)
    write_words(given.out / SPOKEN_WORDS, kept)
    voice, sentences = Voice(), open_sentences(given.tokenizer)
    spoken = [one for text in islice(sentences.training(0, 7), SENTENCES) for one in voice.timing(text)]
    pieces = timed(frequent_pieces(spoken, words), spoken)
    write_pieces(given.out / SPOKEN_PIECES, pieces)
    print(f"{len(words)} words, {len(kept)} of them listed; {len(pieces)} pieces in {given.out}")


if __name__ == "__main__":
    main()
