"""Aborts at random moments, in every shape of the deployment: nothing of any request stays anywhere
(in `/dev/shm`, for every test: `leaves_nothing_behind`)."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults.test_worker_death import QUESTIONS, sampling_of
from tests.served import Served, Shape

FEW, MANY = 100, 1000  # aborts, in each shape
CONCURRENCY = 16
WARM_UP = 100  # after so many, allocators and caches have what they will ever have
GROWTH_BYTES = 48 << 20
MIXED = '[[worker]]\nname = "both"\nstages = ["vision", "thinker"]\n'


def served_in(shape: Shape, folder: Path, tmp_path: Path) -> Served:
    file = tmp_path / "mixed.toml"
    file.write_text(MIXED)
    settings = ("thinker.kv_memory=8MiB", "vision.embedding_cache=1MiB", "vision.embedding_cache_host=0")
    return Served(folder, *settings, workers=shape, deployment=file if shape == "file" else None)


def answers(served: Served) -> list[dict[int, list[int]]]:
    return [served.ask(q, **sampling_of(i)).token_ids for i, q in enumerate(QUESTIONS)]


def resident_bytes(pids: Sequence[int]) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


async def abort_one(served: Served, rng: random.Random) -> None:
    """While media are resolved, while it waits, in the prompt, between tokens, or just after the end."""
    index = rng.randrange(len(QUESTIONS))
    salt = rng.choice([None, str(rng.random())])  # half of them find nothing in a cache
    answer = asyncio.create_task(served.answer(QUESTIONS[index], salt, **sampling_of(index)))
    if rng.random() < 0.5:
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
    else:
        progress = asyncio.create_task(served.progress(rng.randrange(1, 200)))
        await asyncio.wait([answer, progress], return_when=asyncio.FIRST_COMPLETED)
        progress.cancel()
    answer.cancel()
    (outcome,) = await asyncio.gather(answer, return_exceptions=True)
    assert not isinstance(outcome, Exception), repr(outcome)  # a CancelledError is none


async def abort_many(served: Served, rng: random.Random, count: int) -> None:
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            await abort_one(served, rng)

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))


@pytest.mark.parametrize("shape", ["one", "per-stage", "file"])
def test_aborts_leave_nothing(tiny: Callable[..., Path], tmp_path: Path, shape: Shape) -> None:
    with served_in(shape, tiny("qwen2_5_vl"), tmp_path) as served:
        expected = answers(served)
        served.run(abort_many(served, random.Random(shape), FEW))
        served.assert_clean()
        assert {worker.restarts for worker in served.service.workers()} == {0}
        assert answers(served) == expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one", "per-stage", "file"])
def test_many_aborts_leave_nothing(tiny: Callable[..., Path], tmp_path: Path, shape: Shape) -> None:
    rng = random.Random(shape)
    with served_in(shape, tiny("qwen2_5_vl"), tmp_path) as served:
        pids = {os.getpid(), *(worker.pid for worker in served.service.workers())}
        expected = answers(served)
        served.run(abort_many(served, rng, WARM_UP))
        served.assert_clean()
        gc.collect()
        before = resident_bytes(sorted(pids))
        served.run(abort_many(served, rng, MANY))
        served.assert_clean()
        gc.collect()
        growth = resident_bytes(sorted(pids)) - before
        assert growth < GROWTH_BYTES, f"{growth >> 20} MiB more than before"
        assert {worker.restarts for worker in served.service.workers()} == {0}
        assert answers(served) == expected
