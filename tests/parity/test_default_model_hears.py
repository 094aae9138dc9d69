"""The default model answers what is said to it as it answers what is written."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.media import MediaSource
from model_families.default_model.shipped import HEARING
from tests.served import Served
from tests.tiny_models import reference_tokenizer

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not HEARING.exists(), reason="no trained ears are shipped (training/README.md)"),
]
SAID = Path(__file__).parents[2] / "examples" / "question.ogg"
QUESTION = "What is the capital of France?"


@pytest.fixture
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
