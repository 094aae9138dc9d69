"""A stage that breaks where nothing can start it again: its requests fail at once, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from contracts.errors import EngineError, ServiceUnavailable
from stages.encoder_stage import EncoderStage
from stages.lm_stage import LMStage
from stages.shell import StepResultBatch
from stages.talker_stage import TalkerStage
from stages.vocoder_stage import VocoderStage
from tests.omni_oracle import Heard, sound
from tests.served import Served, picture
from tests.spoken import speak

torch.set_num_threads(1)
WITH_PICTURE = [("user", ["what is ", picture(1), "?"])]
TEXT = [("user", ["hello"])]


@pytest.mark.parametrize(("kind", "stage"), [(EncoderStage, "vision"), (LMStage, "thinker")])
def test_a_broken_step(
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[EncoderStage] | type[LMStage],
    stage: str,
) -> None:
    async def broken(self: object) -> StepResultBatch:
        raise RuntimeError("the device is lost")

    with Served(tiny("qwen2_5_vl"), "preprocess.workers=1") as served:
        with monkeypatch.context() as patch:
            patch.setattr(kind, "step", broken)
            with pytest.raises((EngineError, ServiceUnavailable), match=stage):
                served.ask(WITH_PICTURE)
        states = {health.stage: health.state for health in served.service.health()}
        assert states.pop(stage) == "failed"
        assert set(states.values()) == {"ready"}
        with pytest.raises(ServiceUnavailable, match=f"stage {stage} is failed"):
            served.ask(WITH_PICTURE)
        if stage == "vision":
            assert served.ask(TEXT).tokens
        served.assert_clean()


SOUND = [("user", ["who is it?", Heard(sound(1, 0.5)).source()])]


@pytest.mark.parametrize(
    ("kind", "stage"), [(EncoderStage, "audio"), (TalkerStage, "talker"), (VocoderStage, "vocoder")]
)
def test_a_broken_step_of_what_hears_and_speaks(
    tiny_omni: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[EncoderStage] | type[TalkerStage] | type[VocoderStage],
    stage: str,
) -> None:
    """REL-01. Who asks for text alone, of what needs no broken stage, is answered as before."""

    async def broken(self: object) -> StepResultBatch:
        raise RuntimeError("the device is lost")

    spoken = [("user", ["hello"])]
    settings = ("preprocess.workers=1", "thinker.kv_memory=8MiB", "talker.kv_memory=8MiB")
    with Served(tiny_omni("qwen3_omni_moe"), *settings, "server.max_speech_s=0.5") as served:
        written = served.ask(TEXT)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "step", broken)
            for _ in range(2):  # the first finds out, and the next is told
                asking = (
                    served.answer(SOUND)
                    if stage == "audio"
                    else speak(served, spoken, max_tokens=6, ignore_eos=True)
                )
                with pytest.raises((EngineError, ServiceUnavailable), match=stage):
                    served.run(asking)
        states = {health.stage: health.state for health in served.service.health()}
        assert states.pop(stage) == "failed"
        assert set(states.values()) == {"ready"}
        assert served.ask(TEXT).tokens == written.tokens
        if stage == "audio":
            assert served.run(speak(served, spoken, max_tokens=6, ignore_eos=True)).pcm
        else:
            assert served.ask(SOUND).tokens
        served.assert_clean()
