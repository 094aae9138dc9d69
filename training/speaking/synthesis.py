"""Speaks the training sentences, many workers at once, by the speech package.

`python -m training.speaking.synthesis DIR --worker 0 --workers 13 --tokenizer tokenizer.json` writes until
it is
stopped or `--seconds` are over. Files of a worker: `N.pcm` (int16), `N.codes`, and `N.jsonl` (text, first
sample, count, what is said, the letters of its words).
"""

from __future__ import annotations

import argparse
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from hibari import Hibari, dsp
from hibari.tts import ASSETS
from tokenizers import Tokenizer

from training.speaking.corpus import CorpusFile, Pcm, Words
from training.speaking.phonetics import FRAME, Codes, frame_codes, leading_frames
from training.speaking.pointing import written_words
from training.speaking.sentences import Sentences
from training.speaking.sizes import SAMPLE_RATE
from training.speaking.words import load_words

TAIL = 555  # samples by which the decoder's streams end early
GAIN = 2.0  # the package speaks softly
LONGEST_S, SHORTEST_S = 14.0, 0.3


class Voice:
    """The speech package, asked for the durations of its phonemes as well."""

    def __init__(self) -> None:
        self._hibari = Hibari()
        model = onnx.load(self._hibari.model_path)
        durations = [node.output[0] for node in model.graph.node if node.op_type == "Clip"]
        assert len(durations) == 1, "the package's model is another one than expected"
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(durations[0]))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        self._durations = durations[0]
        self._count = lru_cache(100_000)(lambda word: len(self._hibari.g2p(word).split()))

    def sentences(self, text: str) -> list[str]:
        """The sounds of each of a text's sentences; the network knows all of them."""
        known = self._hibari.vocab
        return ["".join(sound for sound in one if sound in known) for one in self._hibari.phonemize(text)]

    def written(self, text: str, sentences: list[str]) -> list[str]:
        """Letters of the words of the sentences that the text has, `written_words`."""
        return written_words(text, sentences, self._count)

    def timing(self, text: str) -> list[tuple[str, list[int]]]:
        """The sentences, and how many 25 ms each symbol takes, the pads before and behind included."""
        found = []
        for sounds in self.sentences(text):
            (units,) = self._session.run([self._durations], self._inputs(self._hibari.ids(sounds)))
            found.append((sounds, [int(unit) for unit in units.reshape(-1)]))
        return found

    def _inputs(self, ids: list[int]) -> dict[str, npt.NDArray[Any]]:
        return {"ids": np.array([ids]), "speed": np.ones(1, np.float32)}

    def __call__(self, text: str, seed: int) -> tuple[Pcm, Codes] | None:
        """Whole frames of sound, and their codes, the last of them the number of the symbol. The same for
        ever. None for a text of which nothing is said."""
        random = np.random.default_rng(seed)
        sounds, symbols, units, pitches = [], [], [], []
        for phonemes in self.sentences(text):
            ids = self._hibari.ids(phonemes)
            *spectra, durations = self._session.run(None, self._inputs(ids))
            parts = [spectrum[0] for spectrum in spectra]
            sounds.append(np.asarray(dsp.synth(*parts, random), np.float32) * GAIN)
            symbols.append(np.array(ids))
            units.append(durations.reshape(-1).astype(np.int64))
            pitches.append(parts[-1])
        if not sounds:
            return None
        sound = np.concatenate(sounds)
        num_frames = -(-(len(sound) + TAIL) // FRAME)
        whole = np.zeros(num_frames * FRAME, dtype=np.float32)
        whole[: len(sound)] = sound.clip(-0.99, 0.99)
        ids_L, pitch = np.concatenate(symbols), np.concatenate(pitches)
        codes = frame_codes(ids_L, np.arange(len(ids_L)), np.concatenate(units), pitch, whole)
        first = leading_frames(codes)
        return (whole * 32767).astype(np.int16)[first * FRAME :], codes[first:]


def open_sentences(tokenizer: Path, seed: int = 0) -> Sentences:
    return Sentences(load_words(Path(ASSETS), Tokenizer.from_file(str(tokenizer))), seed)


def write(
    folder: Path, worker: int, workers: int, seconds: float, sentences: Sentences, *, sound: bool
) -> None:
    voice, end_s = Voice(), time.monotonic() + seconds
    with CorpusFile(folder, worker, with_codes=True, with_sound=sound) as corpus:
        for number, text in enumerate(sentences.training(worker, workers)):
            if time.monotonic() > end_s:
                return
            spoken = voice(text, seed=number)
            if spoken is None:
                continue
            pcm, codes = spoken
            if SHORTEST_S <= len(pcm) / SAMPLE_RATE <= LONGEST_S:
                said = voice.sentences(text)
                corpus.add(text, pcm, codes, Words(said, voice.written(text, said)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--codes-only", action="store_true", help="no sound: what a talker is trained on")
    parser.add_argument("--seed", type=int, default=0, help="other sentences than another's")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    sentences = open_sentences(arguments.tokenizer, arguments.seed)
    write(
        arguments.folder,
        arguments.worker,
        arguments.workers,
        arguments.seconds,
        sentences,
        sound=not arguments.codes_only,
    )


if __name__ == "__main__":
    main()
