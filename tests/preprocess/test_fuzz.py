"""200 generated files, odd and broken: each is an image or a 400, and no worker ends."""

from __future__ import annotations

import asyncio
import random
import struct

import pytest
from PIL import Image, ImageFile

from contracts.errors import MediaError
from contracts.media import MediaOptions
from contracts.specs import MediaLimits
from preprocess.jobs import MediaJob, PoolConfig
from preprocess.pool import PreprocessPool
from preprocess.recipes import ImageRecipe
from preprocess.resize import pixel_budget
from tests.preprocess.samples import TINY, encode, picture

NUM_FILES = 200
_RELABELLED = {"4:1:1": ("4:2:0", 0x22, 0x41), "4:4:0": ("4:2:2", 0x21, 0x12)}


def _jpeg(rng: random.Random, image: Image.Image) -> bytes:
    options: dict[str, object] = {"quality": rng.choice([1, 30, 95]), "progressive": rng.random() < 0.5}
    image = image.convert(rng.choice(["RGB", "L", "CMYK"]))
    layout = rng.choice(["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0"]) if image.mode == "RGB" else ""
    if layout in _RELABELLED:
        image = image.resize((64, 32))
    if layout:
        options["subsampling"] = _RELABELLED.get(layout, (layout,))[0]
    if rng.random() < 0.3:
        options["restart_marker_blocks"] = 1
    if rng.random() < 0.4:
        options["icc_profile"] = rng.randbytes(rng.choice([1, 128, 200_000]))
    data = encode(image, "JPEG", **options)
    if layout in _RELABELLED:
        data = _relabel(data, *_RELABELLED[layout][1:])
    if rng.random() < 0.4:  # a huge, random EXIF block, several times
        block = b"Exif\0\0" + rng.choice([b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08"]) + rng.randbytes(65_000)
        data = data[:2] + (b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block) * 2 + data[2:]
    return data


def _relabel(jpeg: bytes, old: int, new: int) -> bytes:
    """Other sampling factors of luma with as many blocks: Pillow cannot write these layouts itself."""
    frame = max(jpeg.find(b"\xff\xc0\x00\x11"), jpeg.find(b"\xff\xc2\x00\x11"))
    assert jpeg[frame + 11] == old
    return jpeg[: frame + 11] + bytes([new]) + jpeg[frame + 12 :]


def _other(rng: random.Random, image: Image.Image) -> bytes:
    format_name = rng.choice(["PNG", "GIF", "WEBP", "BMP", "TIFF"])
    modes = {
        "PNG": ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"],
        "GIF": ["P", "L"],
        "BMP": ["RGB", "L", "P", "1"],
    }
    mode = rng.choice(modes.get(format_name, ["RGB", "RGBA"]))
    image = image.convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
    options: dict[str, object] = {}
    if format_name == "TIFF":
        options["compression"] = rng.choice(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])
    if format_name in ("PNG", "WEBP") and rng.random() < 0.3:
        options["icc_profile"] = rng.randbytes(300)
    if format_name in ("GIF", "WEBP", "PNG") and rng.random() < 0.3:
        options |= {"save_all": True, "append_images": [image.rotate(90 * n) for n in (1, 2)], "duration": 40}
    return encode(image, format_name, **options)


def _break(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(1, len(data))]
    broken = bytearray(data)
    if kind == 1:
        for _ in range(rng.choice([1, 3, 30])):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
    elif kind == 2:
        for _ in range(4):  # headers are where sizes and offsets are
            broken[rng.randrange(min(64, len(broken)))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
    else:
        start = rng.randrange(len(broken))
        del broken[start : start + rng.randrange(1, 200)]
    return bytes(broken)


def files() -> list[tuple[bool, bytes]]:
    """(intact, encoded) pairs, the same ones in every run."""
    rng = random.Random(2024)
    made = []
    for number in range(NUM_FILES):
        image = picture(rng.randint(1, 90), rng.randint(1, 90), seed=number)
        data = _jpeg(rng, image) if rng.random() < 0.5 else _other(rng, image)
        intact = number % 2 == 0
        made.append((intact, data if intact else _break(rng, data)))
    return made


def test_every_file_is_an_image_or_a_400_and_no_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 20)  # room for the encoder to write huge headers

    async def outcome(pool: PreprocessPool, data: bytes) -> str | None:
        job = MediaJob(data, b"d" * 16, ImageRecipe(TINY, pixel_budget(TINY, MediaOptions())))
        try:
            done = await pool.process(job)
        except MediaError as error:  # a 400; anything else fails the test
            return error.message
        done.lease.release()
        return None

    async def scenario() -> None:
        limits = MediaLimits(max_source_pixels=1_000_000, worker_memory_bytes=256 << 20)
        config = PoolConfig(num_workers=1, arena_bytes=1 << 20, limits=limits, max_queued_jobs=NUM_FILES)
        pool = PreprocessPool(config)
        try:
            async with asyncio.timeout(120):
                await pool.start()
                made = files()
                outcomes = await asyncio.gather(*(outcome(pool, data) for _, data in made))
            failures = [text for (intact, _), text in zip(made, outcomes, strict=True) if intact and text]
            assert failures == []
            assert all(len(text) < 200 for text in outcomes if text)
            assert sum(text is not None for text in outcomes) > 30  # the broken half was really broken
            assert pool.counters.worker_deaths_total == 0
            assert pool.counters.timeouts_total == 0
            assert pool.arena.allocated_bytes == 0
            assert pool.check_integrity() is None
        finally:
            await pool.close()

    asyncio.run(scenario())
