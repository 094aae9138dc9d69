"""Compiles the C kernels for this machine into the environment: `python -m lm_engine.native.build`."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = ("pool.c", "tile.c", "linear.c", "elementwise.c", "attention.c")
HEADERS = ("kernels.h",)
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi")
NATIVE = ("-march=native",)
BUILD_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels could not be compiled; the message names the reason."""


def cache_directory() -> Path:
    """Inside the virtual environment that runs this, gone with it; where there is none, the user's cache."""
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "share" / "omnistage" / "native"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "omnistage" / "native"


def library_path(directory: Path, machine_flags: tuple[str, ...] = NATIVE) -> Path:
    """Where the library of these sources, flags and CPU lies, built or not."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update((Path(__file__).parent / name).read_bytes())
    digest.update("\0".join((*FLAGS, *machine_flags, platform.machine(), _cpu_features())).encode())
    return directory / f"kernels-{digest.hexdigest()[:24]}.so"


def build(directory: Path, machine_flags: tuple[str, ...] = NATIVE) -> Path:
    """Compiles unless it is there already. Processes may race: each writes its own file and renames it."""
    target = library_path(directory, machine_flags)
    if target.exists():
        return target
    compiler = shutil.which("gcc")
    if compiler is None:
        raise BuildError("gcc is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as workplace:
        objects = [f"{workplace}/{Path(name).stem}.o" for name in SOURCES]
        for name, target_object in zip(SOURCES, objects, strict=True):
            source = str(Path(__file__).parent / name)
            _run([compiler, *FLAGS, *WARNINGS, *machine_flags, "-c", source, "-o", target_object])
        library = f"{workplace}/kernels.so"
        _run([compiler, "-shared", *objects, "-o", library, "-lm", "-lpthread"])
        os.replace(library, target)
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"gcc could not run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"gcc failed: {done.stderr.strip()[:300]}")


def _cpu_features() -> str:
    """The CPU's instruction sets: a cache shared between machines holds one library for each kind."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


if __name__ == "__main__":
    print(build(cache_directory()))
