"""The preprocessing pool: a bounded queue of items over killable worker processes, driven by the event loop.

    process(job) ─▶ queue ─▶ slot ─▶ worker: header read ─▶ SizeKnown
                                     arena:  block granted (waits when full) ─▶ Grant
                                     worker: decode, resize, digest ─▶ done ─▶ lease to the caller

A slot is one task that keeps one worker alive and gives it one item at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import cast

import msgspec

from contracts.compilation import BuildError
from contracts.errors import (
    EngineError,
    MediaDecodeError,
    MediaError,
    MediaTooLarge,
    OmnistageError,
    ServiceUnavailable,
    TooManyRequests,
)
from preprocess.arena import Arena, Block, Lease
from preprocess.jobs import MediaJob, PoolConfig, ProcessedSource, check_items
from preprocess.process import WorkerProcess
from preprocess.protocol import Done, Drop, Grant, Ready, Setup, SizeKnown, Task, TaskFailed
from preprocess.resampling import compile_resize

MAX_ATTEMPTS = 2  # an item whose worker died is tried once more: the death may not have been its fault
MAX_START_FAILURES = 3  # in a row, then jobs are refused until a worker starts again
RESTART_PAUSE_S = 0.5  # doubled at each further failure
MAX_RESTART_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


@dataclass
class PoolCounters:
    job_failures_total: int = 0
    timeouts_total: int = 0
    worker_starts_total: int = 0
    worker_deaths_total: int = 0  # unasked ones


@dataclass(eq=False)
class _Entry:
    """One accepted job. `future` done with work left means that its caller has gone."""

    job: MediaJob
    future: asyncio.Future[ProcessedSource]
    attempts: int = 0
    clock: asyncio.Timeout | None = None  # while a worker has it


class PreprocessPool:
    """`start` before the first `process`; every method on one event loop."""

    def __init__(self, config: PoolConfig) -> None:
        assert config.num_workers > 0
        self.config = config
        self.arena = Arena(config.arena_bytes)
        self._queue: deque[_Entry] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()  # slots without work
        self._slots: list[asyncio.Task[None]] = []
        self._workers: list[WorkerProcess | None] = [None] * config.num_workers
        self._closing = False
        self._closed = asyncio.Event()
        self._starved: set[int] = set()  # slots whose worker does not start
        self._mean_job_s = 0.05  # moving average, for retry_after_s
        self.counters = PoolCounters()

    async def start(self) -> None:
        """Returns when every worker is ready. Raises EngineError when one is not; call `close` even then."""
        assert not self._slots
        if self.config.resize == "auto":
            try:  # workers load what there is
                await asyncio.to_thread(compile_resize)
            except BuildError as error:
                logger.info("pictures are resized by Pillow: %s", error)
        starts = (self._start_worker(i) for i in range(self.config.num_workers))
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        self._slots = [asyncio.create_task(self._run_slot(i)) for i in range(self.config.num_workers)]

    async def close(self) -> None:
        """Ends the workers; queued and running jobs fail with ServiceUnavailable. Leases stay valid."""
        if self._closing:
            return
        self._closing = True
        self._closed.set()
        for worker in filter(None, self._workers):
            worker.kill()  # its slot sees the end of its stream, settles its job and finishes
        ended = await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers if worker))
        self.arena.close()
        for outcome in ended:
            if outcome is not None:
                raise outcome

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker and not worker.exited.done()]

    def check_integrity(self) -> str | None:
        """The arena's conservation laws; with no job in flight, no waiter may be left behind either."""
        if not self._queue and len(self._idle) == len(self._slots) and self.arena.num_waiting:
            return f"{self.arena.num_waiting} arena requests without a job"
        return self.arena.check_integrity()

    async def process(self, job: MediaJob) -> ProcessedSource:
        """The job's features; the caller releases the lease. Cancelling frees everything of the job.

        Raises TooManyRequests when the queue is full, MediaError for a bad item (also when it ran out of
        time, or ended its worker twice), ServiceUnavailable when the pool has no worker or is closing.
        """
        if not self.can_work():
            raise _not_running()
        if len(self._queue) >= self.config.max_queued_jobs:
            raise TooManyRequests(
                f"{len(self._queue)} media items are waiting for preprocessing, the limit; retry later",
                stage="preprocess",
                retry_after_s=self._retry_after_s(),
            )
        entry = _Entry(job, asyncio.get_running_loop().create_future())
        self._queue.append(entry)
        self._wake()
        try:
            return await entry.future
        except asyncio.CancelledError:
            self._abandon(entry)
            raise

    def _abandon(self, entry: _Entry) -> None:
        if entry.future.done() and not entry.future.cancelled() and not entry.future.exception():
            entry.future.result().lease.release()  # finished, but the caller was cancelled before it saw it
        if entry in self._queue:
            self._queue.remove(entry)
        if entry.clock is not None and not entry.clock.expired():
            deadline = entry.clock.when()
            soon = asyncio.get_running_loop().time() + self.config.cancel_grace_s
            entry.clock.reschedule(soon if deadline is None else min(deadline, soon))

    # --- slots ----------------------------------------------------------------------------------------------
    async def _run_slot(self, index: int) -> None:
        """Keeps one worker alive and busy until the pool closes. While workers do not start, queued jobs are
        refused and the next start waits longer and longer."""
        failures = 0
        while not self._closing:
            try:
                worker = self._workers[index] or await self._start_worker(index)
            except EngineError as error:
                failures += 1
                await self._pause_after(failures, error)
                continue
            failures = 0
            self._starved.discard(index)
            await self._employ(worker)
            self._workers[index] = None
            await worker.end()
        if sum(not slot.done() for slot in self._slots) == 1:  # this one is the last
            self._refuse_queue()

    async def _pause_after(self, failures: int, error: EngineError) -> None:
        logger.error("a preprocessing worker did not start (%d times in a row): %s", failures, error)
        if failures < MAX_START_FAILURES:
            return
        index = self._slots.index(cast("asyncio.Task[None]", asyncio.current_task()))
        self._starved.add(index)
        if not self.can_work():
            self._refuse_queue()
        delay_s = min(RESTART_PAUSE_S * 2 ** (failures - MAX_START_FAILURES), MAX_RESTART_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay_s)

    def can_work(self) -> bool:
        """False while no worker can be started, or after `close`."""
        return not self._closing and len(self._starved) < self.config.num_workers

    def _refuse_queue(self) -> None:
        while self._queue:
            self._fail(self._queue.popleft(), _not_running())

    async def _start_worker(self, index: int) -> WorkerProcess:
        config = self.config
        setup = Setup(
            arena=self.arena.name,
            arena_bytes=self.arena.size,
            digester=config.digester,
            limits=config.limits,
            resize=config.resize,
        )
        try:
            worker = self._workers[index] = WorkerProcess(config.worker_module, self.arena.fd)
            async with asyncio.timeout(config.start_timeout_s):
                await worker.channel.send(setup)
                ready = await worker.channel.receive()
        except (OSError, msgspec.MsgspecError) as error:  # TimeoutError and ConnectionError among them
            if failed := self._workers[index]:
                self._workers[index] = None
                await failed.end()
            raise EngineError("a preprocessing worker does not start", stage="preprocess") from error
        assert isinstance(ready, Ready)
        self.counters.worker_starts_total += 1
        return worker

    async def _employ(self, worker: WorkerProcess) -> None:
        """Gives the worker job after job until it must be replaced."""
        while not self._closing:
            entry = await self._next(worker)
            if entry is None:
                self._count_death()
                return
            if not await self._serve(worker, entry):
                return

    async def _next(self, worker: WorkerProcess) -> _Entry | None:
        """The next job; None when the worker died while idle."""
        while not worker.exited.done():
            if self._queue:
                return self._queue.popleft()
            wake = asyncio.get_running_loop().create_future()
            self._idle.append(wake)
            await asyncio.wait((wake, worker.exited), return_when=asyncio.FIRST_COMPLETED)
            if not wake.done():
                self._idle.remove(wake)
        self._wake()  # the wake-up, if there was one, belongs to another slot
        return None

    def _wake(self) -> None:
        if self._queue and self._idle:
            self._idle.popleft().set_result(None)

    async def _serve(self, worker: WorkerProcess, entry: _Entry) -> bool:
        """Runs one job; settles its future or queues it again. False when the worker must be replaced."""
        blocks: list[Block] = []  # at most one: what the worker may be writing to
        started = asyncio.get_running_loop().time()
        entry.attempts += 1
        try:
            async with asyncio.timeout(self.config.limits.job_timeout_s) as entry.clock:
                reply = await self._converse(worker, entry, blocks)
        except TimeoutError:
            await worker.end()
            self._fail_slow(entry)
        except (ConnectionError, msgspec.MsgspecError):
            await worker.end()
            self._retry(entry)
        except BaseException:
            self._fail(entry, EngineError("media preprocessing failed", stage="preprocess"))
            raise  # a defect of ours: the slot ends, `close` reports it
        else:
            self._settle(entry, reply, blocks)
            self._mean_job_s += 0.1 * (asyncio.get_running_loop().time() - started - self._mean_job_s)
            worker.items_done += 1
        entry.clock = None
        if blocks:  # not handed on. The worker is idle or reaped by now: it writes there no more
            self.arena.give_back(blocks.pop())
        return not worker.exited.done() and self._keeps(worker)

    async def _converse(
        self, worker: WorkerProcess, entry: _Entry, blocks: list[Block]
    ) -> Done | TaskFailed | None:
        """None when the caller went away before the features were made."""
        job, channel = entry.job, worker.channel
        task = Task(recipe=job.recipe, bytes_digest=job.bytes_digest, payload_bytes=len(job.data))
        await channel.send(task, job.data)
        reply = await channel.receive()
        if isinstance(reply, SizeKnown):
            if reply.nbytes > self.arena.size:
                await channel.send(Drop())
                return TaskFailed(_larger_than_arena(reply.nbytes).info(), worker.rss_bytes)
            block = await self._allocate(reply.nbytes, worker, entry)
            if block is None:
                await channel.send(Drop())
                return None
            blocks.append(block)
            await channel.send(Grant(block.offset))
            reply = await channel.receive()
        if not isinstance(reply, Done | TaskFailed):
            raise msgspec.ValidationError(f"unexpected {type(reply).__name__} from a worker")
        if isinstance(reply, Done):
            check_items(reply.items, self.arena.name, blocks)
        worker.rss_bytes = reply.rss_bytes
        return reply

    async def _allocate(self, nbytes: int, worker: WorkerProcess, entry: _Entry) -> Block | None:
        """Waits for arena space with the job's clock stopped. None when the caller went away meanwhile."""
        assert entry.clock is not None
        deadline = entry.clock.when()
        assert deadline is not None
        loop = asyncio.get_running_loop()
        left = deadline - loop.time()
        grant = self.arena.request(nbytes)
        entry.clock.reschedule(None)
        await asyncio.wait((grant, entry.future, worker.exited), return_when=asyncio.FIRST_COMPLETED)
        entry.clock.reschedule(loop.time() + left)
        if worker.exited.done() or entry.future.done():
            self.arena.withdraw(grant)
            if worker.exited.done():
                raise ConnectionResetError("the worker died")
            return None
        return grant.result()

    def _keeps(self, worker: WorkerProcess) -> bool:
        return (
            worker.items_done < self.config.recycle_after_items
            and worker.rss_bytes <= self.config.recycle_rss_bytes
        )

    # --- outcomes -------------------------------------------------------------------------------------------
    def _settle(self, entry: _Entry, reply: Done | TaskFailed | None, blocks: list[Block]) -> None:
        if isinstance(reply, TaskFailed):
            self._fail(entry, reply.error.to_exception())
        elif reply is not None and not entry.future.done():
            entry.future.set_result(ProcessedSource(reply.items, Lease(self.arena, blocks.pop())))

    def _fail_slow(self, entry: _Entry) -> None:
        self.counters.timeouts_total += 1
        limit_s = self.config.limits.job_timeout_s
        self._fail(entry, MediaError(f"decoding the item took longer than {limit_s:g} s", stage="preprocess"))

    def _count_death(self) -> None:
        if not self._closing:
            self.counters.worker_deaths_total += 1
            logger.warning("a preprocessing worker died; another takes its place")

    def _retry(self, entry: _Entry) -> None:
        """The entry's worker died (or spoke nonsense). Its death may not have been the item's fault."""
        self._count_death()
        if entry.future.done():
            return
        if self._closing:
            self._fail(entry, _not_running())
        elif entry.attempts < MAX_ATTEMPTS:
            self._queue.appendleft(entry)
            self._wake()
        else:
            message = "the decoder crashed on this item; convert it to a common format and try again"
            self._fail(entry, MediaDecodeError(message, stage="preprocess"))

    def _fail(self, entry: _Entry, error: OmnistageError) -> None:
        if not entry.future.done():
            self.counters.job_failures_total += 1
            entry.future.set_exception(error)

    def _retry_after_s(self) -> float:
        return max(1.0, len(self._queue) * self._mean_job_s / self.config.num_workers)


def _not_running() -> ServiceUnavailable:
    return ServiceUnavailable("media preprocessing is not running", stage="preprocess")


def _larger_than_arena(nbytes: int) -> MediaTooLarge:
    return MediaTooLarge(
        f"the item's features take {nbytes} bytes, more than this server holds; send it smaller"
    )
