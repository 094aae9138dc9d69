"""Speaks the sentences in ever different voices: the one voice of the speech package with another pitch,
another length of the throat, another pace; and the voices of `voices.py`.

`python -m training.hearing.synthesis DIR --worker 0 --workers 6 --tokenizer tokenizer.json` writes until it
is stopped or `--seconds` are over: `N.pcm` (int16, 16 kHz) and `N.jsonl` (text, first sample, count).
`--held-out 200`: that many held-out sentences, as the package says them, in its other voices, and by the
voices that were left out (`--without awb`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hibari import Hibari, dsp
from hibari.tts import ASSETS
from scipy.signal import resample_poly
from tokenizers import Tokenizer

from model_families.default_model.shipped import PACKED, WEIGHTS, read_packed
from model_families.omnistage_nano.ears import HEARD_PAIRS
from training.hearing.sentences import (
    FLITE,
    HEARD_RATE,
    LEFT_OUT,
    PACKAGE,
    PIPER,
    PLAIN,
    SHARES,
    VARIED,
    Chains,
    Said,
)
from training.hearing.voices import Flite, Floats, Piper
from training.speaking.corpus import CorpusFile, Pcm
from training.speaking.sentences import Sentences
from training.speaking.words import load_words

GAIN = 2.0  # the package speaks softly
LONGEST_S, SHORTEST_S = 14.0, 0.4
PLAIN_SHARE = 0.25
Speak = Callable[[str, np.random.Generator], Pcm]


@dataclass(frozen=True)
class Manner:
    """How something is said: factors of pitch, of the throat's resonances, of pace."""

    pitch: float = 1.0
    range: float = 1.0  # of the pitch around its mean
    throat: float = 1.0
    pace: float = 1.0


def draw_manner(random: np.random.Generator) -> Manner:
    if random.random() < PLAIN_SHARE:
        return Manner()
    throat = float(np.exp(random.uniform(np.log(0.82), np.log(1.18))))
    pitch = float(np.exp(random.uniform(np.log(0.5), np.log(1.4)))) * throat**0.5
    return Manner(pitch, float(random.uniform(0.4, 1.5)), throat, float(random.uniform(0.8, 1.35)))


class Voices:
    def __init__(self) -> None:
        self._hibari = Hibari()

    def __call__(self, text: str, manner: Manner, random: np.random.Generator) -> Pcm:
        """At 16 kHz."""
        sounds = [np.zeros(0, np.float32)]
        for phonemes in self._hibari.phonemize(text):
            ids, pace = np.array([self._hibari.ids(phonemes)]), np.array([manner.pace], np.float32)
            parts = [part[0] for part in self._hibari.sess.run(None, {"ids": ids, "speed": pace})]
            sounds.append(dsp.synth(*_in_manner(parts, manner), random))
        return _pcm(resample_poly(np.concatenate(sounds) * GAIN, 2, 3))

    def phonemize(self, text: str) -> Sequence[str]:
        found: Sequence[str] = self._hibari.phonemize(text)
        return found


def _pcm(sound: Floats) -> Pcm:
    pcm: Pcm = (sound.clip(-0.99, 0.99) * 32767).astype(np.int16)
    return pcm


class Speakers:
    """Any of the voices but some, drawn by their shares; each in some manner."""

    def __init__(self, names: Sequence[str]) -> None:
        self.package = Voices()
        self._names = list(names)
        shares = np.array([SHARES[name] for name in names])
        self._shares = shares / shares.sum()
        self._others: dict[str, Flite | Piper] = {name: Flite(name) for name in names if name in FLITE}
        if PIPER in names:
            self._others[PIPER] = Piper(self.package.phonemize)

    def __call__(self, text: str, random: np.random.Generator) -> Pcm:
        name = self._names[int(random.choice(len(self._names), p=self._shares))]
        if name == PACKAGE or _shouts(text):
            return self.package(text, draw_manner(random), random)
        return _pcm(self._others[name](text, random))


def _shouts(text: str) -> bool:
    """Whether it has words of capitals, which not every voice reads alike."""
    return any(len(word) > 1 and word[1:] != word[1:].lower() for word in text.split())


def _in_manner(parts: list[Floats], manner: Manner) -> list[Floats]:
    """Spectra (harmonics, their phase, noise, rest, its phase) [bins, frames] and pitch [frames]."""
    *spectra, pitch = parts
    voiced = pitch > 0
    if voiced.any():
        mean = float(np.log(pitch[voiced].clip(min=40.0)).mean())
        around = np.log(pitch.clip(min=40.0)) - mean
        changed = np.exp(mean + manner.range * around) * manner.pitch
        pitch = np.where(pitch > 40.0, changed.clip(60.0, 420.0), pitch).astype(np.float32)
    if manner.throat == 1.0:
        return [*spectra, pitch]
    bins = len(spectra[0])
    at = np.minimum(np.arange(bins) / manner.throat, bins - 1)
    low = at.astype(int)
    high, part = np.minimum(low + 1, bins - 1), (at - low).astype(np.float32)[:, None]
    sizes = [spectrum[low] * (1 - part) + spectrum[high] * part for spectrum in spectra[:-1]]
    return [*sizes, np.ascontiguousarray(spectra[-1][low]), pitch]  # a phase is not mixed


def open_said(tokenizer: Path) -> Said:
    chains = Chains(read_packed(WEIGHTS / (HEARD_PAIRS + PACKED)))
    return Said(Sentences(load_words(Path(ASSETS), Tokenizer.from_file(str(tokenizer))), seed=1), chains)


def write(folder: Path, worker: int, texts: Iterable[tuple[int, str]], seconds: float, speak: Speak) -> None:
    end_s = time.monotonic() + seconds
    with CorpusFile(folder, worker, with_codes=False) as corpus:
        for number, text in texts:
            if time.monotonic() > end_s:
                return
            pcm = speak(text, np.random.default_rng((worker >= PLAIN, number)))
            if SHORTEST_S <= len(pcm) / HEARD_RATE <= LONGEST_S:
                corpus.add(text, pcm)


def write_held_out(
    folder: Path, texts: list[tuple[int, str]], seconds: float, left_out: Sequence[str]
) -> None:
    package = Voices()
    write(folder, PLAIN, texts, seconds, lambda text, random: package(text, Manner(), random))
    write(folder, VARIED, texts, seconds, lambda text, random: package(text, draw_manner(random), random))
    if left_out:
        write(folder, LEFT_OUT, [one for one in texts if not _shouts(one[1])], seconds, Speakers(left_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--held-out", type=int, default=0)
    parser.add_argument("--without", nargs="*", choices=SHARES, default=[], help="voices to judge by")
    parser.add_argument("--tokenizer", type=Path, required=True)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    said = open_said(given.tokenizer)
    if given.held_out:
        write_held_out(
            given.folder, list(enumerate(said.held_out(given.held_out))), given.seconds, given.without
        )
    else:
        texts = said.training(given.worker, given.workers)
        speakers = Speakers([name for name in SHARES if name not in given.without])
        write(given.folder, given.worker, texts, given.seconds, speakers)


if __name__ == "__main__":
    main()
