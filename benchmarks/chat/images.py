"""Seeded synthetic images with detail at every scale, encoded once into the bytes that requests carry."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.chat.distribution import Size

ImageFormat = Literal["jpeg", "png"]
JPEG_QUALITY = 90
NUM_SHAPES = 40
NUM_OCTAVES = 6
GRAIN = 12


@dataclass(frozen=True)
class EncodedImage:
    """`data_url` goes into the body as it is; `digest` stands for the image where prefixes are compared."""

    data_url: bytes
    digest: bytes
    size: Size

    @classmethod
    def of(cls, content: bytes, mime: str, size: Size) -> EncodedImage:
        return cls.of_url(f"data:{mime};base64,".encode() + base64.b64encode(content), size)

    @classmethod
    def of_url(cls, url: bytes, size: Size) -> EncodedImage:
        return cls(url, hashlib.blake2b(url, digest_size=16).digest(), size)


def synthesize(seed: int, size: Size, image_format: ImageFormat) -> EncodedImage:
    """The same arguments give the same bytes under the same Pillow and NumPy.

    Value noise over six octaves stands for surfaces, shapes for edges, grain for a sensor: a solid picture
    would compress to nothing and flatter every step between the socket and the encoder.
    """
    rng = np.random.default_rng(seed)
    picture = _noise(rng, size)
    _draw_shapes(rng, picture)
    grain_HWC = rng.integers(-GRAIN, GRAIN + 1, (size.height, size.width, 1), dtype=np.int16)
    pixels_HWC = np.clip(np.asarray(picture).astype(np.int16) + grain_HWC, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    quality = {"quality": JPEG_QUALITY} if image_format == "jpeg" else {"compress_level": 1}
    Image.fromarray(pixels_HWC).save(buffer, image_format, **quality)
    return EncodedImage.of(buffer.getvalue(), f"image/{image_format}", size)


def _noise(rng: np.random.Generator, size: Size) -> Image.Image:
    half = (size.width + 1) // 2, (size.height + 1) // 2  # the finest cells are far larger than two pixels
    total_HWC = np.zeros((half[1], half[0], 3), np.float32)
    for octave in range(NUM_OCTAVES):
        cells = 2 << octave
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        smooth = coarse.resize(half, Image.Resampling.BICUBIC)
        total_HWC += np.asarray(smooth, np.float32) / (1.6**octave)
    low, high = float(total_HWC.min()), float(total_HWC.max())
    noise_HWC = ((total_HWC - low) * (255 / max(high - low, 1.0))).astype(np.uint8)
    return Image.fromarray(noise_HWC).resize((size.width, size.height), Image.Resampling.BILINEAR)


def _draw_shapes(rng: np.random.Generator, picture: Image.Image) -> None:
    draw = ImageDraw.Draw(picture)
    width, height = picture.size
    for _ in range(NUM_SHAPES):
        x, y = int(rng.integers(0, width)), int(rng.integers(0, height))
        right, bottom = x + int(rng.integers(1, width // 6 + 2)), y + int(rng.integers(1, height // 6 + 2))
        red, green, blue = (int(channel) for channel in rng.integers(0, 256, 3))
        color = (red, green, blue)
        match int(rng.integers(0, 4)):
            case 0:
                draw.rectangle((x, y, right, bottom), fill=color)
            case 1:
                draw.ellipse((x, y, right, bottom), outline=color, width=3)
            case 2:
                draw.line((x, y, right, bottom), fill=color, width=2)
            case _:
                draw.text((x, y), str(rng.integers(0, 10**6)), fill=color)
