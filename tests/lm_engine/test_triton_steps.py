"""The kernels at the two ends of a step pass their cases: in a file of their own, for another process to run
beside those of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")
from tests.lm_engine.kernel_process import assert_pass

HERE = Path(__file__).parent


@pytest.mark.parametrize("cases", ["sampling_cases.py", "table_cases.py"])
def test_the_kernels_pass_their_cases(cases):
    assert_pass(HERE / cases)
