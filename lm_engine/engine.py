"""The engine's front: takes requests, runs the plain or the overlapped loop, turns results into messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from contracts.chunks import Chunk
from contracts.errors import (
    EngineError,
    OmnistageError,
    ServiceUnavailable,
    TooManyRequests,
)
from contracts.messages import (
    EmbeddingsNeeded,
    Failed,
    FinishReason,
    Generate,
    Generated,
    SampleDelta,
    TokenLogprobs,
)
from lm_engine.budgets import RateMeter
from lm_engine.config import EngineConfig
from lm_engine.intake import Intake, Positions
from lm_engine.plan import AlignmentRead, Runner, StepResult
from lm_engine.scheduler import Neighbour, ScheduledStep, Scheduler
from lm_engine.sequence import Request, Sequence, State
from lm_engine.spoken import Reading, SpeechFeed

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepEvents:
    """Messages for the front process, and chunks of requests with speech for the next stage."""

    messages: tuple[Generated | EmbeddingsNeeded | Failed, ...]
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class InFlight:
    step: ScheduledStep
    future: asyncio.Future[StepResult]
    submitted_s: float
    readings: list[Reading]


class LMEngine:
    """One language model's scheduler and runner. Not thread-safe: all calls come from one event loop, and may
    come while a `step` awaits.

    Plain loop: a step is planned, run and applied before the next is planned. Overlapped loop: step N + 1 is
    planned and submitted while N runs; what N turns out to have ended has its row of N + 1 discarded. Both
    give the same tokens.

    Of requests with speech, the chunks of a step are the streams "prompt" (`positions` [n], their `hidden`
    [n, H]) and "text" (`token_ids` [k], with their `hidden` [k, H] where the talker takes them), without the
    token that ends the answer.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        positions: Positions,
        *,
        clock: Callable[[], float] = time.monotonic,
        hash_function: Callable[[Hashable], int] = hash,
    ) -> None:
        self.config = config
        self._runner = runner
        self._intake = Intake(config, positions, clock)
        self._clock = clock
        self._scheduler = Scheduler(config, hash_function)
        self._in_flight: deque[InFlight] = deque()
        self._depth = 2 if config.overlap else 1
        self._outbox: list[Generated | EmbeddingsNeeded | Failed] = []
        self._feed = SpeechFeed(config.spoken_hidden)
        self._stalled = False  # nothing can be planned until something arrives
        self._has_fresh_rows = False  # embeddings that no plan has seen yet
        self._aligns = False  # some request so far wanted it
        self._closed = False
        self._charges = config.policy == "fair"
        self._meter = RateMeter()
        self._last_landed_s = 0.0
        self._totals = dict.fromkeys(
            ("prompt_tokens_total", "generation_tokens_total", "num_steps_total", "failed_steps_total"), 0
        )

    def share_device(self, neighbour: Neighbour) -> None:
        """Steps with decodes are smaller while `neighbour` computes on the same device, which is told what it
        is to wait for."""
        self._scheduler.neighbour = neighbour

    @property
    def num_rows_ahead(self) -> int:
        """Embedding rows that are there and that steps compute now or next; 0 while none of a prompt with
        media is being computed, whatever the reason."""
        scheduler = self._scheduler
        moves = self._has_fresh_rows or (self._in_flight and scheduler.is_short_of_tokens)
        if moves or any(flight.step.media for flight in self._in_flight):
            return scheduler.ledger.num_arrived_tokens
        return 0

    def tell_neighbour(self) -> None:
        """What steps compute now; by whoever changes it from outside, too."""
        neighbour = self._scheduler.neighbour
        if neighbour is not None:
            alternates = self.config.encoder_step_tokens == 0  # or it would wait for steps that go on
            mixed = alternates and any(flight.step.mixed for flight in self._in_flight)
            neighbour.publish(self.num_rows_ahead, mixed=mixed)

    # --- requests -------------------------------------------------------------------------------------------
    def add(self, message: Generate) -> None:
        """Takes a request. Raises ContextLengthExceeded, BadRequest, TooManyRequests, ServiceUnavailable or
        EngineError; then nothing of it remains."""
        if self._closed:
            raise ServiceUnavailable("the engine is shutting down", request_id=message.request_id)
        if message.request_id in self._scheduler.requests:
            raise EngineError("a request of this id is in progress", request_id=message.request_id)
        if message.speech and self.config.spoken_hidden is None:
            raise EngineError("this model does not speak", request_id=message.request_id)
        self._check_queue(message)
        request = self._intake.make_request(message)
        self._scheduler.add(request)
        self._stalled = False
        self._aligns |= message.align is not None
        if message.speech:
            self._feed.open(request)
        for seq in request.sequences:
            if not (seq.num_output and request.tail != "stop"):
                continue
            if (reason := self._end_of(seq)) is None:
                continue
            if message.speech:  # its streams start over, so it is computed again
                if reason == "stop":
                    request.tail_token = seq.token_ids.pop()
                request.tail, seq.max_length = reason, len(seq.token_ids) + 1
            else:
                self._finish_resumed(seq, reason)

    def abort(self, request_id: str) -> None:
        """Forgets the request in whatever state it is; an unknown id is fine. No message follows."""
        request = self._scheduler.requests.get(request_id)
        if request is not None:
            self._scheduler.remove(request)
            self._feed.forget(request)
        self._feed.drop(request_id)
        self._outbox = [message for message in self._outbox if message.request_id != request_id]
        self._stalled = False

    def stop_sample(self, request_id: str, sample: int) -> None:
        """Ends one sample; no further message tells of it."""
        request = self._scheduler.requests.get(request_id)
        if request is not None:
            seq = request.sequences[sample]
            if seq.state is not State.FINISHED:
                self._finish(seq, seq.num_output)
                self._feed.send_text(seq)
        self._stalled = False

    def embeddings_ready(self, request_id: str, item_index: int, embeddings: Tensor) -> None:
        """[num_tokens, width] of one item. The engine keeps the tensor until the item's KV is computed; its
        memory must stay valid that long. Rows of the wrong shape fail the request (a Failed message)."""
        request = self._scheduler.requests.get(request_id)
        if request is None:
            return
        self._stalled = False
        rows = request.media.num_rows
        if not 0 <= item_index < len(rows):
            self._fail(request, EngineError(f"embeddings for item {item_index} of {len(rows)}"))
            return
        want = (rows[item_index], self.config.embedding_width)
        got = tuple(embeddings.shape)
        if got not in (want, (want[0], self.config.plain_embedding_width)):
            self._fail(
                request, EngineError(f"item {item_index} has embeddings of shape {got}, want {want}; retry")
            )
        elif self._scheduler.ledger.arrived(request, item_index, embeddings):
            self._has_fresh_rows = True
            self._scheduler.room.unpark(request)

    def _check_queue(self, message: Generate) -> None:
        if message.resume:
            return  # it was admitted once; what may be in flight bounds how many come back
        waiting, tokens = self._scheduler.room.num_requests, self._scheduler.room.num_tokens
        num_prompt = len(message.prompt.token_ids)
        full = waiting >= self.config.max_waiting_requests
        if full or (waiting and tokens + num_prompt > self.config.max_waiting_tokens):
            raise TooManyRequests(
                f"{waiting} requests with {tokens} prompt tokens are waiting; try again later",
                request_id=message.request_id,
                retry_after_s=self._meter.retry_after_s(tokens),
            )

    # --- the loop -------------------------------------------------------------------------------------------
    def has_work(self) -> bool:
        """Whether `step` would get anything done. False while everything waits for embeddings."""
        if self._outbox or self._in_flight or self._feed.has_chunks:
            return True
        return bool(self._scheduler.requests) and not self._stalled

    async def step(self) -> StepEvents:
        """Plans and submits what it can; waits for a result only when it must, and not before requests for
        embeddings have been handed out. May be cancelled; a step in flight is picked up by the next call."""
        launched = len(self._in_flight) < self._depth and self._launch()
        pending = self._outbox or self._feed.has_chunks
        if not pending and self._in_flight and (len(self._in_flight) == self._depth or not launched):
            await self._land()
        messages, self._outbox = tuple(self._outbox), []
        return StepEvents(messages, self._feed.take_chunks())

    def _launch(self) -> bool:
        step, asks = self._scheduler.plan()
        self._has_fresh_rows = False
        self._outbox += asks
        if step is None:
            idle = bool(self._scheduler.requests) and not self._in_flight
            assert not idle or self._scheduler.waits_for_embeddings, (
                "no step can be planned, nothing is awaited"
            )
            self._stalled = idle
            return False
        readings = self._feed.plan_reads(step.sequences, step.plan.sequences)
        plan = step.plan
        if readings:
            plan = replace(plan, hidden_reads=tuple(reading.read for reading in readings))
        if self._aligns:
            plan = replace(plan, alignment_reads=_alignment_reads(step))
        submitted_s = self._clock()
        future = asyncio.wrap_future(self._runner.submit(plan))
        self._in_flight.append(InFlight(step, future, submitted_s, readings))
        self.tell_neighbour()
        return True

    async def _land(self) -> None:
        flight = self._in_flight[0]
        await asyncio.wait([flight.future])  # unlike awaiting the future, leaves it alone when cancelled
        self._in_flight.popleft()
        self._totals["num_steps_total"] += 1
        error = flight.future.exception()
        if error is not None:
            self._fail_step(flight.step, error)
            return
        now = self._clock()
        self._meter.record(flight.step.num_tokens, now - max(flight.submitted_s, self._last_landed_s))
        self._last_landed_s = now
        result = flight.future.result()
        self._feed.landed(flight.readings, result.hidden)
        self._apply(flight.step, result)
        self._feed.send_texts(flight.step.sequences)

    def _apply(self, step: ScheduledStep, result: StepResult) -> None:
        assert result.step_id == step.plan.step_id, f"result of step {result.step_id}"
        for seq, end in step.media:
            seq.num_landed = end
            self._scheduler.ledger.release_covered(seq.request)
        together: dict[Request, list[SampleDelta]] = {}
        finished, num_taken = State.FINISHED, 0
        alignments = iter(result.alignments)
        for seq, drawn in zip(step.sampling, result.sampled, strict=True):
            seq.num_in_flight -= 1
            aligned = next(alignments) if self._aligns and seq.request.message.align is not None else ()
            if seq.state is finished:
                continue  # aborted, stopped, or ended by the token before this one
            if drawn.slot in result.failed_slots:
                self._fail(seq.request, EngineError("the model gave values that are not finite"))
                self._scheduler.cache.reset()  # such values may lie in blocks that others would share
                continue
            num_taken += 1
            delta = self._take_token(seq, drawn.token_id, drawn.logprobs)
            if aligned:
                delta = msgspec.structs.replace(delta, alignment=aligned)
            request = seq.request
            if request.reported and len(request.sequences) == 1:
                self._outbox.append(Generated(request_id=request.id, deltas=(delta,)))
            else:
                together.setdefault(request, []).append(delta)
        for request, deltas in together.items():
            self._emit(request, tuple(deltas))
        self._totals["generation_tokens_total"] += num_taken

    def _take_token(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> SampleDelta:
        tokens = seq.token_ids
        tokens.append(token)
        if len(tokens) >= seq.next_full and seq.num_computed >= seq.next_full:
            self._scheduler.register_full_blocks(seq)
        if seq.request.tail is not None and len(tokens) >= seq.max_length:
            return self._take_tail(seq)
        if self._charges:
            self._scheduler.room.charge(seq.request.tenant, 0, 1)
        if token in seq.request.stop_ids or len(tokens) >= seq.max_length:
            reason = self._end_of(seq)
            if reason is not None:
                return self._take_last_token(seq, token, logprobs, reason)
        return SampleDelta(
            sample=seq.sample, token_ids=(token,), logprobs=() if logprobs is None else (logprobs,)
        )

    def _take_last_token(
        self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, reason: FinishReason
    ) -> SampleDelta:
        self._finish(seq, seq.num_output - (reason == "stop"))
        return SampleDelta(
            sample=seq.sample,
            token_ids=(token,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=reason,
            stop_token_id=token if reason == "stop" else None,
        )

    def _take_tail(self, seq: Sequence) -> SampleDelta:
        """Ends a sample whose answer was complete before this token."""
        request = seq.request
        seq.token_ids.pop()
        self._finish(seq, seq.num_output)
        return SampleDelta(
            sample=seq.sample,
            token_ids=(),
            finish_reason=request.tail,
            stop_token_id=request.tail_token,
        )

    def _finish(self, seq: Sequence, num_spoken: int) -> None:
        self._scheduler.finish(seq)
        self._feed.finish(seq, num_spoken)

    def _end_of(self, seq: Sequence) -> FinishReason | None:
        """Whether the sequence's last token ends it. A stop token counts as one only after min_tokens."""
        request = seq.request
        if seq.token_ids[-1] in request.stop_ids and seq.num_output > request.min_tokens:
            return "stop"
        return "length" if len(seq.token_ids) >= seq.max_length else None

    def _emit(self, request: Request, deltas: tuple[SampleDelta, ...]) -> None:
        if request.reported:
            self._outbox.append(Generated(request_id=request.id, deltas=deltas))
            return
        request.reported = True
        self._totals["prompt_tokens_total"] += request.num_prompt
        cached = request.num_cached_tokens
        self._outbox.append(Generated(request_id=request.id, deltas=deltas, num_cached_tokens=cached))

    def _finish_resumed(self, seq: Sequence, reason: FinishReason) -> None:
        """A replayed sample whose last token had been sent and only its end had not."""
        self._scheduler.finish(seq)
        stop = seq.token_ids[-1] if reason == "stop" else None
        delta = SampleDelta(sample=seq.sample, token_ids=(), finish_reason=reason, stop_token_id=stop)
        self._outbox.append(Generated(request_id=seq.request.id, deltas=(delta,)))

    # --- failures -------------------------------------------------------------------------------------------
    def _fail(self, request: Request, error: OmnistageError) -> None:
        self._scheduler.remove(request)
        self._feed.forget(request)
        self._feed.drop(request.id)
        error.request_id, error.stage = request.id, self.config.stage
        self._outbox.append(Failed(request.id, error.info()))

    def _fail_step(self, step: ScheduledStep, error: BaseException) -> None:
        """Fails the requests whose KV the step was to write, and those that later steps have put onto it."""
        logger.error("step %d failed", step.plan.step_id, exc_info=error)
        self._totals["failed_steps_total"] += 1
        victims = [seq.request for seq in step.sequences]
        victims += [seq.request for flight in self._in_flight for seq in flight.step.fresh]
        for request in dict.fromkeys(victims):
            if request.num_unfinished:
                message = f"the model step failed ({type(error).__name__}); retry the request"
                self._fail(request, EngineError(message))
        self._scheduler.cache.reset()  # blocks are registered before they are written

    # --- housekeeping ---------------------------------------------------------------------------------------
    def reset_cache(self) -> None:
        self._scheduler.cache.reset()
        self._stalled = False

    def is_idle(self) -> bool:
        busy = self._scheduler.requests or self._in_flight or self._outbox
        return not busy and self._feed.is_idle

    def check_integrity(self) -> str | None:
        """The first broken conservation law, or None. Valid at any time between calls."""
        problem = self._scheduler.check_integrity()
        if problem is None and self.is_idle():
            problem = self._scheduler.check_idle()
        return problem

    def stats(self) -> dict[str, float]:
        scheduler = self._scheduler
        pool = scheduler.pool
        return {
            "num_requests_running": len(scheduler.requests) - scheduler.room.num_requests,
            "num_requests_waiting": scheduler.room.num_requests,
            "num_sequences_running": scheduler.num_running_sequences,
            "num_waiting_tokens": scheduler.room.num_tokens,
            "kv_cache_usage_perc": pool.num_owned / (pool.num_blocks - 1),
            "num_kv_blocks": pool.num_blocks,
            "num_cached_blocks": len(scheduler.cache),
            "resident_embedding_tokens": scheduler.ledger.num_claimed_tokens,
            "tokens_per_second": self._meter.tokens_per_s or 0.0,
            "prefix_cache_queries_total": scheduler.counters.prefix_queries,
            "prefix_cache_hits_total": scheduler.counters.prefix_hits,
            "num_preemptions_total": scheduler.counters.preemptions,
            "num_admissions_total": scheduler.counters.admissions,
            "admission_wait_seconds_total": scheduler.counters.queue_seconds,
            **self._totals,
        }

    def close(self) -> None:
        """Ends the runner. Requests in progress are dropped without a message. Idempotent."""
        self._closed = True
        for request in list(self._scheduler.requests.values()):
            self._scheduler.remove(request)
        self._feed.clear()
        self._outbox.clear()
        self._runner.close()
        while self._in_flight:
            self._in_flight.popleft().future.cancel()


def _alignment_reads(step: ScheduledStep) -> tuple[AlignmentRead, ...]:
    """Of the requests that want it, in the step that draws their one token."""
    return tuple(
        AlignmentRead(row.slot, row.start + row.num_tokens, align.num_tokens, align.num_positions)
        for seq, row in zip(step.sequences, step.plan.sequences, strict=True)
        if row.samples and (align := seq.request.message.align) is not None
    )
