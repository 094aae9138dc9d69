"""Qwen2.5-VL: checkpoint names → ours, for the vision tower."""

from __future__ import annotations

from model_families.vision.weights import rename_vision

MODULES = {
    "patch_embed.proj": "patch_embed",
    "blocks.norm1": "blocks.norm1",
    "blocks.norm2": "blocks.norm2",
    "blocks.attn.qkv": "blocks.attention.qkv",
    "blocks.attn.proj": "blocks.attention.out",
    "blocks.mlp.gate_proj": "blocks.mlp.gate",
    "blocks.mlp.up_proj": "blocks.mlp.up",
    "blocks.mlp.down_proj": "blocks.mlp.down",
    "merger.ln_q": "merger.norm",
    "merger.mlp.0": "merger.fc1",
    "merger.mlp.2": "merger.fc2",
}


def vision_name(name: str) -> str | None:
    return rename_vision(name, MODULES)
