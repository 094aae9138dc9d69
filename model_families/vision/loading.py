"""A family's tower with its weights, as the encoder pool drives it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn

from contracts.specs import MediaSpecs
from lm_engine.layers.selection import select_kernels
from model_families.dummy_weights import open_checkpoint
from model_families.vision.attention import TritonPackedAttention, VarlenAttention
from model_families.vision.config import VisionConfig
from model_families.vision.encoder import VisionEncoder, VisionTower
from model_families.vision.fused import fuse_blocks
from model_families.vision.layers import PackedSelfAttention
from model_families.vision.layouts import LayoutT
from model_families.vision.packing import Segments
from model_families.vision.weights import VisionName, load_tower


def load_vision_encoder(
    family: str,
    folder: Path,
    tower: VisionTower[LayoutT],
    config: VisionConfig,
    specs: MediaSpecs,
    vision_name: VisionName,
    device: torch.device,
    dtype: torch.dtype,
) -> VisionEncoder[LayoutT]:
    """`tower` was built on the meta device. Raises EngineError when the checkpoint does not fit it."""
    with open_checkpoint(folder) as checkpoint:
        fingerprint = load_tower(checkpoint, tower, vision_name, device, dtype)
    if device.type == "cuda":
        kernels = select_kernels("auto", device, dtype)
        if kernels.name == "triton":
            _pack_attention(tower, device, dtype)
            fuse_blocks(tower.blocks, kernels)
    parts = (
        msgspec.json.encode(config),
        msgspec.json.encode(specs),
        fingerprint.encode(),
        str(dtype).encode(),
    )
    return VisionEncoder(tower, specs, encoder_id(family, parts), device, dtype)


def _pack_attention(tower: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """By the Triton kernel, where it is the faster one: compiled now, not when the first picture waits."""
    for module in tower.modules():
        if not isinstance(module, PackedSelfAttention):
            continue
        num_heads, head_dim = module.num_heads, module.qkv.in_features // module.num_heads
        if isinstance(module.backend, VarlenAttention) and TritonPackedAttention.takes(dtype, head_dim):
            module.backend = TritonPackedAttention()
            q, k, v = torch.zeros(1, 3, num_heads, head_dim, dtype=dtype, device=device).unbind(1)
            module.backend.attend(q, k, v, Segments(np.array([1]), device))


def encoder_id(family: str, parts: tuple[bytes, ...]) -> str:
    """Equal for two encoders only if they map equal pixels to equal embeddings."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"{family}-{digest.hexdigest()}"
