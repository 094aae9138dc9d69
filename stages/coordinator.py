"""Coordinator: lifecycle, routing and abort fan-out of every request in the graph. Knows no model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from contracts.errors import EngineError, OmnistageError, ServiceUnavailable
from contracts.media import MediaItem
from contracts.messages import (
    Abort,
    Aborted,
    Audio,
    CacheWasReset,
    CheckIntegrity,
    EmbeddingsNeeded,
    Encode,
    Failed,
    FeaturesConsumed,
    FeaturesNeeded,
    FromStage,
    Generate,
    Generated,
    IntegrityReport,
    ResetCache,
    StageFailed,
    StageReady,
    StageStats,
    StopSample,
    ToStage,
)
from contracts.pipeline import Pipeline

logger = logging.getLogger(__name__)


class MediaHandle(Protocol):
    """A request's claim on one media item: its identity always, its features when asked for.

    Unpinned features may be taken away when shared memory is short; they can be made again.
    """

    def pin(self) -> MediaItem:
        """The item, with `features` if they are still held; then they stay until `release`."""
        ...

    async def materialize(self) -> MediaItem:
        """The item with features, made again if need be, and pinned. Raises MediaError."""
        ...

    def release(self) -> None:
        """Gives the features back; idempotent. They may be pinned or materialised again."""
        ...


SendToStage = Callable[[str, ToStage], None]


@dataclass
class _Request:
    """What the coordinator holds of a request until every stage has forgotten it."""

    request_id: str
    entry: str
    media: tuple[MediaHandle, ...]
    cache_salt: str | None
    open_samples: set[int]
    message: Generate  # as first sent; replayed with the tokens below after the entry stage was lost
    sent: dict[int, list[int]] = field(default_factory=dict)  # sample → tokens handed to the client
    asked_items: set[int] = field(default_factory=set)  # embeddings the entry stage waits for
    replays: int = 0
    cached_tokens_told: bool = False
    events: asyncio.Queue[Generated | OmnistageError] = field(default_factory=asyncio.Queue)
    stages: set[str] = field(default_factory=set)  # stages that know of it
    features_in_use: dict[int, int] = field(default_factory=dict)  # item → Encodes that may still read it
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    unacknowledged: set[str] = field(default_factory=set)
    ending: bool = False


class Coordinator:
    """All methods run on the front process's loop. `dispatch` takes what the stages send."""

    def __init__(self, pipeline: Pipeline, send: SendToStage, max_replays: int = 6) -> None:
        self._max_replays = max_replays
        self._pipeline = pipeline
        self._send = send
        self._requests: dict[str, _Request] = {}
        self._encoder_of = {e.target: e.source for e in pipeline.edges if e.payload == "embeddings"}
        self._states: dict[str, str] = {s.name: "starting" for s in pipeline.stages if s.kind != "preprocess"}
        self._details: dict[str, str] = {}
        self._stats: dict[str, dict[str, float]] = {}
        self._changed = asyncio.Event()
        self._answers: dict[int, tuple[set[str], asyncio.Future[None]]] = {}
        self._reports: dict[int, list[IntegrityReport]] = {}
        self._next_token = 0

    # --- requests ---------------------------------------------------------------------------------------

    async def run(self, message: Generate, media: tuple[MediaHandle, ...]) -> AsyncGenerator[Generated, None]:
        """Starts a request in the entry stage and yields its tokens until every sample has finished.

        Takes over `media`: released when the request is over. Closing the iterator aborts the request.
        """
        request = _Request(
            request_id=message.request_id,
            entry=self._pipeline.entry,
            media=media,
            cache_salt=message.cache_salt,
            open_samples=set(range(message.sampling.n)),
            message=message,
        )
        assert message.request_id not in self._requests, f"request id {message.request_id} is in use"
        self._requests[message.request_id] = request
        try:
            self._require_path(request)
            self._start(request)
            while request.open_samples or not request.events.empty():
                event = await request.events.get()
                if isinstance(event, OmnistageError):
                    raise event
                yield event
        finally:
            self._end(request)

    def stop_sample(self, request_id: str, sample: int) -> None:
        request = self._requests.get(request_id)
        if request is None or request.ending:
            return
        request.open_samples.discard(sample)
        self._send(request.entry, StopSample(request_id, sample))
        if not request.open_samples:
            request.events.put_nowait(Generated(request_id=request_id, deltas=()))

    def num_requests(self) -> int:
        return len(self._requests)

    def _require_path(self, request: _Request) -> None:
        """Every stage on the way is there or about to be: a restarting one makes the request wait."""
        needed = [request.entry]
        if request.media:
            needed.append(self._encoder_of[request.entry])
        for stage in needed:
            state = self._states[stage]
            if state not in ("ready", "restarting"):
                raise ServiceUnavailable(
                    f"stage {stage} is {state}", stage=stage, request_id=request.request_id, retry_after_s=5.0
                )

    def _start(self, request: _Request) -> None:
        """Gives the request to its entry stage, as new or with what its client has already; or leaves it for
        the stage's return."""
        if self._states[request.entry] != "ready":
            return
        message = request.message
        if any(request.sent.values()):
            resume = tuple(tuple(request.sent.get(sample, ())) for sample in range(message.sampling.n))
            message = msgspec.structs.replace(message, resume=resume)
        self._tell(request, request.entry, message)
        for sample in set(range(message.sampling.n)) - request.open_samples:
            self._send(request.entry, StopSample(request.request_id, sample))

    def _tell(self, request: _Request, stage: str, message: ToStage) -> None:
        request.stages.add(stage)
        self._send(stage, message)

    def _end(self, request: _Request) -> None:
        """The one way out of a request: tells every stage that may hold something of it, frees the media."""
        request.ending = True
        for task in request.tasks:
            task.cancel()
        for stage in request.stages:
            # The entry stage forgets a finished request by itself. An encoder may still hold an Encode, and
            # read
            # shared features: their slot is reused only when it has acknowledged.
            holds_it = bool(request.open_samples) or stage != request.entry
            if holds_it and self._states[stage] == "ready":
                request.unacknowledged.add(stage)
                self._send(stage, Abort(request.request_id))
        self._drop_if_over(request)

    def _drop_if_over(self, request: _Request) -> None:
        if request.ending and not request.unacknowledged:
            for handle in request.media:
                handle.release()
            self._requests.pop(request.request_id, None)
            self._changed.set()

    async def changed(self) -> None:
        """Returns at the next change of a stage's state, or when a request has left."""
        self._changed.clear()
        await self._changed.wait()

    async def drained(self) -> None:
        """Returns when no request is held any more."""
        while self._requests:
            self._changed.clear()
            await self._changed.wait()

    # --- from the stages --------------------------------------------------------------------------------

    def dispatch(self, messages: Sequence[FromStage]) -> None:
        for message in messages:
            match message:
                case StageReady(stage, detail):
                    self._stage_ready(stage, detail)
                case StageFailed(stage, info):
                    self._stage_failed(stage, info.to_exception())
                case StageStats(stage, values):
                    self._stats[stage] = values
                case CacheWasReset(token, stage):
                    self._answered(token, stage)
                case IntegrityReport(token, stage, _, _):
                    self._reports.setdefault(token, []).append(message)
                    self._answered(token, stage)
                case _:
                    self._dispatch_to_request(message)

    def _dispatch_to_request(
        self,
        message: EmbeddingsNeeded | FeaturesNeeded | FeaturesConsumed | Generated | Audio | Failed | Aborted,
    ) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            return  # it ended while the message was under way
        match message:
            case Aborted(_, stage):
                request.unacknowledged.discard(stage)
                self._drop_if_over(request)
            case FeaturesConsumed(_, item_index):
                self._features_consumed(request, item_index)
            case _ if request.ending:
                return
            case EmbeddingsNeeded(_, item_indices):
                request.asked_items.update(item_indices)
                for index in item_indices:
                    self._encode(request, index, request.media[index].pin())
            case FeaturesNeeded(_, item_index):
                self._spawn(request, self._encode_again(request, item_index))
            case Generated():
                self._generated(request, message)
            case Failed(_, info):
                request.events.put_nowait(info.to_exception())

    def _generated(self, request: _Request, message: Generated) -> None:
        """Keeps what a replay would need, and drops what a replay or a stopped sample says once more."""
        request.asked_items.clear()
        self._release_unread_features(request)
        deltas = tuple(d for d in message.deltas if d.sample in request.open_samples)
        for delta in deltas:
            request.sent.setdefault(delta.sample, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                request.open_samples.discard(delta.sample)
        cached = None if request.cached_tokens_told else message.num_cached_tokens
        request.cached_tokens_told |= cached is not None
        request.events.put_nowait(msgspec.structs.replace(message, deltas=deltas, num_cached_tokens=cached))

    def _encode(self, request: _Request, index: int, item: MediaItem) -> None:
        encoder = self._encoder_of[request.entry]
        if self._states[encoder] != "ready":
            return  # asked again when it is back
        if item.features is not None:
            request.features_in_use[index] = request.features_in_use.get(index, 0) + 1
        self._tell(
            request,
            encoder,
            Encode(
                request_id=request.request_id,
                item_index=index,
                item=item,
                target=request.entry,
                cache_salt=request.cache_salt,
            ),
        )

    async def _encode_again(self, request: _Request, index: int) -> None:
        try:
            item = await request.media[index].materialize()
        except OmnistageError as error:
            request.events.put_nowait(error)
            return
        if not request.ending:
            self._encode(request, index, item)

    def _features_consumed(self, request: _Request, index: int) -> None:
        left = request.features_in_use.get(index, 0) - 1
        assert left >= 0, f"{request.request_id}: features of item {index} consumed more often than lent"
        if left:
            request.features_in_use[index] = left
            return
        del request.features_in_use[index]
        if not request.ending:
            request.media[index].release()

    def _release_unread_features(self, request: _Request) -> None:
        """Once tokens flow the prompt is computed: features nobody asked for are not needed any more."""
        for index, handle in enumerate(request.media):
            if index not in request.features_in_use:
                handle.release()

    def _spawn(self, request: _Request, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        request.tasks.add(task)
        task.add_done_callback(request.tasks.discard)

    def _stage_ready(self, stage: str, detail: str) -> None:
        self._states[stage] = "ready"
        self._details[stage] = detail
        self._changed.set()
        for request in list(self._requests.values()):
            if request.ending:
                continue
            if stage == request.entry and stage not in request.stages:
                self._start(request)
            elif request.asked_items and stage == self._encoder_of.get(request.entry):
                for index in sorted(request.asked_items):
                    self._encode(request, index, request.media[index].pin())

    def stage_lost(self, stage: str, *, restarts: bool) -> None:
        """The process of `stage` is gone and with it everything that it held. Requests go on when it is back:
        the entry stage's from the tokens already sent, an encoder's by asking it again."""
        if not restarts:
            self._stage_failed(stage, EngineError(f"stage {stage} died too often", stage=stage))
            return
        self._states[stage] = "restarting"
        self._changed.set()
        for token in [t for t, (waiting, _) in self._answers.items() if stage in waiting]:
            self._answered(token, stage)
        for request in list(self._requests.values()):
            if stage not in request.stages:
                continue
            request.stages.discard(stage)
            request.unacknowledged.discard(stage)
            if stage != request.entry:
                request.features_in_use.clear()
            if request.ending:
                self._drop_if_over(request)
            elif request.replays >= self._max_replays:
                message = f"stage {stage} died {request.replays + 1} times while it had this request"
                request.events.put_nowait(
                    EngineError(message, request_id=request.request_id, stage=stage, code="stage_lost")
                )
            else:
                request.replays += 1
                if stage == request.entry:
                    request.asked_items.clear()

    def _stage_failed(self, stage: str, error: OmnistageError) -> None:
        self._states[stage] = "failed"
        self._details[stage] = error.message
        self._changed.set()
        for request in list(self._requests.values()):
            if stage not in request.stages:
                continue
            request.features_in_use.clear()
            request.unacknowledged.discard(stage)
            if request.ending:
                self._drop_if_over(request)
            else:
                failure = EngineError(error.message, request_id=request.request_id, stage=stage)
                request.events.put_nowait(failure)

    # --- stages as a whole ------------------------------------------------------------------------------

    @property
    def states(self) -> dict[str, tuple[str, str]]:
        return {name: (state, self._details.get(name, "")) for name, state in self._states.items()}

    @property
    def stats(self) -> dict[str, dict[str, float]]:
        return self._stats

    def all_ready(self) -> bool:
        return all(state == "ready" for state in self._states.values())

    async def wait_started(self) -> None:
        """Returns when every stage is ready; raises EngineError when one failed to start."""
        while not self.all_ready():
            for stage, state in self._states.items():
                if state == "failed":
                    raise EngineError(self._details[stage], stage=stage)
            self._changed.clear()
            await self._changed.wait()

    async def reset_cache(self) -> None:
        token, answered = self._ask()
        for stage in self._answers[token][0]:
            self._send(stage, ResetCache(token))
        await answered

    async def check_integrity(self) -> tuple[IntegrityReport, ...]:
        token, answered = self._ask()
        for stage in self._answers[token][0]:
            self._send(stage, CheckIntegrity(token))
        await answered
        return tuple(self._reports.pop(token, ()))

    def _ask(self) -> tuple[int, asyncio.Future[None]]:
        self._next_token += 1
        waiting = {stage for stage, state in self._states.items() if state == "ready"}
        future = asyncio.get_running_loop().create_future()
        self._answers[self._next_token] = (waiting, future)
        if not waiting:
            future.set_result(None)
        return self._next_token, future

    def _answered(self, token: int, stage: str) -> None:
        waiting, future = self._answers[token]
        waiting.discard(stage)
        if not waiting:
            del self._answers[token]
            if not future.done():
                future.set_result(None)
