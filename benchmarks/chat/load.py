"""Sends a workload: closed loop (so many sessions at once) or open loop (sessions arrive when they will)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.chat.prefixes import Expectation, SentPrefixes
from benchmarks.chat.workload import Session, Workload
from benchmarks.wire.chat_stream import StreamRecord, stream_chat
from benchmarks.wire.connection import HttpPool
from benchmarks.wire.request import RequestShape


@dataclass(frozen=True)
class TurnResult:
    """`late_s`: by how much the client itself missed the scheduled arrival (open loop, first turns)."""

    session: int
    turn: int
    expected: Expectation
    record: StreamRecord
    late_s: float = 0.0

    @property
    def cold(self) -> bool:
        """The request carries an image that was never sent before."""
        return self.expected.num_known_images < self.expected.num_images

    @property
    def has_images(self) -> bool:
        return self.expected.num_images > 0


@dataclass(frozen=True)
class LoadResult:
    started_s: float
    ended_s: float
    turns: tuple[TurnResult, ...]
    num_skipped: int
    """Turns not sent because the turn before failed and its answer belongs in their history."""


def poisson_arrivals(rate_per_s: float, count: int, seed: int) -> tuple[float, ...]:
    """Seconds from the start at which each of `count` sessions begins."""
    rng = random.Random(f"{seed}:arrivals")
    arrivals: list[float] = []
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s)
        arrivals.append(at_s)
    return tuple(arrivals)


class Load:
    """One run against one server. `own_history`: the history's assistant turns are the server's answers."""

    def __init__(
        self,
        pool: HttpPool,
        shape: RequestShape,
        workload: Workload,
        sent: SentPrefixes,
        *,
        own_history: bool,
        timeout_s: float,
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._workload = workload
        self._sent = sent
        self._own_history = own_history
        self._timeout_s = timeout_s

    async def closed(self, sessions: Sequence[Session], concurrency: int) -> LoadResult:
        results: list[TurnResult] = []
        queue = iter(enumerate(sessions))

        async def worker() -> None:
            for index, session in queue:
                results.extend(await self._session(index, session, 0.0))

        return await self._timed(sessions, results, (worker() for _ in range(concurrency)))

    async def open(self, sessions: Sequence[Session], arrivals: Sequence[float]) -> LoadResult:
        results: list[TurnResult] = []
        clock = self._pool.clock
        started_s = clock.now()

        async def arrive(index: int, session: Session, at_s: float) -> None:
            await clock.sleep_until(started_s + at_s)
            late_s = clock.now() - started_s - at_s
            results.extend(await self._session(index, session, late_s))

        pairs = zip(sessions, arrivals, strict=True)
        waits = (arrive(index, session, at_s) for index, (session, at_s) in enumerate(pairs))
        return await self._timed(sessions, results, waits)

    async def _timed(
        self,
        sessions: Sequence[Session],
        results: list[TurnResult],
        work: Iterable[asyncio._CoroutineLike[None]],
    ) -> LoadResult:
        started_s = self._pool.clock.now()
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
        num_planned = sum(len(session.turns) for session in sessions)
        results.sort(key=lambda result: (result.session, result.turn))
        return LoadResult(started_s, self._pool.clock.now(), tuple(results), num_planned - len(results))

    async def _session(self, index: int, session: Session, late_s: float) -> list[TurnResult]:
        answers: list[str] = []
        results: list[TurnResult] = []
        for turn in range(len(session.turns)):
            messages = self._workload.request(session, turn, answers)
            body = self._shape.body([message.encode() for message in messages])
            expected = self._sent.observe(messages)
            record = await stream_chat(self._pool, body, self._timeout_s)
            results.append(TurnResult(index, turn, expected, record, late_s if turn == 0 else 0.0))
            if not self._own_history:
                answers.append(session.turns[turn].answer)
            elif record.failure is None:
                answers.append(record.text)
                self._sent.answered(messages, record.text)
            else:
                break
        return results
