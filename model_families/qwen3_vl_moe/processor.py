"""Qwen3-VL-MoE: pictures, their tokens and their M-RoPE positions, as in Qwen3-VL."""

from __future__ import annotations

from model_families.qwen3_vl.processor import open_processor

__all__ = ["open_processor"]
