"""How well the finished checkpoint hears: the words that its ears spell, and its answers to spoken questions.

`python -m training.hearing.judge .models/omnistage-nano --recordings FOLDER` counts wrong words of wav files
whose words lie in txt files beside them; `--corpus FOLDER` those of the held-out sentences that training
spoke there; `--server http://127.0.0.1:8000 --questions 100` asks held-out questions aloud and in writing
and counts how often the answers are the same.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import urllib.request
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from contracts.specs import MediaLimits, MediaSpecs
from model_families.omnistage_nano.ears import open_ears
from model_families.registry import open_family
from preprocess.mel import log_mel
from preprocess.sound import decode_audio
from training.hearing.features import disturb
from training.hearing.sentences import HEARD_RATE, PLAIN, VARIED
from training.speaking.corpus import Corpus
from training.speaking.judge_words import distance, words_of


class Ears:
    """Of a finished checkpoint, behind the server's own preprocessing."""

    def __init__(self, checkpoint: Path) -> None:
        specs = MediaSpecs(audio=open_family(checkpoint).media_specs.audio)
        assert specs.audio is not None, "the checkpoint is deaf"
        self.spec = specs.audio
        self._ears = open_ears(checkpoint, specs, torch.device("cpu"), torch.float32)
        self.wrong = self.words = 0

    def hear(self, samples_S: npt.NDArray[np.float32], text: str) -> str:
        """Counts what is heard of the text."""
        mel_MF = np.zeros((self.spec.num_mels, self.spec.num_frames(len(samples_S))), np.float32)
        log_mel(samples_S, self.spec, mel_MF)
        with torch.inference_mode():
            (heard,) = self._ears.spelled([torch.from_numpy(mel_MF)])
        self.wrong += distance(words_of(text), words_of(heard))
        self.words += len(words_of(text))
        return heard

    def error_rate(self) -> float:
        """Of the words since the last time."""
        wrong, words = self.wrong, self.words
        self.wrong = self.words = 0
        return round(wrong / max(words, 1), 4)


def judge_recordings(ears: Ears, recordings: Path) -> dict[str, float]:
    for path in sorted(recordings.glob("*.wav")):
        text = path.with_suffix(".txt").read_text().strip()
        heard = ears.hear(decode_audio(path.read_bytes(), ears.spec, MediaLimits()).samples_S, text)
        print(f"{path.name}: {text!r} -> {heard!r}", flush=True)
    return {"word error rate, real recordings": ears.error_rate()}


def judge_sentences(ears: Ears, folder: Path) -> dict[str, float]:
    corpus, scores = Corpus(folder, HEARD_RATE), {}
    corpus.refresh()
    torch.manual_seed(1)
    cases = (
        ("the package's voice", PLAIN, False),
        ("other voices", VARIED, False),
        ("in rooms", VARIED, True),
    )
    for name, file, rooms in cases:
        for one in corpus.utterances:
            if one.file != file:
                continue
            sound_BS = torch.from_numpy(corpus.sound(one))[None].float() / 32768
            if rooms:
                sound_BS = disturb(sound_BS, torch.tensor([one.num_samples]))
            ears.hear(sound_BS[0].numpy(), one.text)
        scores[f"word error rate, held-out sentences, {name}"] = ears.error_rate()
    return scores


def judge_answers(server: str, tokenizer: Path, count: int) -> dict[str, float]:
    from training.hearing.synthesis import Manner, Voices, open_said

    texts = [text for text in open_said(tokenizer).held_out(30 * count) if text.endswith("?")][:count]
    voices, same = Voices(), 0
    for number, text in enumerate(texts):
        pcm = voices(text, Manner(), np.random.default_rng(number))
        spoken, written = _ask(server, _sound(pcm)), _ask(server, {"type": "text", "text": text})
        same += spoken == written
        print(f"{text!r} -> {spoken!r}{'' if spoken == written else f', written: {written!r}'}", flush=True)
    return {"spoken questions answered as written": round(same / max(len(texts), 1), 4)}


def _sound(pcm: npt.NDArray[np.int16]) -> dict[str, object]:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(HEARD_RATE)
        out.writeframes(pcm.tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _ask(server: str, part: dict[str, object]) -> str:
    with urllib.request.urlopen(f"{server}/v1/models") as models:
        model = json.load(models)["data"][0]["id"]
    turn = {"role": "user", "content": [part]}
    body = {"model": model, "messages": [turn], "temperature": 0, "max_tokens": 24}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--recordings", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--server")
    parser.add_argument("--questions", type=int, default=100)
    given = parser.parse_args()
    scores: dict[str, float] = {}
    ears = Ears(given.checkpoint)
    if given.recordings is not None:
        scores |= judge_recordings(ears, given.recordings)
    if given.corpus is not None:
        scores |= judge_sentences(ears, given.corpus)
    if given.server is not None:
        scores |= judge_answers(given.server, given.checkpoint / "tokenizer.json", given.questions)
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
