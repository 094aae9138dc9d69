"""A stage's setting of how steps with chunks divide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import EngineError
from lm_engine.gpu_target import GpuTarget
from stages.compile_ahead import launches_of
from stages.launch import serve_service
from stages.options import ServeOptions
from stages.planning import make_plan

HOPPER = GpuTarget((9, 0), 232448)


def test_a_stage_that_cannot_walk_refuses_to_start(tiny: Callable[[str], Path]) -> None:
    settings = (
        "thinker.mixed_attention=walks",
        "thinker.kernels=reference",
        "thinker.kv_memory=8MiB",
    )

    async def start() -> None:
        async with serve_service(ServeOptions(model=tiny("llama"), dtype="float32", overrides=settings)):
            pass

    with pytest.raises(EngineError, match=r"stage\.thinker\.mixed_attention = 'walks': the \w+ attention"):
        asyncio.run(start())


def test_what_is_compiled_ahead_follows_the_setting(tiny: Callable[[str], Path]) -> None:
    """The tiny model's heads are too small for walks: it is refused there too."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    overrides = tuple(
        f"thinker.{setting}"
        for setting in ("devices=cuda:0", "max_sequences=2", "max_context=64", "mixed_attention=walks")
    )
    options = ServeOptions(
        model=tiny("llama"), overrides=overrides, assumed_gpu_memory="80GiB", dtype="bfloat16"
    )
    plan = make_plan(options, check_memory=False)
    plan = replace(plan, options=replace(plan.options, gpu_targets=(("cuda:0", HOPPER),)))
    with pytest.raises(EngineError, match=r"heads of 64 or 128"):
        launches_of(plan, "thinker", plan.deployment.lms["thinker"], HOPPER)
