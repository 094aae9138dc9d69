"""Compiles the C kernels for this machine into the environment: `python -m lm_engine.native.build`."""

from __future__ import annotations

from pathlib import Path

from contracts.compilation import NATIVE, BuildError, CLibrary, cache_directory

__all__ = ["BuildError", "build", "cache_directory", "library_path"]

KERNELS = CLibrary(
    name="kernels",
    folder=Path(__file__).parent,
    sources=("pool.c", "tile.c", "linear.c", "elementwise.c", "attention.c", "pass.c", "decode.c"),
    headers=("kernels.h",),
    linked=("-lm", "-lpthread"),
)


def library_path(directory: Path, machine_flags: tuple[str, ...] = NATIVE) -> Path:
    return KERNELS.path(directory, machine_flags)


def build(directory: Path, machine_flags: tuple[str, ...] = NATIVE) -> Path:
    return KERNELS.build(directory, machine_flags)


if __name__ == "__main__":
    print(build(cache_directory()))
