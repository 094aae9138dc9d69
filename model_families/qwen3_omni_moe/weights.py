"""Qwen3-Omni-MoE: checkpoint names → ours, for the thinker's text half."""

from __future__ import annotations

from model_families.omni.weights import thinker_text_name as text_name

__all__ = ["text_name"]
