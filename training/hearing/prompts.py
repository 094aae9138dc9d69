"""`python -m training.hearing.prompts ROOT FOLDER`: recordings of a real voice to choose by, not trained on:
the prompts of Debian's `asterisk-core-sounds-en-g722`, with their words.

ROOT: where that package and `asterisk-core-sounds-en` are unpacked (`dpkg -x`), or `/`. FOLDER gets wav files
of 16 kHz and their words in txt files beside them, as `training.hearing.judge --recordings` takes them.
"""

from __future__ import annotations

import argparse
import gzip
import re
import wave
from pathlib import Path

import av
import numpy as np

from training.hearing.sentences import HEARD_RATE, letters_only

SOUNDS = "usr/share/asterisk/sounds/en_US_f_Allison"
WORDS = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
UNSAID = re.compile(r"[\[\](){}<>#*@&/;\"]|[A-Z]{2}|\.\w")  # not words, or not said as they are written
SHORTEST_S, LONGEST_S = 1.0, 16.0
FEWEST_WORDS, MOST_WORDS = 3, 40


def said_in(lines: list[str]) -> dict[str, str]:
    """The words of each prompt by its name; of prompts of the same words the first."""
    found: dict[str, str] = {}
    for line in lines:
        name, _, written = line.strip().partition(": ")
        if name.startswith(";") or not written or UNSAID.search(written):
            continue
        said = letters_only(written.replace("...", " "))
        known = {other.lower() for other in found.values()}
        if FEWEST_WORDS <= len(said.split()) <= MOST_WORDS and said.lower() not in known:
            found[name.strip()] = said
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(given.root / WORDS, "rt", errors="replace") as file:
        prompts = said_in(file.readlines())
    for name, said in prompts.items():
        path = given.root / SOUNDS / f"{name}.g722"
        if not path.exists():
            continue
        with av.open(str(path), format="g722") as sound:
            pcm = np.concatenate([frame.to_ndarray().reshape(-1) for frame in sound.decode(audio=0)])
        if SHORTEST_S < len(pcm) / HEARD_RATE < LONGEST_S:
            _write(given.folder / name.replace("/", "_"), pcm.tobytes(), said)


def _write(to: Path, pcm: bytes, said: str) -> None:
    with wave.open(f"{to}.wav", "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(HEARD_RATE)
        out.writeframes(pcm)
    to.with_name(f"{to.name}.txt").write_text(f"{said}\n")


if __name__ == "__main__":
    main()
