"""A corpus of speech as workers of a `synthesis` write it, and as it is read while it grows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.speaking.phonetics import FRAME, Codes
from training.speaking.sizes import NANO, SAMPLE_RATE

Pcm = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Words:
    """The sounds of each sentence, and the letters of each of their words ("" where they are not known)."""

    sentences: list[str]
    letters: list[str]


@dataclass(frozen=True)
class Utterance:
    text: str
    file: int
    start: int
    num_samples: int  # whole frames of codes
    words: Words | None = None

    @property
    def num_frames(self) -> int:
        return self.num_samples // FRAME


class CorpusFile(contextlib.AbstractContextManager["CorpusFile"]):
    """What one worker writes. An utterance is in the index once all of it is in the files."""

    def __init__(self, folder: Path, worker: int, *, with_codes: bool, with_sound: bool = True) -> None:
        self._stack = contextlib.ExitStack()
        open_ = self._stack.enter_context
        self._sound = open_((folder / f"{worker}.pcm").open("wb")) if with_sound else None
        self._codes = open_((folder / f"{worker}.codes").open("wb")) if with_codes else None
        self._index = open_((folder / f"{worker}.jsonl").open("w"))
        self._start = 0

    def add(self, text: str, pcm: Pcm, codes: Codes | None = None, words: Words | None = None) -> None:
        assert (codes is None) == (self._codes is None)
        if self._sound is not None:
            self._sound.write(pcm.tobytes())
            self._sound.flush()
        if codes is not None and self._codes is not None:
            self._codes.write(codes.tobytes())
            self._codes.flush()
        said = [] if words is None else [words.sentences, words.letters]
        self._index.write(json.dumps([text, self._start, len(pcm), *said]) + "\n")
        self._index.flush()
        self._start += len(pcm)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Corpus:
    """What the workers have written so far; `with_sound`: those of them that write sound."""

    def __init__(self, folder: Path, sample_rate: int = SAMPLE_RATE, *, with_sound: bool = False) -> None:
        self._folder, self._with_sound = folder, with_sound
        self._sample_rate = sample_rate
        self._at: dict[Path, int] = {}
        self.utterances: list[Utterance] = []

    def refresh(self) -> list[Utterance]:
        """The new ones, which are in `utterances` too."""
        files = sorted(self._folder.glob("*.jsonl"))
        if self._with_sound:
            files = [path for path in files if path.with_suffix(".pcm").exists()]
        fresh = [found for path in files for found in self._new_lines(path)]
        self.utterances += fresh
        return fresh

    def _new_lines(self, path: Path) -> Iterator[Utterance]:
        with path.open("rb") as file:
            file.seek(self._at.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at[path] = self._at.get(path, 0) + len(whole)
        for line in whole.splitlines():
            text, start, num_samples, *said = json.loads(line)
            yield Utterance(text, int(path.stem), start, num_samples, Words(*said) if said else None)

    def sound(self, utterance: Utterance) -> Pcm:
        path = self._folder / f"{utterance.file}.pcm"
        return np.fromfile(path, np.int16, utterance.num_samples, offset=2 * utterance.start)

    def codes(self, utterance: Utterance) -> Codes:
        path, groups = self._folder / f"{utterance.file}.codes", NANO.num_groups
        first, count = utterance.start // FRAME * groups, utterance.num_frames * groups
        return np.fromfile(path, np.int16, count, offset=2 * first).reshape(-1, groups)

    @property
    def hours(self) -> float:
        return sum(found.num_samples for found in self.utterances) / self._sample_rate / 3600

    def wait(self, hours: float, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while self.hours < hours:
            if time.monotonic() > end_s:
                raise SystemExit(f"after {limit_s} s there are only {self.hours:.3f} hours of speech")
            time.sleep(0.5)
            self.refresh()
