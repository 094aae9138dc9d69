"""The steps of a start are told to the front process and logged with how long they took."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.messages import StageReady, StageStep
from lm_engine.runner import Runner
from stages.build import build_lm_engine
from stages.launch import serve_service
from stages.options import ServeOptions
from stages.planning import make_plan
from stages.stage_board import StageBoard
from stages.start_progress import StartProgress


class Recording(StartProgress):
    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[str, str]] = []

    def begin(self, who: str, doing: str) -> None:
        super().begin(who, doing)
        self.begun.append((who, doing))


def test_a_start_says_what_it_is_at(tiny: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = Recording()

    async def run() -> None:
        options = ServeOptions(model=tiny("qwen2_5_vl"), dtype="float32", overrides=("preprocess.workers=1",))
        async with serve_service(options, progress):
            assert progress.by_who() == {}, "all done"

    asyncio.run(run())
    steps = [doing for who, doing in progress.begun if who == "thinker"]
    assert len(steps) == 2
    assert re.fullmatch(r"loading weights \([\d,]+ MiB\)", steps[0])
    assert steps[1] == "measuring the largest step"
    assert {who for who, _ in progress.begun} == {"server", "preprocess", "vision", "thinker"}
    ended = [r.getMessage() for r in caplog.records if re.search(r" took \d+\.\d s$", r.getMessage())]
    assert [text.split(" took ")[0] for text in ended if text.startswith("stage thinker")] == [
        f"stage thinker on cpu: {step}" for step in steps
    ]
    assert any(text.startswith("server: reading the checkpoint") for text in ended)


@pytest.mark.parametrize("again", [False, True])
def test_what_starts_again_leaves_graphs_for_later(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(Runner, "capture_between_steps", lambda self: True)
    monkeypatch.setattr(Runner, "capture_graphs", lambda self, *, compiled: 7)
    plan = make_plan(ServeOptions(model=tiny("llama"), overrides=("thinker.kv_memory=4MiB",)))
    plan = plan.starting_again() if again else plan
    config, stage = plan.deployment.lms["thinker"], plan.stage("thinker")
    engine, detail = build_lm_engine(plan.family, config, stage, plan.context_length)
    engine.close()
    assert ("decode graphs captured between steps" in detail) == again
    assert ("7 decode graphs" in detail) == (not again)


def test_a_stage_that_comes_again_says_what_it_is_at() -> None:
    async def run() -> None:
        progress = StartProgress()
        assert progress.text() == "beginning"
        board = StageBoard(("thinker",), lambda stage, message: None, progress)
        board.put("thinker", "ready", "8 blocks")
        board.put("thinker", "restarting")
        assert list(progress.by_who()) == ["thinker"]
        board.begun("thinker", "loading weights (8 MiB)")
        assert board.states() == {"thinker": ("restarting", "loading weights (8 MiB)")}
        board.put("thinker", "ready", "8 blocks")
        assert board.states() == {"thinker": ("ready", "8 blocks")}
        assert progress.text() == "nearly there"

    asyncio.run(run())


def test_steps_come_from_workers_in_order() -> None:
    """They are messages like any other, so one never comes after the stage is ready."""
    from stages.control import FromWorker, decode_from_worker, encode

    sent = FromWorker([StageStep("thinker", "loading weights (8 MiB)"), StageReady("thinker", "8 blocks")])
    assert decode_from_worker(encode(sent)) == sent
