"""A worker's kernels, compiled by processes of its own before it has a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm_engine.gpu_target import GpuTarget
from stages.compile_ahead import Compilation, _fork, start_compiling
from stages.options import ServeOptions
from stages.planning import ROOT, make_plan

pytest.importorskip("triton", reason="the package triton is not installed")

COMPILE = """
import sys
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from lm_engine.gpu_target import GpuTarget
from lm_engine.triton.ahead import compile_only
from stages import compile_ahead
from stages.compile_ahead import launches_of, start_compiling
from stages.options import ServeOptions
from stages.planning import make_plan

HOPPER = GpuTarget((9, 0), 232448)
settings = ("devices=cuda:0", "max_sequences=2", "max_context=64", "kernels=triton")
small = tuple("thinker." + setting for setting in settings)
options = ServeOptions(model=Path(sys.argv[1]), overrides=small, assumed_gpu_memory="80GiB", dtype="bfloat16")
plan = make_plan(options, check_memory=False)
plan = replace(plan, options=replace(plan.options, gpu_targets=(("cuda:0", HOPPER),)))
compiled = start_compiling(plan, ["thinker"], 2)
assert compiled is not None
assert compiled()
assert compiled(), "the answer stays"
compile_ahead._list_and_compile = None  # would fail if it were asked again
again = start_compiling(plan, ["thinker"], 2)
assert again is not None
assert again()
fp8 = structs.replace(plan.deployment.lms["thinker"], kv_dtype="fp8")
other = replace(plan, deployment=structs.replace(plan.deployment, lms={"thinker": fp8}))
assert compile_ahead._stamp(other, ["thinker"], {}) != compile_ahead._stamp(plan, ["thinker"], {})
cubins = set(Path(sys.argv[2]).rglob("*.cubin"))
launches = launches_of(plan, "thinker", plan.deployment.lms["thinker"], HOPPER)
assert len(cubins) == len(launches) > 8
compile_only(HOPPER)
for launch in launches:
    launch.compile()
assert set(Path(sys.argv[2]).rglob("*.cubin")) == cubins, "what was compiled ahead was not found"
"""


def test_kernels_are_in_the_cache_when_they_are_needed(tiny: Callable[..., Path], tmp_path: Path) -> None:
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tiny("qwen2_5_vl")), str(tmp_path)],
        cwd=ROOT,
        env=without | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", ["no target", "no such kernels", "on the CPU"])
def test_nothing_is_compiled_for_what_launches_nothing(tiny: Callable[..., Path], fault: str) -> None:
    devices = "cpu" if fault == "on the CPU" else "cuda:0"
    kernels = "reference" if fault == "no such kernels" else "auto"
    overrides = (f"thinker.devices={devices}", f"thinker.kernels={kernels}")
    options = ServeOptions(model=tiny("llama"), overrides=overrides, assumed_gpu_memory="80GiB")
    plan = make_plan(options, check_memory=False)
    targets = () if fault == "no target" else (("cuda:0", GpuTarget((9, 0), 1)),)
    plan = replace(plan, options=replace(plan.options, gpu_targets=targets))
    assert start_compiling(plan, ["thinker"], 1) is None


def test_a_process_that_cannot_be_forked_says_so(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ("thinker.devices=cuda:0",)
    options = ServeOptions(model=tiny("llama"), overrides=overrides, assumed_gpu_memory="80GiB")
    plan = make_plan(options, check_memory=False)
    plan = replace(plan, options=replace(plan.options, gpu_targets=(("cuda:0", GpuTarget((9, 0), 1)),)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert start_compiling(plan, ["thinker"], 1) is None
    assert "has touched a GPU: kernels of thinker" in caplog.text


def test_a_compiler_that_fails_is_told_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no room")

    compiled = Compilation(_fork("compiling", fail))
    assert not compiled()
    assert not compiled()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
