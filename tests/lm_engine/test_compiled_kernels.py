"""Compiles the kernels for a GPU in a process of its own, where Triton takes the GPU for being there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")
CASES = Path(__file__).with_name("compile_cases.py")
TIMEOUT_S = 1800


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_compile_for_a_gpu(which: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-m",
            which,
            CASES,
        ],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
