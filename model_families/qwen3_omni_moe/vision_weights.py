"""Qwen3-Omni-MoE: checkpoint names → ours, for the vision tower: Qwen3-VL's under other names of its
mergers."""

from __future__ import annotations

from model_families.omni.weights import thinker_vision_name
from model_families.qwen3_vl.vision_weights import MODULES as QWEN3_VL

MODULES = QWEN3_VL | {
    "merger.ln_q": "merger.norm",
    "merger.mlp.0": "merger.fc1",
    "merger.mlp.2": "merger.fc2",
    "merger_list.ln_q": "deepstack.norm",
    "merger_list.mlp.0": "deepstack.fc1",
    "merger_list.mlp.2": "deepstack.fc2",
}


def vision_name(name: str) -> str | None:
    return thinker_vision_name(name, MODULES)
