"""Runs cases of Triton kernels in a process of their own: on the GPU, else with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def assert_pass(cases: Path) -> None:
    """The flag is read when Triton is imported, which libraries may have done here already."""
    flag = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    plain = ["--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *plain, str(cases)],
        env={**os.environ, **flag},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
