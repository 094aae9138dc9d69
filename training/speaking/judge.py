"""How well speech is understood: Whisper listens, and its words are counted against the text.

`python -m training.speaking.judge spoken.npz --whisper FOLDER` judges what a training run spoke;
`python -m training.speaking.judge http://127.0.0.1:8000 --whisper FOLDER --assets ASSETS --count 200` a
server: of held-out sentences, and apart from them of rows of words without grammar.
"""

from __future__ import annotations

import argparse
import io
import json
import urllib.error
import urllib.request
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.signal import resample_poly
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from contracts.errors import NoSpeech
from training.speaking.judge_words import distance, words_of
from training.speaking.sentences import Sentences
from training.speaking.sizes import SAMPLE_RATE

HEARD_RATE = 16_000
LONG_S, SHORT_S = 25.0, 0.15  # spoken for longer than a sentence can be; hardly spoken at all
AHEAD = 2  # asked of a server at once, while Whisper listens
FINISH, NO_SPEECH = "x-omnistage-finish-reason", NoSpeech.default_code

Sound = npt.NDArray[np.float32]


class Spoken(NamedTuple):
    text: str
    sound: Sound
    cut: bool = False  # at the server's bound: it had no end


@dataclass(frozen=True)
class Verdict:
    text: str
    heard: str
    errors: int
    num_words: int
    seconds: float
    cut: bool = False

    @property
    def endless(self) -> bool:
        return self.cut or self.seconds > LONG_S


class Listener:
    def __init__(self, folder: Path) -> None:
        self._processor = WhisperProcessor.from_pretrained(folder)
        self._model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, sound: Sound) -> str:
        """`sound` at 24 kHz."""
        heard = resample_poly(sound, 2, 3).astype(np.float32)
        features = self._processor(heard, sampling_rate=HEARD_RATE, return_tensors="pt").input_features
        limit = min(int(len(heard) / HEARD_RATE * 8) + 12, 400)
        ids = self._model.generate(features, max_new_tokens=limit)
        return str(self._processor.batch_decode(ids, skip_special_tokens=True)[0]).strip()


def judge(spoken: Spoken, listen: Callable[[Sound], str]) -> Verdict:
    text, sound, cut = spoken
    heard = listen(sound) if len(sound) else ""
    wanted, found = words_of(text), words_of(heard)
    return Verdict(text, heard, distance(wanted, found), len(wanted), len(sound) / SAMPLE_RATE, cut)


def from_file(path: Path, kind: str) -> Iterator[Spoken]:
    with np.load(path) as spoken:
        for index, text in enumerate(spoken["texts"]):
            if (name := f"{kind}{index}") in spoken:
                yield Spoken(str(text), spoken[name].astype(np.float32) / np.float32(32768))


def from_server(url: str, texts: list[str], model: str) -> Iterator[Spoken]:
    """The n-th text with the seed n."""

    def read(numbered: tuple[int, str]) -> Spoken:
        seed, text = numbered
        body = {"model": model, "input": text, "response_format": "wav", "seed": seed, "stream": False}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/audio/speech", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                data, cut = answer.read(), answer.headers.get(FINISH) == "length"
        except urllib.error.HTTPError as error:
            if json.load(error)["error"]["code"] != NO_SPEECH:
                raise
            return Spoken(text, np.zeros(0, np.float32))
        with wave.open(io.BytesIO(data)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return Spoken(text, samples.astype(np.float32) / np.float32(32768), cut)

    with ThreadPoolExecutor(AHEAD) as pool:
        yield from pool.map(read, enumerate(texts))


def judged_sets(sentences: Sentences, count: int, rows: int) -> dict[str, list[str]]:
    """Of what is held out: rows of words without grammar are heard worse, and counted apart, not left out."""
    return {
        "sentences": sentences.held_out(count, grammatical=True),
        "rows of words": sentences.held_out(rows, grammatical=False),
    }


def report(name: str, verdicts: list[Verdict]) -> dict[str, float | str]:
    words = sum(verdict.num_words for verdict in verdicts)
    missed = sum(verdict.errors for verdict in verdicts)
    return {
        "what": name,
        "texts": len(verdicts),
        "words": words,
        "missed": missed,
        "word_error_rate": round(missed / max(words, 1), 4),
        "without_a_miss": sum(not verdict.errors for verdict in verdicts),
        "endless": sum(verdict.endless for verdict in verdicts),
        "empty": sum(verdict.seconds < SHORT_S for verdict in verdicts),
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="a spoken.npz, or a server's address")
    parser.add_argument("--whisper", type=Path, default=Path(".models/whisper-tiny-en"))
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--count", type=int, default=200, help="sentences that a server is to read")
    parser.add_argument("--rows", type=int, default=50, help="and rows of words without grammar")
    parser.add_argument("--model", default="omnistage-nano")
    parser.add_argument("--say", action="store_true", help="print every sentence as it was heard")
    given = parser.parse_args()
    listen = Listener(given.whisper)
    if given.source.startswith("http"):
        from training.speaking.synthesis import open_sentences

        sets = judged_sets(open_sentences(given.assets / "tokenizer.json"), given.count, given.rows)
        sources = {name: from_server(given.source, texts, given.model) for name, texts in sets.items()}
    else:
        sources = {kind: from_file(Path(given.source), kind) for kind in ("decoder", "talker")}
    for name, spoken in sources.items():
        verdicts = []
        for one in spoken:
            verdicts.append(judge(one, listen))
            if given.say:
                said = verdicts[-1]
                print(f"{said.errors}/{said.num_words} {said.text!r} -> {said.heard!r}", flush=True)
        print(json.dumps(report(name, verdicts)), flush=True)


if __name__ == "__main__":
    main()
