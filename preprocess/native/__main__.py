"""Compiles the C code at set-up."""

from __future__ import annotations

from contracts.compilation import cache_directory
from preprocess.native import BASE64, RESAMPLE

if __name__ == "__main__":
    for library in (RESAMPLE, BASE64):
        print(library.build(cache_directory()))
