"""What workers are forked from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
