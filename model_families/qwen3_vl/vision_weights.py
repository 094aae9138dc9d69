"""Qwen3-VL: checkpoint names → ours, for the vision tower."""

from __future__ import annotations

from model_families.vision.weights import rename_vision

MODULES = {
    "patch_embed.proj": "patch_embed",
    "pos_embed": "position_table",
    "blocks.norm1": "blocks.norm1",
    "blocks.norm2": "blocks.norm2",
    "blocks.attn.qkv": "blocks.attention.qkv",
    "blocks.attn.proj": "blocks.attention.out",
    "blocks.mlp.linear_fc1": "blocks.mlp.up",
    "blocks.mlp.linear_fc2": "blocks.mlp.down",
    "merger.norm": "merger.norm",
    "merger.linear_fc1": "merger.fc1",
    "merger.linear_fc2": "merger.fc2",
    "deepstack_merger_list.norm": "deepstack.norm",
    "deepstack_merger_list.linear_fc1": "deepstack.fc1",
    "deepstack_merger_list.linear_fc2": "deepstack.fc2",
}


def vision_name(name: str) -> str | None:
    return rename_vision(name, MODULES)
