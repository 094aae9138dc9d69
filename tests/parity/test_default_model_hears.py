"""The default model answers what is said to it as it answers what is written, and says where nothing was."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from contracts.media import MediaSource
from contracts.specs import AudioSpec, MediaLimits
from model_families.default_model.shipped import HEARING
from preprocess.sound import decode_audio
from tests.api.serving import TIMEOUT_S, running
from tests.conftest import nothing_left_behind
from tests.served import Served
from tests.tiny_models import reference_tokenizer
from tests.wav_files import wav_of

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not HEARING.exists(), reason="no trained ears are shipped (training/README.md)"),
]
RATE = 16_000
SAID = Path(__file__).parents[2] / "examples" / "question.ogg"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """The server here serves several tests."""
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def served(default_model: Path) -> Iterator[Served]:
    with Served(default_model, "thinker.kv_memory=512MiB") as served:
        yield served
        served.assert_clean()


def test_a_spoken_question_is_answered_as_a_written_one(served: Served, default_model: Path) -> None:
    sound = MediaSource("audio", "data:audio/ogg;base64," + base64.b64encode(SAID.read_bytes()).decode())
    found = served.ask_all([[("user", [sound])], [("user", [QUESTION])]], max_tokens=16)
    tokenizer = reference_tokenizer(default_model)
    spoken, written = (tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in found)
    assert "Paris" in written
    assert spoken == written


def test_a_question_in_a_long_quiet_recording_is_answered(served: Served, default_model: Path) -> None:
    """What stands for the quiet is most of the prompt."""
    question = decode_audio(SAID.read_bytes(), AudioSpec(tokens="qwen2_5_omni"), MediaLimits()).samples_S
    quiet = _noise(18.0, -70)
    assert "Paris" in _answer(served, default_model, np.concatenate([question, quiet]))


NOTHING = {
    "digital silence": lambda: np.zeros(3 * RATE, np.float32),
    "long silence": lambda: np.zeros(20 * RATE, np.float32),
    "noise, -60 dB": lambda: _noise(2.0, -60),
    "noise, -20 dB": lambda: _noise(4.0, -20),
    "a tone": lambda: 0.3 * np.sin(2 * np.pi * 440 * np.arange(3 * RATE) / RATE).astype(np.float32),
}


@pytest.mark.parametrize("sound", NOTHING)
def test_where_no_word_was_said_it_says_so(served: Served, default_model: Path, sound: str) -> None:
    samples = NOTHING[sound]()
    assert "holds no words" in _answer(served, default_model, samples)
    assert "holds no words" in _answer(served, default_model, samples, "What did I say?")


def test_what_is_heard_is_written_down(served: Served) -> None:
    """By the ears alone; the language model goes on with what it is at."""
    sounds = {"question": SAID.read_bytes(), "silence": wav_of(NOTHING["digital silence"](), RATE)}

    async def run() -> dict[str, httpx.Response]:
        async with running(served.service) as server, httpx.AsyncClient(timeout=TIMEOUT_S) as http:

            async def post(path: str, sound: str, **form: str) -> httpx.Response:
                files = {"file": (sound, sounds[sound])}
                return await http.post(f"{server.url}/v1/audio/{path}", files=files, data=form)

            asked = {
                "json": post("transcriptions", "question", language="en", temperature="0.5"),
                "text": post("transcriptions", "question", response_format="text"),
                "stream": post("transcriptions", "question", stream="true"),
                "silence": post("transcriptions", "silence"),
                "times": post("transcriptions", "question", response_format="srt"),
                "german": post("transcriptions", "question", language="de"),
                "names": post("transcriptions", "question", prompt="Mitterrand"),
                "translated": post("translations", "question"),
                "junk": http.post(
                    f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", b"RIFFjunk")}
                ),
            }
            return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))

    found = served.run(run())
    said = found["json"].json()
    assert said["text"].strip("?. ").lower() == QUESTION.strip("?").lower()
    assert said["usage"]["type"] == "duration"
    assert found["text"].text.strip() == said["text"]
    assert f'"text":"{said["text"]}"' in found["stream"].text
    assert '"audio_tokens":' in found["stream"].text
    assert found["silence"].json()["text"] == ""
    refused = {"times": "response_format", "german": "language", "names": "prompt", "translated": "model"}
    for name, param in refused.items():
        assert found[name].status_code == 400
        assert found[name].json()["error"]["param"] == param
    assert found["junk"].status_code == 400


def _noise(seconds: float, db: float) -> np.ndarray:
    draws = np.random.default_rng(5).standard_normal(int(seconds * RATE))
    return (10 ** (db / 20) * draws).astype(np.float32)


def _answer(served: Served, model: Path, samples: np.ndarray, *text: str) -> str:
    data = base64.b64encode(wav_of(samples, RATE)).decode()
    sound = MediaSource("audio", f"data:audio/wav;base64,{data}")
    (answer,) = served.ask_all([[("user", [sound, *text])]], max_tokens=16)
    return reference_tokenizer(model).decode(answer.tokens, skip_special_tokens=True)
