"""Qwen3, dense: checkpoint names → ours, for the text half."""

from __future__ import annotations

from model_families.decoder_weights import rename_text

PREFIXES = ("model.",)


def text_name(name: str) -> str | None:
    return rename_text(name, PREFIXES)
