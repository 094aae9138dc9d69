"""Sound files to send."""

from __future__ import annotations

import io
import wave

import numpy as np


def wav_of(samples: np.ndarray, rate: int) -> bytes:
    """16 bits, mono; `samples`: float, clipped to [-1, 1]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(rate)
        recording.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()
