"""Qwen3-Omni-MoE: checkpoint names → ours, for the audio tower."""

from __future__ import annotations

from model_families.omni.weights import thinker_audio_name

MODULES = {
    "conv2d1": "conv1",
    "conv2d2": "conv2",
    "conv2d3": "conv3",
    "conv_out": "flatten",
    "layers.self_attn_layer_norm": "blocks.norm1",
    "layers.self_attn.q_proj": "blocks.attention.q",
    "layers.self_attn.k_proj": "blocks.attention.k",
    "layers.self_attn.v_proj": "blocks.attention.v",
    "layers.self_attn.out_proj": "blocks.attention.out",
    "layers.final_layer_norm": "blocks.norm2",
    "layers.fc1": "blocks.up",
    "layers.fc2": "blocks.down",
    "ln_post": "norm",
    "proj1": "projection1",
    "proj2": "projection2",
}


def audio_name(name: str) -> str | None:
    return thinker_audio_name(name, MODULES)
