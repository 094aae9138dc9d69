"""Qwen3-Omni-MoE: pictures and sound into the thinker, its states and words into the talker, codes into
sound."""

from __future__ import annotations

from model_families.graphs import omni_pipeline

PIPELINE = omni_pipeline("qwen3_omni_moe", speaks=True)
