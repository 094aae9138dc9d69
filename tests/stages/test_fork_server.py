"""What workers are forked from."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import stages.options as options_module
from stages.options import ServeOptions, expects_workers
from stages.planning import ROOT
from stages.worker_processes import FRONT_SIGNALS, ForkServer

IMPORTS = """
import threading

import torch

def ask(*_, **__):
    raise AssertionError("a library asks for GPUs as it is imported")

for name in ("is_available", "device_count", "get_device_capability", "get_device_properties", "init"):
    setattr(torch.cuda, name, ask)
import stages.fork_server
stages.fork_server._import_for_gpus()
assert threading.active_count() == 1
"""


def test_its_imports_ask_cuda_for_nothing() -> None:
    """A process that has asked CUDA for its GPUs has forks that cannot use them."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PLAN = """
import sys
from collections.abc import Callable
from pathlib import Path
import stages.fork_server
from pathlib import Path
from stages.options import ServeOptions
from stages.planning import make_plan

before = set(sys.modules)
make_plan(ServeOptions(model=Path(sys.argv[1])), check_memory=False, check_weights=False)
print(*sorted(set(sys.modules) - before))
"""


def test_a_worker_plans_with_what_the_server_has_imported(tiny: Callable[..., Path]) -> None:
    """What a forked worker imports, every worker that comes again waits for: torch's compiler is seconds."""
    command = [sys.executable, "-c", PLAN, str(tiny("qwen2_5_vl"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_signal_to_all_does_not_end_it_as_it_imports(tiny: Callable[..., Path]) -> None:
    """It has been started before there is a plan, and still forks once there is one."""

    async def main() -> None:
        forks = ForkServer()
        forks.start()
        exited = asyncio.Event()
        for number in FRONT_SIGNALS:
            os.kill(forks.pid, number)
        pid = forks.pid
        forks.fork("nobody", b"{}", (), exited.set)
        async with asyncio.timeout(300):
            await exited.wait()  # it has been forked, and could do nothing with such a setup
        assert forks.pid == pid
        forks.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("workers", "text", "has_gpu", "expected"),
    [
        ("file", None, False, False),
        ("file", None, True, True),
        ("file", "[[worker]]\nname = 'a'\n", False, True),
        ("file", "[server]\n", False, False),
        ("per-stage", None, False, True),
        ("one", None, True, False),
    ],
)
def test_workers_are_expected_before_anything_is_planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: Literal["file", "one", "per-stage"],
    text: str | None,
    has_gpu: bool,
    expected: bool,
) -> None:
    control = tmp_path / "nvidiactl"
    if has_gpu:
        control.touch()
    monkeypatch.setattr(options_module, "GPU_CONTROL", control)
    deployment = None if text is None else tmp_path / "deployment.toml"
    if deployment is not None and text is not None:
        deployment.write_text(text)
    assert expects_workers(ServeOptions(workers=workers, deployment=deployment)) == expected


def test_a_deployment_that_cannot_be_read_expects_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "GPU_CONTROL", tmp_path / "nvidiactl")
    assert not expects_workers(ServeOptions(deployment=tmp_path / "missing.toml"))
