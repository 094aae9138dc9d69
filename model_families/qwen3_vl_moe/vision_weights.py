"""Qwen3-VL-MoE: checkpoint names → ours, for the vision tower, as in Qwen3-VL."""

from __future__ import annotations

from model_families.qwen3_vl.vision_weights import vision_name

__all__ = ["vision_name"]
