"""Qwen3-VL-MoE: pictures through the vision tower into the language model."""

from __future__ import annotations

from model_families.graphs import vision_pipeline

PIPELINE = vision_pipeline("qwen3_vl_moe")
