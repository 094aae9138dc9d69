"""ServeOptions: what the command line hands to `stages.launch`; everything else is the deployment file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServeOptions:
    """`model` None = the default model. `overrides` are PATH=VALUE texts. Sizes as text ("2GiB") or bytes."""

    model: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    served_model_name: tuple[str, ...] = ()
    deployment: Path | None = None
    overrides: tuple[str, ...] = ()
    media_root: str | None = None
    kv_memory: str | None = None
    allow_private_addresses: bool = False
    api_key: str | None = None
