"""Qwen3-VL-MoE: checkpoint names → ours, for the text half, as in Qwen3-VL."""

from __future__ import annotations

from model_families.qwen3_vl.weights import text_name

__all__ = ["text_name"]
