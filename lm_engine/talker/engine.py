"""The talker's front: takes requests, their streams and their grants, runs steps, gives frames."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.chunks import Chunk
from contracts.errors import (
    ContextLengthExceeded,
    EngineError,
    OmnistageError,
    ServiceUnavailable,
    TooManyRequests,
)
from contracts.messages import Failed, FinishReason, Speak
from lm_engine.config import EngineConfig
from lm_engine.engine import StepEvents
from lm_engine.talker.model import TalkerModel, TalkerPrompt
from lm_engine.talker.plan import FrameRunner, FramesDrawn
from lm_engine.talker.request import RowMaker, SpokenAnswer, take_hidden, take_text
from lm_engine.talker.scheduler import TalkerScheduler, TalkerStep

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
CODES_STREAM = "codes"


@dataclass(frozen=True)
class _InFlight:
    step: TalkerStep
    future: asyncio.Future[FramesDrawn]


class TalkerEngine:
    """One talker's scheduler and runner. Not thread-safe: all calls come from one event loop, and may come
    while a `step` awaits. What arrives for an unknown request is dropped.

    Loops as the LM's engine does, plain or overlapped: a step may be planned before the frames of the one
    before it are known, since each reads them on the device.

    Frames leave as chunks of the stream "codes": tensor `codes` int64 [k, Q]; on the last chunk, which may
    hold none, `finish` tells why ("stop", "length").
    """

    def __init__(self, config: EngineConfig, model: TalkerModel, runner: FrameRunner) -> None:
        self.config = config
        self._model = model
        self._runner = runner
        self._scheduler = TalkerScheduler(config, model.config.end_codes)
        self._end_codes = model.config.end_codes
        self._no_codes = torch.empty(0, model.config.num_code_groups, dtype=torch.int64)
        self._row_maker = RowMaker(model, runner.rows)
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 2 if config.overlap else 1
        self._chunks: list[Chunk] = []
        self._failed: list[Failed] = []
        self._stalled = False
        self._closed = False
        self._totals = dict.fromkeys(
            ("frames_total", "num_steps_total", "failed_steps_total", "length_stops_total"), 0
        )

    # --- requests -------------------------------------------------------------------------------------------
    def add(self, message: Speak) -> None:
        """Takes a request. Raises BadRequest, ContextLengthExceeded, TooManyRequests, ServiceUnavailable or
        EngineError; then nothing of it remains."""
        if self._closed:
            raise ServiceUnavailable("the engine is shutting down", request_id=message.request_id)
        if message.request_id in self._scheduler.answers:
            raise EngineError("a request of this id is in progress", request_id=message.request_id)
        if self._scheduler.num_waiting >= self.config.max_waiting_requests:
            raise TooManyRequests(
                f"{self._scheduler.num_waiting} requests are waiting to be spoken; try again later",
                request_id=message.request_id,
                retry_after_s=RETRY_AFTER_S,
            )
        assert message.max_frames >= 1, "the bound on frames is positive"
        prompt = self._model.lay_out(message.prompt, message.voice)
        bound, spell = self._bound(message, prompt), self._model.speller()
        answer = SpokenAnswer(message, prompt, bound, message.granted_frames, spell)
        if prompt.leading_text:
            take_text(answer, list(prompt.leading_text), None, self._model.config, last=False)
        self._scheduler.add(answer)
        self._stalled = False

    def _bound(self, message: Speak, prompt: TalkerPrompt) -> int:
        """Frames there is room for; what is cut by it ends with "length"."""
        room = min(self.config.context_length, self.config.kv_capacity_tokens) - prompt.num_rows + 1
        if room < 1:
            raise ContextLengthExceeded(
                f"The prompt takes {prompt.num_rows} rows of the talker's {self.config.context_length}. "
                "Shorten it, or ask for no audio.",
                request_id=message.request_id,
                param="messages",
            )
        return min(message.max_frames, room)

    def prompt_ready(self, request_id: str, tensors: Mapping[str, Tensor], last: bool) -> None:
        """`hidden` [n, X] of these `positions` int64 [n] of the thinker's prompt; `last`: there are no more.
        What no thinker sends fails the request (a Failed message)."""
        answer = self._scheduler.answers.get(request_id)
        if answer is None:
            return
        try:
            take_hidden(answer, tensors["positions"], tensors["hidden"], self._model.config)
            answer.hidden_ended = last
            self._row_maker.advance(answer)
        except EngineError as error:
            self._fail(answer, error)
        self._stalled = False

    def text_ready(self, request_id: str, tensors: Mapping[str, Tensor], last: bool) -> None:
        """The thinker's next `token_ids` int64 [k], with their `hidden` states [k, X] where the family's
        talker takes them. `last`: its answer has ended. The end token is not part of it."""
        answer = self._scheduler.answers.get(request_id)
        if answer is None:
            return
        try:
            token_ids, hidden = tensors["token_ids"].tolist(), tensors.get("hidden")
            take_text(answer, token_ids, hidden, self._model.config, last=last)
            answer.text_ended = last
            self._row_maker.advance(answer)
        except EngineError as error:
            self._fail(answer, error)
            return
        self._stalled = False
        if last and answer.rows.end == 0 and not answer.text:
            self._finish(answer, "stop")  # an answer without a word

    def grant(
        self, request_id: str, num_frames: int, final: bool = False, most_frames: int | None = None
    ) -> None:
        """It may have drawn so many frames in all; never fewer than before. `final`: no more will be
        granted, so it ends there ("length"). `most_frames`: no grant will ever be larger, so KV that was
        reserved for more is others' from now on."""
        answer = self._scheduler.answers.get(request_id)
        if answer is None:
            return
        answer.granted = max(answer.granted, num_frames)
        answer.final_grant = answer.final_grant or final
        if most_frames is not None:
            self._scheduler.narrow(answer, most_frames)
        self._stalled = False
        if answer.is_cut:
            self._finish(answer, "length")

    def abort(self, request_id: str) -> None:
        """Forgets the request in whatever state it is; an unknown id is fine. No event follows."""
        answer = self._scheduler.answers.get(request_id)
        if answer is not None:
            self._scheduler.remove(answer)
        self._chunks = [chunk for chunk in self._chunks if chunk.request_id != request_id]
        self._failed = [message for message in self._failed if message.request_id != request_id]
        self._stalled = False

    # --- the loop -------------------------------------------------------------------------------------------
    def has_work(self) -> bool:
        """Whether `step` would get anything done. False while everything waits for text or grants."""
        if self._chunks or self._failed or self._in_flight:
            return True
        return bool(self._scheduler.answers) and not self._stalled

    async def step(self) -> StepEvents:
        """Plans and submits what it can; waits for a result only when it must. May be cancelled; a step in
        flight is picked up by the next call."""
        launched = len(self._in_flight) < self._depth and self._launch()
        pending = self._chunks or self._failed
        if not pending and self._in_flight and (len(self._in_flight) == self._depth or not launched):
            await self._land()
        chunks, self._chunks = tuple(self._chunks), []
        failed, self._failed = tuple(self._failed), []
        return StepEvents(failed, chunks)

    def _launch(self) -> bool:
        step = self._scheduler.plan()
        if step is None:
            self._stalled = not self._in_flight
            return False
        self._in_flight.append(_InFlight(step, asyncio.wrap_future(self._runner.submit(step.plan))))
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
        drawn = flight.future.result()
        assert drawn.step_id == flight.step.plan.step_id, f"frames of step {drawn.step_id}"
        for answer, codes_1Q, first, valid in zip(
            flight.step.sampling, drawn.codes, drawn.first, drawn.valid, strict=True
        ):
            if answer.finished:
                continue  # aborted, or ended by the frame before this one
            if not valid:
                self._fail(answer, EngineError("the talker gave values that are not finite"))
            elif first in self._end_codes:
                self._finish(answer, "stop")
            else:
                self._take_frame(answer, codes_1Q)

    def _take_frame(self, answer: SpokenAnswer, codes_1Q: Tensor) -> None:
        answer.num_frames += 1
        self._totals["frames_total"] += 1
        if answer.is_cut:
            self._finish(answer, "length", codes_1Q)
        else:
            self._send(answer, codes_1Q)

    def _finish(self, answer: SpokenAnswer, reason: FinishReason, codes_KQ: Tensor | None = None) -> None:
        self._scheduler.remove(answer)
        self._totals["length_stops_total"] += reason == "length"
        self._send(answer, self._no_codes if codes_KQ is None else codes_KQ, reason)

    def _send(self, answer: SpokenAnswer, codes_KQ: Tensor, reason: FinishReason | None = None) -> None:
        chunk = Chunk(
            answer.id,
            CODES_STREAM,
            answer.num_chunks,
            last=reason is not None,
            tensors={"codes": codes_KQ},
            meta={} if reason is None else {"finish": reason},
        )
        answer.num_chunks += 1
        self._chunks.append(chunk)

    # --- failures -------------------------------------------------------------------------------------------
    def _fail(self, answer: SpokenAnswer, error: OmnistageError) -> None:
        self._scheduler.remove(answer)
        error.request_id, error.stage = answer.id, self.config.stage
        self._failed.append(Failed(answer.id, error.info()))

    def _fail_step(self, step: TalkerStep, error: BaseException) -> None:
        logger.error("talker step %d failed", step.plan.step_id, exc_info=error)
        self._totals["failed_steps_total"] += 1
        for answer in step.answers:
            if not answer.finished:
                message = f"the talker's step failed ({type(error).__name__}); retry the request"
                self._fail(answer, EngineError(message))

    # --- housekeeping ---------------------------------------------------------------------------------------
    def reset_cache(self) -> None:
        """Nothing outlives its request here."""

    def is_idle(self) -> bool:
        return not (self._scheduler.answers or self._in_flight or self._chunks or self._failed)

    def check_integrity(self) -> str | None:
        """The first broken conservation law, or None. Valid at any time between calls."""
        problem = self._scheduler.check_integrity()
        if problem is None and self.is_idle() and self._scheduler.pool.num_owned:
            return f"idle and still held: {self._scheduler.pool.num_owned} blocks"
        return problem

    def stats(self) -> dict[str, float]:
        pool = self._scheduler.pool
        return {
            "num_requests_running": self._scheduler.num_running,
            "num_requests_waiting": self._scheduler.num_waiting,
            "kv_cache_usage_perc": pool.num_owned / (pool.num_blocks - 1),
            **self._totals,
        }

    def close(self) -> None:
        """Ends the runner. Requests in progress are dropped without an event. Idempotent."""
        self._closed = True
        for answer in list(self._scheduler.answers.values()):
            self._scheduler.remove(answer)
        self._chunks.clear()
        self._failed.clear()
        self._runner.close()
        while self._in_flight:
            self._in_flight.popleft().future.cancel()
