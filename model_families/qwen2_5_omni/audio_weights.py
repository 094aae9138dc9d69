"""Qwen2.5-Omni: checkpoint names → ours, for the audio tower."""

from __future__ import annotations

from model_families.omni.weights import thinker_audio_name

MODULES = {
    "conv1": "conv1",
    "conv2": "conv2",
    "layers.self_attn_layer_norm": "blocks.norm1",
    "layers.self_attn.q_proj": "blocks.attention.q",
    "layers.self_attn.k_proj": "blocks.attention.k",
    "layers.self_attn.v_proj": "blocks.attention.v",
    "layers.self_attn.out_proj": "blocks.attention.out",
    "layers.final_layer_norm": "blocks.norm2",
    "layers.fc1": "blocks.up",
    "layers.fc2": "blocks.down",
    "ln_post": "norm",
    "proj": "projection",
}


def audio_name(name: str) -> str | None:
    # Embeddings of markers that the tower does not use: the prompt spells them as tokens.
    return None if "audio_bos_eos_token" in name else thinker_audio_name(name, MODULES)
