"""Stage shell: one stage's mailbox, edges and run loop. Knows no model; the stage's logic does the work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from connectors.interface import Receiver, Sender
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost
from contracts.messages import (
    Abort,
    Aborted,
    CacheWasReset,
    CheckIntegrity,
    FromStage,
    IntegrityReport,
    ResetCache,
    Shutdown,
    StageFailed,
    StageReady,
    StageStats,
    ToStage,
)
from contracts.timings import Times, edge_name
from stages.mailbox import Mailbox

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25


@dataclass
class StepResultBatch:
    """What a step gives: messages for the front, chunks for the edges by target stage."""

    messages: list[FromStage] = field(default_factory=list)
    chunks: list[tuple[str, Chunk]] = field(default_factory=list)


def _by_target(chunks: Sequence[tuple[str, Chunk]]) -> dict[str, list[Chunk]]:
    parts: dict[str, list[Chunk]] = {}
    for target, chunk in chunks:
        parts.setdefault(target, []).append(chunk)
    return parts


def _copied(chunk: Chunk) -> Chunk:
    tensors = {name: tensor.clone() for name, tensor in chunk.tensors.items()}
    return msgspec.structs.replace(chunk, tensors=tensors)


class StageLogic(Protocol):
    """The scheduler and runner of a stage, driven by its shell on one event loop.

    `handle`, `accept` and `abort` may run while a `step` awaits. A request's own failure is a Failed message;
    an exception means the stage itself is broken.
    """

    def start(self) -> str:
        """Loads weights and sizes memory; returns the capacity line. Runs before anything else, may block."""
        ...

    def handle(self, message: ToStage) -> list[FromStage]: ...

    def accept(self, chunk: Chunk) -> list[FromStage]: ...

    def has_work(self) -> bool: ...

    def due_in_s(self) -> float | None:
        """When to ask `has_work` again without anything having come; None: there is no need."""
        ...

    async def step(self) -> StepResultBatch: ...

    def sent(self, chunk: Chunk) -> None:
        """A chunk of the last step left over its edge, or was dropped: what it held may be let go."""
        ...

    def abort(self, request_id: str) -> None: ...

    def reset_cache(self) -> None: ...

    def check_integrity(self) -> str | None: ...

    def is_idle(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class StageShell:
    """Runs one stage until Shutdown. `emit` hands messages to the front process, from this shell's loop."""

    def __init__(
        self,
        name: str,
        logic: StageLogic,
        emit: Callable[[Sequence[FromStage]], None],
        senders: dict[str, Sender] | None = None,
        receivers: Mapping[str, Receiver] | None = None,
    ) -> None:
        self.name = name
        self.mailbox: Mailbox[ToStage] = Mailbox()
        self._logic = logic
        self._emit = emit
        self._senders = senders or {}
        self._receivers = receivers or {}
        self._waiting_since: list[float] = []  # monotonic: inputs that no step has taken up yet
        self._queue_times = Times()
        self._step_times = Times()
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_stats_s = 0.0
        self._busy_s = 0.0  # in steps, without what sending their chunks took
        self._sending_s = 0.0  # after steps, waiting for credits among it
        self.step_started_s: float | None = None  # monotonic; read by the worker's heartbeat from its thread
        self._cancelled: set[str] = set()  # aborted requests whose chunks may still be in the step being sent

    async def run(self) -> None:
        """Returns after Shutdown; an error of the stage itself is reported as StageFailed and ends it."""
        self.mailbox.bind()
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        try:
            detail = self._logic.start()
            self._emit([StageReady(self.name, detail), self._stats()])
            await self._serve()
        except Exception as error:  # the stage is lost; the front process must hear of it
            logger.exception("stage %s failed", self.name)
            info = EngineError(f"stage {self.name} failed: {error!r}", stage=self.name).info()
            self._emit([StageFailed(self.name, info)])
        finally:
            for sender in self._senders.values():
                sender.close()
            for receiver in self._receivers.values():
                receiver.close()
            self._logic.close()

    def wake(self) -> None:
        """Lets the logic be asked whether it has work, from any thread."""
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not loop.is_closed():
            loop.call_soon_threadsafe(wake.set)

    async def _serve(self) -> None:
        pumps = [asyncio.create_task(self._pump_mailbox())]
        pumps += [asyncio.create_task(self._pump_edge(receiver)) for receiver in self._receivers.values()]
        steps = asyncio.create_task(self._step_loop())
        try:
            done, _ = await asyncio.wait([*pumps, steps], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [*pumps, steps]:
                task.cancel()
            await asyncio.gather(*pumps, steps, return_exceptions=True)

    async def _pump_mailbox(self) -> None:
        while True:
            replies: list[FromStage] = []
            for message in await self.mailbox.drain():
                if isinstance(message, Shutdown):
                    return
                self._waiting_since.append(self.mailbox.drained_since_s)
                replies += self._handle(message)
            self._emit_and_wake(replies)

    def _handle(self, message: ToStage) -> list[FromStage]:
        match message:
            case Abort(request_id):
                self._cancelled.add(request_id)
                for sender in self._senders.values():
                    sender.cancel(request_id)
                for receiver in self._receivers.values():
                    receiver.cancel(request_id)
                self._logic.abort(request_id)
                return [Aborted(request_id, self.name)]
            case ResetCache(token):
                self._logic.reset_cache()
                return [CacheWasReset(token, self.name)]
            case CheckIntegrity(token):
                busy = not self._logic.is_idle()
                return [IntegrityReport(token, self.name, self._logic.check_integrity(), busy)]
            case _:
                return self._logic.handle(message)

    async def _pump_edge(self, receiver: Receiver) -> None:
        while True:
            try:
                chunk = await receiver.receive()
            except PeerLost:
                # The upstream stage is gone, which others report. It may be started again.
                await receiver.renewed()
                continue
            self._accept(receiver, [chunk, *receiver.receive_now()])

    def _accept(self, receiver: Receiver, chunks: list[Chunk]) -> None:
        """The step that they wake has all of them."""
        self._waiting_since += [time.monotonic()] * len(chunks)
        if not receiver.hands_over:
            borrowed, chunks = chunks, list(map(_copied, chunks))
            receiver.release(*borrowed)
        replies: list[FromStage] = []
        for chunk in chunks:
            replies += self._logic.accept(chunk)
        self._emit_and_wake(replies)
        if receiver.hands_over:
            receiver.release(*chunks)

    def _emit_and_wake(self, messages: list[FromStage]) -> None:
        assert self._wake is not None
        if messages:
            self._emit(messages)
        self._wake.set()

    async def _step_loop(self) -> None:
        assert self._wake is not None
        while True:
            self._forget_cancelled()
            while not self._logic.has_work():
                self._waiting_since.clear()  # they ask for no step
                self._forget_cancelled()
                self._report_stats(force=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._logic.due_in_s()):
                        await self._wake.wait()
                self._wake.clear()
            self.step_started_s = self._begin_step()
            batch = await self._logic.step()
            took_s = time.monotonic() - self.step_started_s
            self._step_times.add(took_s)
            self._busy_s += took_s
            sending_since_s = time.monotonic()
            await self._hand_out(batch)
            self._sending_s += time.monotonic() - sending_since_s
            self.step_started_s = None
            self._report_stats(force=False)
            await asyncio.sleep(0)  # lets the pumps run between steps

    def _begin_step(self) -> float:
        now = time.monotonic()
        for since in self._waiting_since:
            self._queue_times.add(now - since)
        self._waiting_since.clear()
        return now

    def _forget_cancelled(self) -> None:
        """Between steps no chunk of an aborted request is left, so the senders need not remember it."""
        for request_id in self._cancelled:
            for sender in self._senders.values():
                sender.forget(request_id)
        self._cancelled.clear()

    async def _hand_out(self, batch: StepResultBatch) -> None:
        """What a stage in this process can have at once comes before the messages, which wake the thread that
        sends them: all threads take turns at the interpreter, and that stage has a step to plan."""
        left = [
            (target, self._send_now(target, chunks)) for target, chunks in _by_target(batch.chunks).items()
        ]
        if batch.messages:
            self._emit(batch.messages)
        for target, chunks in left:
            for chunk in chunks:
                await self._send(target, chunk)
                self._logic.sent(chunk)

    def _send_now(self, target: str, chunks: list[Chunk]) -> list[Chunk]:
        """Returns those that have to wait."""
        num_sent = 0
        with contextlib.suppress(PeerLost):  # told of each chunk that is lost by it
            num_sent = self._senders[target].send_now(chunks)
        for chunk in chunks[:num_sent]:
            self._logic.sent(chunk)
        return chunks[num_sent:]

    async def _send(self, target: str, chunk: Chunk) -> None:
        try:
            await self._senders[target].send(chunk)
        except PeerLost:
            logger.warning("stage %s: %s is gone, chunk of %s dropped", self.name, target, chunk.request_id)

    def _report_stats(self, *, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._last_stats_s >= STATS_INTERVAL_S:
            self._last_stats_s = now
            self._emit([self._stats()])

    def _stats(self) -> StageStats:
        timings = [
            self._queue_times.as_timing("stage_queue_seconds", self.name),
            self._step_times.as_timing("stage_step_seconds", self.name),
        ]
        edges: dict[str, dict[str, float]] = {}
        for target, sender in self._senders.items():
            sent, edge = sender.stats, edge_name(self.name, target)
            edges[target] = {"edge_chunks_total": sent.chunks_total, "edge_bytes_total": sent.bytes_total}
            timings.append(sent.wait.as_timing("edge_credit_wait_seconds", edge))
            timings.append(sent.transfer.as_timing("edge_copy_seconds", edge))
        for source, receiver in self._receivers.items():
            edge = edge_name(source, self.name)
            timings.append(receiver.stats.wait.as_timing("edge_delivery_seconds", edge))
        spent = {"busy_seconds_total": self._busy_s, "sending_seconds_total": self._sending_s}
        return StageStats(self.name, {**self._logic.stats(), **spent}, edges, tuple(timings))
