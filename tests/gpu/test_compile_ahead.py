"""What is compiled before a process touches its GPU is what it then launches there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm_engine.gpu_target import target_of
from stages.planning import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton", reason="the package triton is not installed")

COMPILE_AND_CAPTURE = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from lm_engine.gpu_target import GpuTarget
from lm_engine.memory import allocate_kv
from lm_engine.runner import Runner
from stages.compile_ahead import start_compiling
from stages.options import ServeOptions
from stages.planning import make_plan

model, cache, major, minor, shared = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
settings = ("devices=cuda:0", "max_sequences=2", "max_context=64", "kernels=triton")
small = tuple("thinker." + setting for setting in settings)
options = ServeOptions(model=Path(model), overrides=small, assumed_gpu_memory="8GiB", dtype="bfloat16")
plan = make_plan(options, check_memory=False)
targets = (("cuda:0", GpuTarget((major, minor), shared)),)
plan = replace(plan, options=replace(plan.options, gpu_targets=targets))
compiled = start_compiling(plan, ["thinker"], 4)
assert compiled is not None
assert compiled()
cubins = set(cache.rglob("*.cubin"))
assert cubins

device = torch.device("cuda:0")
decoder = plan.family.load_decoder(device, torch.bfloat16, "triton")
kv = allocate_kv(decoder.config, 64, 16, torch.bfloat16, device)
runner = Runner(decoder, decoder.attention, kv, max_sequences=2, max_length=64)
assert runner.capture_graphs(compiled=True) > 2
runner.close()
more = {path.name for path in set(cache.rglob("*.cubin")) - cubins}
assert not more, f"compiled again: {more}"
"""


def test_a_real_launch_finds_what_was_compiled_without_a_gpu(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    target = target_of(torch.device("cuda:0"))
    arguments = [str(tiny("qwen2_5_vl")), str(tmp_path), *map(str, (*target.capability, target.shared_bytes))]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_AND_CAPTURE, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
