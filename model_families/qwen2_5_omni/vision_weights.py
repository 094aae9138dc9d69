"""Qwen2.5-Omni: checkpoint names → ours, for the vision tower: Qwen2.5-VL's, but for queries, keys and values
that are stored apart."""

from __future__ import annotations

from model_families.omni.weights import thinker_vision_name
from model_families.qwen2_5_vl.vision_weights import MODULES as FUSED

MODULES = FUSED | {
    "blocks.attn.q": "blocks.attention.qkv@0",
    "blocks.attn.k": "blocks.attention.qkv@1",
    "blocks.attn.v": "blocks.attention.qkv@2",
}


def vision_name(name: str) -> str | None:
    return thinker_vision_name(name, MODULES)
