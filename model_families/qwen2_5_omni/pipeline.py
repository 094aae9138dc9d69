"""Qwen2.5-Omni: pictures and sound into the thinker, its states and words into the talker, codes into
sound."""

from __future__ import annotations

from model_families.graphs import omni_pipeline

PIPELINE = omni_pipeline("qwen2_5_omni", speaks=True)
