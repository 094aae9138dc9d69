"""What workers are forked from."""

from __future__ import annotations

import subprocess
import sys

from stages.planning import ROOT

IMPORTS = """
import torch

def ask(*_, **__):
    raise AssertionError("a library asks for GPUs as it is imported")

for name in ("is_available", "device_count", "get_device_capability", "get_device_properties", "init"):
    setattr(torch.cuda, name, ask)
import stages.fork_server
"""


def test_its_imports_ask_cuda_for_nothing() -> None:
    """A process that has asked CUDA for its GPUs has forks that cannot use them."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
