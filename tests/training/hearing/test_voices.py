"""Voices say what is written: their phonemes, their libraries, where they are installed."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("scipy")

from training.hearing.sentences import FLITE, HEARD_RATE
from training.hearing.voices import Flite, in_espeak


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("kwˈɪk bɹˈWn fˈɑks", "kwˈɪk bɹˈaʊn fˈɑːks"),
        ("ʤˈʌmp ˈOvəɹ", "dʒˈʌmp ˈoʊvɚ"),
        ("ʧˈuz θˈɜɹd lˈɪTᵊl", "tʃˈuːz θˈɜːd lˈɪɾəl"),
    ],
)
def test_phonemes_become_those_that_the_voice_knows(ours, theirs):
    assert in_espeak(ours) == theirs


@pytest.mark.parametrize("name", FLITE)
def test_flite_speaks_in_another_manner_each_time(name):
    try:
        voice = Flite(name)
    except OSError:
        pytest.skip("libflite1 is not installed")
    random = np.random.default_rng(1)
    sounds = [voice("The cat sat on the mat.", random) for _ in range(3)]
    assert len({sound.tobytes() for sound in sounds}) == 3 or name == "rms"  # whose pitch does not move
    for sound in sounds:
        assert sound.dtype == np.float32
        assert 0.7 < len(sound) / HEARD_RATE < 5.0
        assert 0.02 < float(np.abs(sound).max()) <= 1.0
