"""Qwen2-VL: checkpoint names → ours, for the text half."""

from __future__ import annotations

from model_families.decoder_weights import rename_text

# As transformers 5 names them, then as the published checkpoints do.
PREFIXES = ("model.language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")


def text_name(name: str) -> str | None:
    return None if name.startswith(VISION_PREFIXES) else rename_text(name, PREFIXES)
