"""Runs the cases of Triton kernels in processes of their own: on the GPU, else with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
HERE = Path(__file__).parent
CASES = [
    HERE / "triton_cases.py",
    HERE / "sampling_cases.py",
    HERE / "walk_cases.py",
    HERE / "table_cases.py",
    HERE / "talker" / "graph_cases.py",
    HERE.parent / "vocoder" / "kernel_cases.py",
]
TIMEOUT_S = 600


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_the_kernels_pass_their_cases(cases):
    """The flag is read when Triton is imported, which libraries may have done here already."""
    flag = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    plain = ["--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *plain, str(cases)],
        env={**os.environ, **flag},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
