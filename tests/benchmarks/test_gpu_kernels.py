"""The benchmark of single kernels, in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.components.gpu_kernels import HEADER, Figures
from benchmarks.text_table import render

pytest.importorskip("triton", reason="the package triton is not installed")
ROOT = Path(__file__).resolve().parents[2]
KINDS = ("qkv", "output", "gate_up", "down", "head", "decode attention", "decode attention of fp8", "experts")
KINDS += ("sampling", "norm")


def test_every_kernel_runs_at_tiny_shapes(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "benchmarks.components.gpu_kernels", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["ceilings"] is None
    names = [one["name"] for one in found["kernels"]]
    assert len(set(names)) == len(names)
    assert {f"{kind}, {rows} rows" for kind in KINDS for rows in (1, 2)} <= set(names)
    assert {"2 layers, 1 rows", "2 layers, 2 rows"} <= set(names)
    assert {"mixed attention, 8 tokens", "mixed attention, a turn of 9 and 1 decodes"} <= set(names)
    for one in found["kernels"]:
        assert one["num_bytes"] > 0
        assert one["floor_us"] is None
        assert one["name"] in done.stdout


def test_every_variant_runs_at_tiny_shapes(tmp_path: Path) -> None:
    file = tmp_path / "variants.json"
    command = [sys.executable, "-m", "benchmarks.components.gpu_kernels", "--variants", "--quick"]
    done = subprocess.run([*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [one["name"] for one in json.loads(file.read_text())["kernels"]]
    assert len(set(names)) == len(names)
    kinds = (
        "turn of",
        "1 prompts",
        "4 prompts",
        "2 layers, a turn",
        "down",
        "decode attention",
        "tower, frames",
    )
    for kind in kinds:
        assert any(name.startswith(kind) for name in names), kind


def test_a_row_says_how_near_a_kernel_comes_to_the_ceiling() -> None:
    one = Figures("copy", time_us=100.0, num_bytes=400_000_000, num_operations=0, floor_us=80.0)
    assert one.row == ["copy", "100.0", "4000", "-", "80.0%"]
    other = Figures("product", time_us=100.0, num_bytes=1000, num_operations=50_000_000_000, floor_us=None)
    assert other.row == ["product", "100.0", "0.010", "500.0", "-"]
    assert render(HEADER, [one.row, other.row]).count("\n") == 2
