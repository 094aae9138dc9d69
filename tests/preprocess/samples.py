"""Small seeded images, encoded, and the specs of the two families that the tests use."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from contracts.specs import ImageSpec

QWEN2 = ImageSpec(
    patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280
)
QWEN3 = ImageSpec(
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=65536,
    max_pixels=16777216,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
)
TINY = ImageSpec(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=64 * 64)


def noise(width: int, height: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth with some texture: survives JPEG, and every region differs."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image | np.ndarray, format_name: str = "PNG", **options: object) -> bytes:
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, format_name, **options)
    return buffer.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
