"""Llama: text only."""

from __future__ import annotations

from pathlib import Path

from model_families.processing import Processor, TextProcessor


def open_processor(folder: Path) -> Processor:
    return TextProcessor()
