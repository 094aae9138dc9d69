"""Compiles the workers' C code at set-up."""

from __future__ import annotations

from contracts.compilation import cache_directory
from preprocess.native import RESAMPLE

if __name__ == "__main__":
    print(RESAMPLE.build(cache_directory()))
