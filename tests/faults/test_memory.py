"""Host memory under a stream of pictures that nobody has seen before: it levels off, and every cache keeps
to its
bytes."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.test_aborts import resident_bytes
from tests.served import Served, picture

NUM_PICTURES, CONCURRENCY = 96, 8
GROWTH_BYTES = 12 << 20  # of 96 pictures of 230 KiB, were they kept
ARENA_BYTES, HOST_BYTES = 2 << 20, 1 << 20


@pytest.mark.parametrize("host_cache", [0, HOST_BYTES])
def test_memory_levels_off_over_unseen_pictures(tiny: Callable[..., Path], host_cache: int) -> None:
    """MEM-04."""
    settings = (
        "thinker.kv_memory=4MiB",
        "preprocess.workers=1",
        f"preprocess.arena_bytes={ARENA_BYTES}",
        "vision.embedding_cache=256KiB",
        f"vision.embedding_cache_host={host_cache}",
    )
    with Served(tiny("qwen2_5_vl"), *settings) as served:

        async def ask(seed: int) -> None:
            await served.answer([("user", [picture(seed, 280, 280), "what?"])], max_tokens=1)

        async def ask_all(first: int, count: int) -> None:
            seeds = iter(range(first, first + count))

            async def client() -> None:
                for seed in seeds:
                    await ask(seed)

            await asyncio.gather(*(client() for _ in range(CONCURRENCY)))

        served.run(ask_all(0, NUM_PICTURES // 2))
        served.assert_clean()
        gc.collect()
        before = resident_bytes([os.getpid()])
        served.run(ask_all(1000, NUM_PICTURES))
        served.assert_clean()
        gc.collect()
        growth = resident_bytes([os.getpid()]) - before
        assert growth < GROWTH_BYTES, f"{growth >> 10} KiB more than before"
        vision, preprocess = served.stats("vision"), served.stats("preprocess")
        assert preprocess["arena_bytes"] <= ARENA_BYTES
        assert vision["encoder_cache_bytes"] <= 256 << 10
        assert vision["encoder_cache_host_bytes"] <= host_cache
