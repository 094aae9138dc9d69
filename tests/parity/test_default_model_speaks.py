"""The default model reads texts aloud: of a likely length, never without end, never silent, the same
each time, and Whisper hears the words over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from model_families.default_model.shipped import SPEAKING
from model_families.omnistage_nano.speech import SAMPLING
from stages.launch import serve_service
from stages.options import ServeOptions
from tests.api.serving import TIMEOUT_S, running
from tests.conftest import ROOT, nothing_left_behind
from tests.served import Served
from tests.spoken import SpokenAnswer, speak
from training.speaking.judge_words import distance, words_of

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not SPEAKING.exists(), reason="no trained voice is shipped (training/README.md)"),
]
RATE = 24_000
WHISPER = ROOT / ".models" / "whisper-tiny-en"
TEXTS = {"Hello.": (0.3, 1.5), "The capital of France is Paris, and the sky is blue today.": (2.0, 7.0)}
# And how many words of them may be misheard: a made-up one has no right spelling.
READ = {
    "The house is near the river. My brother is going to the market.": 1,
    "There are 42 boats, and each one costs $15.": 1,
    "My friend Zxqv is in the garden.": 3,
}


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


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_in_the_time_that_it_takes(served: Served, text: str) -> None:
    async def read() -> list[SpokenAnswer]:
        turns = [("user", [f"Read this text aloud:\n{text}"])]
        draws = msgspec.structs.replace(SAMPLING, seed=3)
        say = [speak(served, turns, verbatim=text, talker=draws) for _ in range(2)]
        return list(await asyncio.gather(*say))

    answers = served.run(read())
    least_s, most_s = TEXTS[text]
    for answer in answers:
        assert answer.audio_finish == "stop"
        assert least_s < len(answer.samples) / RATE < most_s
        assert answer.samples.square().mean().sqrt() > 0.01
    first, second = (answer.samples for answer in answers)
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)  # of other batches, rounded otherwise


def test_an_answer_sounds_as_if_its_text_were_read(served: Served, default_model: Path) -> None:
    """Its words come to the talker one by one, those of a text all at once."""
    draws = msgspec.structs.replace(SAMPLING, seed=3)
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))

    async def both() -> tuple[SpokenAnswer, SpokenAnswer]:
        turns = [("user", ["How many days are there in a year?"])]
        answer = await speak(served, turns, talker=draws, max_tokens=16)
        text = tokenizer.decode(answer.tokens)
        return answer, await speak(served, [("user", ["Read."])], verbatim=text, talker=draws)

    answer, reading = served.run(both())
    assert answer.audio_finish == reading.audio_finish == "stop"
    assert len(answer.samples) > RATE
    torch.testing.assert_close(answer.samples, reading.samples, atol=1e-4, rtol=0)


@pytest.mark.skipif(not WHISPER.exists(), reason="Whisper is not there: run `make whisper`")
def test_whisper_hears_what_was_to_be_read(served: Served) -> None:
    """Words, numbers and what surrounds a word that no dictionary has, of a real server by a real server."""

    async def heard() -> list[str]:
        async with (
            serve_service(ServeOptions(model=WHISPER)) as listening,
            running(served.service) as speaker,
            running(listening) as listener,
            httpx.AsyncClient(timeout=TIMEOUT_S) as http,
        ):

            async def post(url: str, **request: Any) -> httpx.Response:
                return (await http.post(url, **request)).raise_for_status()

            said = [{"input": text, "response_format": "wav", "seed": 3} for text in READ]
            sounds = await asyncio.gather(
                *(post(f"{speaker.url}/v1/audio/speech", json=body) for body in said)
            )
            files = [{"file": ("read.wav", sound.content)} for sound in sounds]
            url = f"{listener.url}/v1/audio/transcriptions"
            return [
                str(found.json()["text"])
                for found in await asyncio.gather(*(post(url, files=file) for file in files))
            ]

    for (text, most_wrong), found in zip(READ.items(), served.run(heard()), strict=True):
        assert distance(words_of(text), words_of(found)) <= most_wrong, f"{text!r} was heard as {found!r}"
