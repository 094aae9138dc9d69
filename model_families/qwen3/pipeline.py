"""Qwen3: the language model alone."""

from __future__ import annotations

from model_families.graphs import text_pipeline

PIPELINE = text_pipeline("qwen3")
