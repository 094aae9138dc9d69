"""The default model reads texts aloud: of a likely length, never without end, never silent, the same
each time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from model_families.default_model.shipped import SPEAKING
from model_families.omnistage_nano.speech import SAMPLING
from tests.conftest import nothing_left_behind
from tests.served import Served
from tests.spoken import SpokenAnswer, speak

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not SPEAKING.exists(), reason="no trained voice is shipped (training/README.md)"),
]
RATE = 24_000
TEXTS = {"Hello.": (0.3, 1.5), "The capital of France is Paris, and the sky is blue today.": (2.0, 7.0)}


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
