"""How well speech is understood: Whisper listens, and its words are counted against the text.

`python -m training.speaking.judge spoken.npz --whisper FOLDER` judges what a training run spoke;
`python -m training.speaking.judge http://127.0.0.1:8000 --whisper FOLDER --assets ASSETS --count 200` a
server.
"""

from __future__ import annotations

import argparse
import io
import json
import urllib.request
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy.signal import resample_poly
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from training.speaking.judge_words import distance, words_of
from training.speaking.sizes import SAMPLE_RATE

HEARD_RATE = 16_000
LONG_S, SHORT_S = 25.0, 0.15  # spoken for longer than a sentence can be; hardly spoken at all

Sound = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Verdict:
    text: str
    heard: str
    errors: int
    num_words: int
    seconds: float


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


def judge(text: str, sound: Sound, listen: Listener) -> Verdict:
    heard = listen(sound) if len(sound) else ""
    wanted, found = words_of(text), words_of(heard)
    return Verdict(text, heard, distance(wanted, found), len(wanted), len(sound) / SAMPLE_RATE)


def from_file(path: Path, kind: str) -> Iterator[tuple[str, Sound]]:
    with np.load(path) as spoken:
        for index, text in enumerate(spoken["texts"]):
            if (name := f"{kind}{index}") in spoken:
                yield str(text), spoken[name].astype(np.float32) / np.float32(32768)


def from_server(url: str, texts: list[str], model: str) -> Iterator[tuple[str, Sound]]:
    for index, text in enumerate(texts):
        body = json.dumps({"model": model, "input": text, "response_format": "wav", "seed": index})
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/audio/speech", body.encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            data = answer.read()
        with wave.open(io.BytesIO(data)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        yield text, samples.astype(np.float32) / np.float32(32768)


def report(name: str, verdicts: list[Verdict]) -> dict[str, float | str]:
    words = sum(verdict.num_words for verdict in verdicts)
    return {
        "what": name,
        "sentences": len(verdicts),
        "word_error_rate": round(sum(verdict.errors for verdict in verdicts) / max(words, 1), 4),
        "runaways": sum(verdict.seconds > LONG_S for verdict in verdicts),
        "empty": sum(verdict.seconds < SHORT_S for verdict in verdicts),
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="a spoken.npz, or a server's address")
    parser.add_argument("--whisper", type=Path, default=Path(".models/whisper-tiny-en"))
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--model", default="omnistage-nano")
    parser.add_argument("--say", action="store_true", help="print every sentence as it was heard")
    given = parser.parse_args()
    listen = Listener(given.whisper)
    if given.source.startswith("http"):
        from training.speaking.synthesis import open_sentences

        texts = open_sentences(given.assets / "tokenizer.json").held_out(given.count)
        sources = {"server": from_server(given.source, texts, given.model)}
    else:
        sources = {kind: from_file(Path(given.source), kind) for kind in ("decoder", "talker")}
    for name, spoken in sources.items():
        verdicts = []
        for text, sound in spoken:
            verdicts.append(judge(text, sound, listen))
            if given.say:
                print(f"{verdicts[-1].errors}/{verdicts[-1].num_words} {text!r} -> {verdicts[-1].heard!r}")
        print(json.dumps(report(name, verdicts)), flush=True)


if __name__ == "__main__":
    main()
