"""Runs triton_cases.py in a process of its own: on the GPU, else with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
CASES = Path(__file__).with_name("triton_cases.py")
TIMEOUT_S = 600


def test_the_kernels_pass_their_cases():
    """The flag is read when Triton is imported, which libraries may have done here already."""
    flag = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    plain = ["--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *plain, str(CASES)],
        env={**os.environ, **flag},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
