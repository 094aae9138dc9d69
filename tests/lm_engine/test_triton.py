"""Layers' kernels pass their cases."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")
from tests.lm_engine.kernel_process import assert_pass

HERE = Path(__file__).parent
CASES = [
    HERE / "triton_cases.py",
    HERE / "walk_cases.py",
    HERE / "talker" / "graph_cases.py",
    HERE.parent / "vocoder" / "kernel_cases.py",
]


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_the_kernels_pass_their_cases(cases):
    assert_pass(cases)
