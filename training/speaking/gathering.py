"""Examples of the talker out of the corpus, made beside the training, in a process of their own: to put
together a hundred hours takes longer than a step may wait.

Shapes: R rows of text and T frames of all examples.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from training.speaking.corpus import Corpus, Utterance
from training.speaking.phonetics import Codes
from training.speaking.pointing import Spelled, joined, pointer_codes, spell
from training.speaking.prompts import Layout, Line
from training.speaking.sizes import NANO

SEED = 20260102
LETTERS_SHARE = 0.12  # of the words, whose letters are heard
JOINED = (1, 1, 1, 2, 3)  # utterances of an example
LONGEST = 448  # rows of an example
FIRST = 6000  # utterances, so that training can begin


@dataclass(frozen=True, eq=False)
class Gathered:
    """`tokens_R` of text; `starts`, of each example: first row, rows, of them prompt, first frame, frames."""

    tokens_R: npt.NDArray[np.int32]
    codes_TQ: Codes
    starts: npt.NDArray[np.int64]
    hours: float


class Gathering:
    def __init__(self, layout: Layout, corpus: Corpus) -> None:
        self._layout, self._corpus = layout, corpus
        self._known: list[tuple[Spelled, Codes]] = []
        self._read = 0
        self._random = Random(SEED)

    def __call__(self, most: int | None = None) -> Gathered:
        """All that is in the corpus by now, of what was not known before at most so many. Neighbours are
        joined, others each time."""
        self._corpus.refresh()
        fresh = self._corpus.utterances[self._read :][:most]
        self._read += len(fresh)
        spelled = [(self._spell(one), self._corpus.codes(one)) for one in fresh]
        self._known += [both for both in spelled if len(both[0].pieces_N)]
        return self._all()

    def _spell(self, utterance: Utterance) -> Spelled:
        """Some words by their letters, as the server gives words that it does not know."""
        words, random = utterance.words, self._random
        assert words is not None, "the corpus says how its utterances sound"
        letters = [word if word and random.random() < LETTERS_SHARE else "" for word in words.letters]
        return spell(self._layout.pieces, words.sentences, letters)

    def _all(self) -> Gathered:
        random, count = self._random, len(self._known)
        rows: list[npt.NDArray[np.int32]] = []
        frames: list[Codes] = []
        starts: list[tuple[int, ...]] = []
        first_row = first_frame = 0
        index = random.randrange(min(3, count))
        while index < count:
            size = min(random.choice(JOINED), count - index)
            line, codes_TQ = join(self._layout, self._known[index : index + size])
            index += size
            if line.prompt + len(codes_TQ) > LONGEST:
                continue
            rows.append(line.rows)
            frames.append(codes_TQ)
            starts.append((first_row, len(line.rows), line.prompt, first_frame, len(codes_TQ)))
            first_row, first_frame = first_row + len(line.rows), first_frame + len(codes_TQ)
        return Gathered(
            np.concatenate(rows), np.concatenate(frames), np.array(starts, np.int64), self._corpus.hours
        )


def join(layout: Layout, parts: Sequence[tuple[Spelled, Codes]]) -> tuple[Line, Codes]:
    """One utterance behind another: frames with their pointers."""
    spelled = joined([part for part, _ in parts])
    codes_TQ = np.concatenate([codes for _, codes in parts])
    before = np.cumsum([0, *(part.num_symbols for part, _ in parts)])
    symbols_T = np.concatenate(
        [codes[:, NANO.pointer] + first for (_, codes), first in zip(parts, before, strict=False)]
    )
    line, rows_N = layout.line(spelled)
    codes_TQ[:, NANO.pointer] = pointer_codes(rows_N, spelled, symbols_T)
    return line, codes_TQ


class Beside(AbstractContextManager["Beside"]):
    """Gathers in another process; what it made lies in files that are gone with the next or at the end."""

    def __init__(self, gathering: Gathering) -> None:
        context = multiprocessing.get_context("spawn")
        self._scratch = tempfile.TemporaryDirectory(prefix="gathered-")
        self._here, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(gathering, there, Path(self._scratch.name)), daemon=True
        )
        self._process.start()
        there.close()

    def ask(self, most: int | None = None) -> None:
        self._here.send(most)

    def ready(self) -> bool:
        return self._here.poll()

    def take(self) -> Gathered:
        """Waits for it. Raises EOFError when the process has died."""
        hours = self._here.recv()
        names = ("tokens", "codes", "starts")
        tokens_R, codes_TQ, starts = (np.load(Path(self._scratch.name, f"{name}.npy")) for name in names)
        return Gathered(tokens_R, codes_TQ, starts, hours)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._here.close()
        self._scratch.cleanup()


def _serve(gathering: Gathering, asked: Connection, folder: Path) -> None:
    while True:
        try:
            most = asked.recv()
        except EOFError:
            return
        found = gathering(most)
        for name, values in (("tokens", found.tokens_R), ("codes", found.codes_TQ), ("starts", found.starts)):
            np.save(folder / f"{name}.npy", values)
        asked.send(found.hours)
