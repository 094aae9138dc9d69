"""What a published number needs beside it: the command, the hardware, the versions, the date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

_PACKAGES = ("omnistage", "torch", "transformers", "httptools", "msgspec", "numpy", "pillow", "uvloop")
_NVIDIA_SMI_TIMEOUT_S = 10


class Environment(msgspec.Struct, frozen=True):
    """Of the machine the client runs on, which for a server elsewhere is not the machine measured."""

    command: str
    date_utc: str
    cpu: str
    num_cores: int
    num_cores_allowed: int
    memory_bytes: int
    load_1min: float
    """Processes that wanted a core when the report was made; above the cores, the machine was busy."""
    gpus: tuple[str, ...]
    system: str
    python: str
    packages: dict[str, str]

    def lines(self) -> list[str]:
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        memory_gib = self.memory_bytes / 2**30
        return [
            f"command   {self.command}",
            f"date      {self.date_utc}",
            f"hardware  {self.cpu}, {self.num_cores_allowed} of {self.num_cores} cores, {memory_gib:.0f} GiB;"
            f" load {self.load_1min:.1f}",
            f"GPU       {'; '.join(self.gpus) or 'none'}",
            f"versions  {self.system}, Python {self.python}, {packages}",
        ]


def describe_environment(command: Sequence[str]) -> Environment:
    """`command` is the argument vector that reproduces the run."""
    return Environment(
        command=shlex.join(command),
        date_utc=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        cpu=_cpu_model(),
        num_cores=os.cpu_count() or 1,
        num_cores_allowed=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_1min=os.getloadavg()[0],
        gpus=_gpus(),
        system=platform.platform(),
        python=platform.python_version(),
        packages=_versions(),
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpus() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ("nvidia-smi did not answer",)
    return tuple(line.strip() for line in result.stdout.splitlines()) if result.returncode == 0 else ()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
