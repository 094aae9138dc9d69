"""What `omnistage serve` and `omnistage plan` are told on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Between two kernels the runner's thread needs the interpreter for microseconds; at Python's own 5 ms a busy
# event loop would keep it waiting for longer than the kernels take.
SWITCH_INTERVAL_S = 2e-4


@dataclass(frozen=True)
class ServeOptions:
    """`model`: a checkpoint folder, None for the default model. `overrides`: PATH=VALUE for the deployment.

    `kv_memory`: bytes of KV cache as text ("2GiB"), None for the deployment's own.
    """

    model: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    served_model_name: tuple[str, ...] = ()  # the first is the canonical one
    deployment: Path | None = None
    overrides: tuple[str, ...] = ()
    media_root: Path | None = None
    kv_memory: str | None = None
    allow_private_addresses: bool = False
    api_key: str | None = None
    workers: Literal["file", "one", "per-stage"] = "file"  # "file": as the deployment's [[worker]] groups say
    gpu_memory: tuple[tuple[str, int], ...] = ()  # (GPU, bytes free before any stage loaded); (): ask them
