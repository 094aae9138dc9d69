"""A stage that breaks where nothing can start it again: its requests fail at once, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.errors import EngineError, ServiceUnavailable
from stages.encoder_stage import EncoderStage
from stages.lm_stage import LMStage
from stages.shell import StepResultBatch
from tests.served import Served, picture

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
