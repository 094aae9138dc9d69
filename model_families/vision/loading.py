"""A family's tower with its weights, as the encoder pool drives it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import xxhash

from contracts.specs import MediaSpecs
from lm_engine.layers.selection import select_kernels
from model_families.dummy_weights import open_checkpoint
from model_families.vision.config import VisionConfig
from model_families.vision.encoder import VisionEncoder, VisionTower
from model_families.vision.fused import fuse_blocks
from model_families.vision.weights import VisionName, load_tower


def load_vision_encoder(
    family: str,
    folder: Path,
    tower: VisionTower,
    config: VisionConfig,
    specs: MediaSpecs,
    vision_name: VisionName,
    device: torch.device,
    dtype: torch.dtype,
) -> VisionEncoder:
    """`tower` was built on the meta device. Raises EngineError when the checkpoint does not fit it."""
    with open_checkpoint(folder) as checkpoint:
        fingerprint = load_tower(checkpoint, tower, vision_name, device, dtype)
    if device.type == "cuda":
        kernels = select_kernels("auto", device, dtype)
        if kernels.name == "triton":
            fuse_blocks(tower.blocks, kernels)
    parts = (
        msgspec.json.encode(config),
        msgspec.json.encode(specs),
        fingerprint.encode(),
        str(dtype).encode(),
    )
    return VisionEncoder(tower, specs, encoder_id(family, parts), device, dtype)


def encoder_id(family: str, parts: tuple[bytes, ...]) -> str:
    """Equal for two encoders only if they map equal pixels to equal embeddings."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"{family}-{digest.hexdigest()}"
