"""Preprocessing's C code; `python -m preprocess.native` compiles it into the environment."""

from __future__ import annotations

from pathlib import Path

from contracts.compilation import CLibrary

RESAMPLE = CLibrary(name="resample", folder=Path(__file__).parent, sources=("resample.c",))
BASE64 = CLibrary(name="base64", folder=Path(__file__).parent, sources=("base64.c",))
