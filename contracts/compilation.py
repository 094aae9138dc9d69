"""Compiles a folder's C sources for this machine into the environment, once for each kind of CPU."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
    """The library could not be compiled or loaded; the message names the reason."""


@dataclass(frozen=True)
class CLibrary:
    """`sources` and `headers` lie in `folder`; `linked`: what the linker is told besides."""

    name: str
    folder: Path
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()

    def path(self, directory: Path, machine_flags: tuple[str, ...] = NATIVE) -> Path:
        """Where the library of these sources, flags and CPU lies, built or not."""
        digest = hashlib.sha256()
        for name in (*self.sources, *self.headers):
            digest.update((self.folder / name).read_bytes())
        digest.update("\0".join((*FLAGS, *machine_flags, platform.machine(), _cpu_features())).encode())
        return directory / f"{self.name}-{digest.hexdigest()[:24]}.so"

    def build(self, directory: Path, machine_flags: tuple[str, ...] = NATIVE) -> Path:
        """Compiles unless it is there already. Processes may race: each writes its own file and renames
        it."""
        target = self.path(directory, machine_flags)
        if target.exists():
            return target
        compiler = shutil.which("gcc")
        if compiler is None:
            raise BuildError("gcc is not installed")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as workplace:
            objects = [f"{workplace}/{Path(name).stem}.o" for name in self.sources]
            for name, target_object in zip(self.sources, objects, strict=True):
                source = str(self.folder / name)
                _run([compiler, *FLAGS, *WARNINGS, *machine_flags, "-c", source, "-o", target_object])
            library = f"{workplace}/{self.name}.so"
            _run([compiler, "-shared", *objects, "-o", library, *self.linked])
            os.replace(library, target)
        return target


def cache_directory() -> Path:
    """Inside the virtual environment that runs this, gone with it; where there is none, the user's cache."""
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "share" / "omnistage" / "native"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "omnistage" / "native"


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
