"""The pool survives every death of its workers, bounds what it holds, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import (
    EngineError,
    MediaDecodeError,
    MediaError,
    MediaTooLarge,
    ServiceUnavailable,
    TooManyRequests,
)
from contracts.media import MediaOptions
from contracts.specs import ImageSpec, MediaLimits
from preprocess.images import decode_image, open_image
from preprocess.jobs import MediaJob, PoolConfig, ProcessedSource
from preprocess.pool import PreprocessPool
from preprocess.recipes import ImageRecipe
from preprocess.resize import pixel_budget, resized_shape
from tests.preprocess.samples import QWEN2, TINY, encode, noise, picture
from tests.rounds import run_watched, until

MISBEHAVING = "tests.preprocess.misbehaving_worker"
GOOD = encode(noise(48, 32))


def job(data: bytes, spec: ImageSpec = TINY) -> MediaJob:
    return MediaJob(data, b"d" * 16, ImageRecipe(spec, pixel_budget(spec, MediaOptions())))


@asynccontextmanager
async def running(**changes: object) -> AsyncIterator[PreprocessPool]:
    defaults = {"num_workers": 1, "arena_bytes": 1 << 20, "worker_module": MISBEHAVING}
    pool = PreprocessPool(PoolConfig(**(defaults | changes)))
    try:
        await pool.start()
        await until(lambda: len(pool._idle) == pool.config.num_workers)
        yield pool
        assert pool.check_integrity() is None
    finally:
        pids = pool.worker_pids()
        await pool.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_watched(scenario, timeout_s=180)


async def assert_works(pool: PreprocessPool) -> None:
    done = await pool.process(job(GOOD))
    done.lease.release()


def test_features_equal_the_decoder_in_this_process() -> None:
    async def scenario() -> None:
        async with running() as pool:
            data = encode(picture(301, 200), "JPEG")
            done = await pool.process(job(data))
            opened = open_image(data, 1 << 20)
            shape = resized_shape(*opened.size, TINY, pixel_budget(TINY, MediaOptions()))
            expected = decode_image(opened, shape, TINY)
            assert done.items[0].features is not None
            np.testing.assert_array_equal(pool.arena.view(done.items[0].features), expected)
            assert done.items[0].pixel_digest == pool.config.digester.of_array(expected)
            assert done.items[0].num_tokens == shape.num_tokens
            assert done.items[0].grid_thw == shape.grid_thw
            assert done.items[0].source_size == (301, 200)
            assert pool.arena.allocated_bytes > 0
            done.lease.release()
            assert pool.arena.allocated_bytes == 0

    run(scenario)


def test_a_bad_item_fails_alone_and_keeps_its_worker() -> None:
    async def scenario() -> None:
        async with running() as pool:
            pids = pool.worker_pids()
            for data in (b"junk", encode(noise(64, 64))[:-100]):
                with pytest.raises(MediaDecodeError):
                    await pool.process(job(data))
            assert pool.arena.allocated_bytes == 0
            await assert_works(pool)
            assert pool.worker_pids() == pids

    run(scenario)


@pytest.mark.parametrize("order", [b"crash\n", b"exit\n"])
def test_an_item_that_kills_its_worker_is_tried_twice_then_refused(order: bytes) -> None:
    async def scenario() -> None:
        async with running(num_workers=2) as pool:
            others = [asyncio.create_task(assert_works(pool)) for _ in range(8)]
            with pytest.raises(MediaDecodeError, match="crashed") as caught:
                await pool.process(job(order))
            assert caught.value.status == 400
            assert pool.counters.worker_deaths_total == 2
            await asyncio.gather(*others)
            await until(lambda: len(pool.worker_pids()) == 2)
            await assert_works(pool)

    run(scenario)


def test_a_worker_killed_during_a_job_costs_the_client_nothing_and_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running() as pool:
            marker = os.fsencode(tmp_path / "died")
            done = await pool.process(job(b"crash once\n" + marker + b"\n" + GOOD))
            assert done.items[0].features is not None
            done.lease.release()
            assert pool.counters.worker_deaths_total == 1
            assert "worker died" in caplog.text
            assert pool.arena.allocated_bytes == 0

    run(scenario)


def test_kill_9_from_outside_idle_and_stopped_workers() -> None:
    async def scenario() -> None:
        async with running() as pool:
            (idle,) = pool.worker_pids()
            os.kill(idle, signal.SIGKILL)
            await until(lambda: pool.worker_pids() not in ([], [idle]))
            (stopped,) = pool.worker_pids()
            await assert_works(pool)
            os.kill(stopped, signal.SIGSTOP)
            waiting = asyncio.create_task(pool.process(job(GOOD)))
            await until(lambda: not pool._idle)  # the stopped worker has it
            os.kill(stopped, signal.SIGKILL)
            (await waiting).lease.release()
            assert pool.counters.worker_deaths_total == 2

    run(scenario)


def test_a_wake_up_that_meets_a_dying_worker_goes_to_the_next_one() -> None:
    async def scenario() -> None:
        async with running(num_workers=2) as pool:
            object.__setattr__(pool.config, "worker_module", "tests.preprocess.no_such_module")
            dying = pool._workers[0]
            os.kill(dying.pid, signal.SIGKILL)
            select.select([dying._pidfd], [], [], 10)
            dying._reap()  # its slot learns of it in the very turn in which the job wakes it
            await assert_works(pool)
            await until(lambda: 0 in pool._starved)

    run(scenario)


@pytest.mark.parametrize("order", [b"hang\n", b"hang holding memory\n" + GOOD])
def test_a_job_over_its_time_limit_fails_alone(order: bytes) -> None:
    async def scenario() -> None:
        async with running(limits=MediaLimits(job_timeout_s=0.3)) as pool:
            with pytest.raises(MediaError, match="longer than") as caught:
                await pool.process(job(order))
            assert caught.value.status == 400
            assert pool.counters.timeouts_total == 1
            assert pool.arena.allocated_bytes == 0
            await assert_works(pool)

    run(scenario)


def test_a_stopped_worker_is_killed_at_the_limit() -> None:
    async def scenario() -> None:
        async with running(limits=MediaLimits(job_timeout_s=0.3)) as pool:
            (pid,) = pool.worker_pids()
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(MediaError, match="longer than"):
                await pool.process(job(b"x" * (4 << 20)))  # more than the socket buffers: stuck in sending
            await assert_works(pool)
            assert pool.worker_pids() != [pid]

    run(scenario)


def test_memory_beyond_the_limit_fails_the_item_not_the_worker() -> None:
    async def scenario() -> None:
        limits = MediaLimits(worker_memory_bytes=64 << 20, max_source_pixels=10**9)
        async with running(limits=limits) as pool:
            pids = pool.worker_pids()
            with pytest.raises(MediaTooLarge, match="memory"):
                await pool.process(job(b"hog\n"))
            blank = encode(picture(1, 1).resize((8000, 8000)), compress_level=1)  # 256 MB once decoded
            with pytest.raises(MediaTooLarge, match="memory"):
                await pool.process(job(blank))
            assert pool.arena.allocated_bytes == 0
            await assert_works(pool)
            assert pool.worker_pids() == pids

    run(scenario)


def test_workers_are_recycled_by_count_and_by_memory() -> None:
    async def scenario() -> None:
        async with running(recycle_after_items=2) as pool:
            for _ in range(5):
                await assert_works(pool)
            assert pool.counters.worker_starts_total == 3
            assert pool.counters.worker_deaths_total == 0
        async with running(recycle_rss_bytes=100 << 20) as pool:
            (pid,) = pool.worker_pids()
            await assert_works(pool)
            assert pool.worker_pids() == [pid]
            (await pool.process(job(b"hoard\n" + GOOD))).lease.release()
            (await pool.process(job(b"hoard\n" + GOOD))).lease.release()
            await until(lambda: pool.worker_pids() not in ([], [pid]))

    run(scenario)


def test_the_queue_is_bounded() -> None:
    async def scenario() -> None:
        async with running(max_queued_jobs=3) as pool:
            (pid,) = pool.worker_pids()
            os.kill(pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(pool.process(job(GOOD)))]
            await until(lambda: not pool._queue and not pool._idle)
            tasks += [asyncio.create_task(pool.process(job(GOOD))) for _ in range(3)]
            await until(lambda: len(pool._queue) == 3)
            with pytest.raises(TooManyRequests) as caught:
                await pool.process(job(GOOD))
            assert caught.value.status == 429
            assert caught.value.retry_after_s is not None
            os.kill(pid, signal.SIGCONT)
            for done in await asyncio.gather(*tasks):
                done.lease.release()

    run(scenario)


def test_a_full_arena_holds_jobs_back_without_running_out_their_time() -> None:
    async def scenario() -> None:
        limits = MediaLimits(job_timeout_s=0.3)
        async with running(num_workers=2, arena_bytes=8192, limits=limits) as pool:
            data = encode(noise(40, 40))  # 4,800 bytes of pixels: two pages
            first = await pool.process(job(data))
            second = asyncio.create_task(pool.process(job(data)))
            await until(lambda: pool.arena.num_waiting == 1)
            finished, _ = await asyncio.wait({second}, timeout=0.6)  # twice the time limit
            assert not finished
            first.lease.release()
            (await second).lease.release()

    run(scenario)


def test_an_item_larger_than_the_arena_is_a_400() -> None:
    async def scenario() -> None:
        async with running(arena_bytes=4096) as pool:
            with pytest.raises(MediaTooLarge):
                await pool.process(job(encode(noise(64, 64))))
            done = await pool.process(job(encode(noise(8, 8))))
            done.lease.release()

    run(scenario)


def test_a_worker_killed_while_it_waits_for_space_is_replaced() -> None:
    async def scenario() -> None:
        async with running(arena_bytes=8192) as pool:
            data = encode(noise(40, 40))
            first = await pool.process(job(data))
            second = asyncio.create_task(pool.process(job(data)))
            await until(lambda: pool.arena.num_waiting == 1)
            (pid,) = pool.worker_pids()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pool.worker_pids() not in ([], [pid]) and pool.arena.num_waiting == 1)
            first.lease.release()
            (await second).lease.release()

    run(scenario)


async def cancelled(task: asyncio.Task[ProcessedSource]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelling_frees_everything_wherever_the_job_is() -> None:
    async def scenario() -> None:
        async with running(arena_bytes=8192, cancel_grace_s=0.05) as pool:
            data = encode(noise(40, 40))
            held = await pool.process(job(data))
            in_arena = asyncio.create_task(pool.process(job(data)))
            await until(lambda: pool.arena.num_waiting == 1)
            queued = asyncio.create_task(pool.process(job(data)))
            await until(lambda: len(pool._queue) == 1)
            await cancelled(queued)
            assert not pool._queue
            await cancelled(in_arena)
            await until(lambda: pool.arena.num_waiting == 0 and len(pool._idle) == 1)
            held.lease.release()

            in_worker = asyncio.create_task(pool.process(job(b"hang holding memory\n" + data)))
            await until(lambda: pool.arena.allocated_bytes > 0)
            await cancelled(in_worker)
            await until(lambda: pool.arena.allocated_bytes == 0)

            done = asyncio.create_task(pool.process(job(data)))
            await until(lambda: pool.arena.allocated_bytes > 0 and len(pool._idle) == 1)
            # The result is there, the task may not have run yet.
            done.cancel()
            await asyncio.wait({done})
            if not done.cancelled():
                done.result().lease.release()
            assert pool.arena.allocated_bytes == 0
            await assert_works(pool)

    run(scenario)


def test_a_result_that_meets_a_cancelled_caller_is_freed() -> None:
    async def scenario() -> None:
        async with running() as pool:
            task = asyncio.create_task(pool.process(job(GOOD)))
            await until(lambda: not pool._idle and not pool._queue)
            settle, late = pool._settle, []

            def settle_and_cancel(*arguments: object) -> None:
                settle(*arguments)
                late.append(task.cancel())  # after the result, before the task runs

            pool._settle = settle_and_cancel
            with pytest.raises(asyncio.CancelledError):
                await task
            assert late == [True]
            assert pool.arena.allocated_bytes == 0

    run(scenario)


def test_close_fails_what_is_under_way() -> None:
    async def scenario() -> None:
        async with running() as pool:
            running_job = asyncio.create_task(pool.process(job(b"hang\n")))
            await until(lambda: not pool._idle and not pool._queue)
            queued = asyncio.create_task(pool.process(job(GOOD)))
            await until(lambda: len(pool._queue) == 1)
            await pool.close()
            for task in (running_job, queued):
                with pytest.raises(ServiceUnavailable):
                    await task
            with pytest.raises(ServiceUnavailable):
                await pool.process(job(GOOD))

    run(scenario)


def test_workers_that_do_not_start_are_an_error_not_a_hang() -> None:
    async def scenario() -> None:
        pool = PreprocessPool(PoolConfig(num_workers=1, worker_module="tests.preprocess.no_such_module"))
        with pytest.raises(EngineError):
            await pool.start()
        await pool.close()

        async with running() as pool:
            module = pool.config.worker_module
            object.__setattr__(pool.config, "worker_module", "tests.preprocess.no_such_module")
            with pytest.raises(ServiceUnavailable):
                await pool.process(job(b"crash\n"))
            assert not pool.can_work()
            with pytest.raises(ServiceUnavailable):
                await pool.process(job(GOOD))
            object.__setattr__(pool.config, "worker_module", module)
            await until(pool.can_work)  # tried again after a pause, for as long as it takes
            await assert_works(pool)

    run(scenario)


def test_workers_import_no_torch_and_run_one_thread() -> None:
    async def scenario() -> None:
        async with running(worker_module="preprocess.worker") as pool:
            done = await pool.process(job(encode(picture(640, 480), "JPEG"), QWEN2))
            (pid,) = pool.worker_pids()
            mapped = Path(f"/proc/{pid}/maps").read_text()
            status = dict(
                line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            assert "torch" not in mapped
            assert status["Threads"].strip() == "1"
            assert int(status["VmRSS"].split()[0]) < 120_000  # kB
            done.lease.release()

    run(scenario)


def test_a_worker_keeps_memory_for_the_next_picture() -> None:
    """Page by page it would be fetched again, some thousand pages a picture of this size."""

    async def scenario() -> None:
        async with running(worker_module="preprocess.worker", arena_bytes=16 << 20) as pool:
            (pid,) = pool.worker_pids()
            faults = []
            for seed in range(5):
                data = encode(picture(1024, 1000, seed), "JPEG")
                done = await pool.process(job(data, QWEN2))
                done.lease.release()
                faults.append(int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[7]))
            assert faults[-1] - faults[-2] < 200

    run(scenario)


FRONT = """
import asyncio, os, sys
from preprocess.jobs import PoolConfig
from preprocess.pool import PreprocessPool
async def main():
    pool = PreprocessPool(PoolConfig(num_workers=2, arena_bytes=1 << 20))
    await pool.start()
    print(*pool.worker_pids(), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_workers_die_with_a_killed_front_process() -> None:
    before = set(os.listdir("/dev/shm"))
    root = Path(__file__).resolve().parents[2]
    front = subprocess.Popen([sys.executable, "-c", FRONT], cwd=root, stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    with front.stdout:
        pids = [int(pid) for pid in front.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in pids]
        os.kill(pids[0], signal.SIGSTOP)  # it cannot read the end of its socket: the death signal must do
        front.kill()
        front.wait()
    assert len(watched) == 2
    for pidfd in watched:
        readable, _, _ = select.select([pidfd], [], [], 10)
        assert readable
        os.close(pidfd)
    assert set(os.listdir("/dev/shm")) <= before
