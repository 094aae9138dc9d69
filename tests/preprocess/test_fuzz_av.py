"""Damaged sound and video files are refused or read as far as they go; nothing else may come of them."""

from __future__ import annotations

import numpy as np
import pytest

from contracts.errors import MediaError
from contracts.media import MediaOptions
from contracts.specs import MediaLimits
from preprocess.items import Prepared, PreparedVideo, prepare
from preprocess.recipes import AudioRecipe, VideoRecipe
from preprocess.resize import pixel_budget
from preprocess.sampling import frame_budget
from preprocess.video import decode_frames
from tests.preprocess.films import TINY_VIDEO, film, moving
from tests.preprocess.recordings import TINY_AUDIO, int16, record, tone, wav

LIMITS = MediaLimits()
HEARD = AudioRecipe(TINY_AUDIO)
SEEN = VideoRecipe(
    TINY_VIDEO,
    frame_budget(TINY_VIDEO, MediaOptions(), 64),
    pixel_budget(TINY_VIDEO, MediaOptions()),
    TINY_AUDIO,
)
FILES = {
    "wav": (HEARD, wav(int16(tone(0.3)))),
    "flac": (HEARD, record(tone(0.3), 16_000, "flac", "flac")),
    "mp3": (HEARD, record(tone(0.3, 48_000), 48_000, "mp3", "libmp3lame")),
    "ogg": (HEARD, record(tone(0.3, 48_000), 48_000, "ogg", "libopus")),
    "m4a": (HEARD, record(tone(0.3, 48_000), 48_000, "mp4", "aac")),
    "mp4": (SEEN, film(moving(6), sound=tone(0.6))),
    "mkv": (SEEN, film(moving(6), container="matroska", codec="mpeg4", sound=tone(0.6))),
    "avi": (SEEN, film(moving(6), container="avi", codec="mjpeg", pixel_format="yuvj420p")),
}


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut short, bytes changed, or a stretch left out."""
    changed = bytearray(data)
    match rng.integers(3):
        case 0:
            del changed[int(rng.integers(len(data))) :]
        case 1:
            for position in rng.integers(len(data), size=int(rng.integers(1, 30))):
                changed[position] = rng.integers(256)
        case 2:
            start = int(rng.integers(len(data)))
            del changed[start : start + int(rng.integers(1, 500))]
    return bytes(changed)


def consume(prepared: Prepared) -> None:
    if isinstance(prepared, PreparedVideo):
        for _ in decode_frames(prepared.data, prepared.opened, prepared.numbers, LIMITS):
            pass


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name: str) -> None:
    recipe, data = FILES[name]
    rng = np.random.default_rng(len(name))
    consume(prepare(recipe, data, LIMITS))
    num_read = 0
    for _ in range(25):
        try:
            prepared = prepare(recipe, damaged(data, rng), LIMITS)
            consume(prepared)
        except MediaError:
            continue
        assert prepared.nbytes > 0
        num_read += 1
    assert num_read > 0 or name == "ogg"  # whose pages are checked, each as a whole
