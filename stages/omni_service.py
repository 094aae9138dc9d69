"""OmniService: turns an API request into a prompt (media resolved, template rendered) and runs it through
the graph."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Protocol, TypeVar

from contracts.conversation import Conversation
from contracts.errors import (
    BadRequest,
    RequestTimeout,
    TooManyRequests,
)
from contracts.media import MediaSource
from contracts.messages import Audio, Generate, IntegrityReport
from contracts.timings import Timing
from model_families.family import Family
from model_families.text import ChatTokenizer
from preprocess.service import Preprocessor
from stages.coordinator import Coordinator
from stages.deployment import Deployment
from stages.media_claims import ClaimRegistry, MediaClaim
from stages.prompting import PromptDesk, media_tokens, naming_the_prompt
from stages.recording import Recording
from stages.routing import PrefixRouter
from stages.service import (
    AudioChunk,
    Event,
    GenerationRequest,
    ModelCard,
    PromptReady,
    RecordingReady,
    StageHealth,
    Tokens,
    TranscriptionEvent,
    TranscriptionRequest,
    WorkerInfo,
)
from stages.speech_orders import SpeechDesk
from stages.transcription import check_written_down, transcribe, write_down

EventT = TypeVar("EventT")


class WorkerTable(Protocol):
    def infos(self) -> tuple[WorkerInfo, ...]: ...


class OmniService:
    """The Service of one model. Owns nothing that outlives a request; `launch` owns the parts."""

    def __init__(
        self,
        card: ModelCard,
        family: Family,
        deployment: Deployment,
        coordinator: Coordinator,
        workers: WorkerTable,
        preprocessor: Preprocessor | None,
        context_length: int,
    ) -> None:
        self.card = card
        self.tokenizer: ChatTokenizer = family.tokenizer
        self._family = family
        self._prompts = PromptDesk(family, context_length)
        self._speech = SpeechDesk(family.speech, deployment, card.names[0], self._can_be_said)
        self._deployment = deployment
        self._coordinator = coordinator
        self._workers = workers
        self._preprocessor = preprocessor
        self._claims = None if preprocessor is None else ClaimRegistry(preprocessor)
        self._num_open = 0
        self._departure = asyncio.Event()

    # --- generation -------------------------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """See `stages.service.Service.generate`."""
        request_id = f"req-{uuid.uuid4().hex}"
        return self._bounded(request_id, request.timeout_s, self._generate(request_id, request))

    def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptionEvent, None]:
        """See `stages.service.Service.transcribe`."""
        request_id = f"req-{uuid.uuid4().hex}"
        return self._bounded(request_id, request.timeout_s, self._transcribe(request_id, request))

    async def _bounded(
        self, request_id: str, timeout_s: float | None, events: AsyncGenerator[EventT, None]
    ) -> AsyncGenerator[EventT, None]:
        """The events of a request that counts among the open ones and has so much time."""
        bound = self._deployment.server.max_requests
        if self._num_open >= bound:
            raise TooManyRequests(f"{bound} requests are open already; try again later", retry_after_s=1.0)
        self._num_open += 1
        refused = False
        timeout_s = timeout_s or self._deployment.server.request_timeout_s
        try:
            async with contextlib.aclosing(events):
                if timeout_s is None:
                    async for event in events:
                        yield event
                    return
                deadline = asyncio.get_running_loop().time() + timeout_s
                while (timed := await _next_before(deadline, events, request_id, timeout_s)) is not None:
                    yield timed
        except TooManyRequests:
            refused = True
            raise
        finally:
            self._num_open -= 1
            if not refused:  # who was refused leaves no place, and must not wake who waits for one
                self._departure.set()
                self._departure = asyncio.Event()

    async def _transcribe(
        self, request_id: str, request: TranscriptionRequest
    ) -> AsyncGenerator[TranscriptionEvent, None]:
        transcriber, language = self._family.transcriber, self._family.writes_down
        if transcriber is None and language is None:
            raise BadRequest(
                f"{self.card.names[0]} does not transcribe", param="model", code="unsupported_model"
            )
        self._check_sources([request.source])
        if transcriber is None:
            assert language is not None
            check_written_down(request.options, language)
        claims = await self._claim(request.source)
        assert len(claims) == 1, "a recording is one item"
        if transcriber is None:
            yield RecordingReady(request_id=request_id, duration_s=claims[0].item.duration_s)
            for event in await write_down(self._family, self._coordinator, claims[0]):
                yield event
            return
        recording = Recording(claims[0])
        try:
            yield RecordingReady(request_id=request_id, duration_s=recording.item.duration_s)
            events = transcribe(
                self._family, transcriber, self._coordinator, request_id, recording, request.options
            )
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        finally:
            recording.close()

    async def _generate(self, request_id: str, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        if self._family.transcriber is not None:
            raise BadRequest(
                f"{self.card.names[0]} only transcribes; use /v1/audio/transcriptions",
                param="model",
                code="unsupported_model",
            )
        with naming_the_prompt(request), self._speech.admitted(request.speech, request.sampling):
            with self._prompts.early(request.input) as early:
                claims = await self._resolve(request.input)
            with _released_on_error(claims):
                message = await self._message(request_id, request, claims, early.ids)
                order = self._speech.order(request.speech, message.sampling)
                yield PromptReady(
                    request_id=request_id,
                    prompt_token_ids=message.prompt.token_ids,
                    media_tokens=media_tokens(message.prompt),
                    max_tokens=message.sampling.max_tokens,
                )
            answer = self._coordinator.run(message, tuple(claims), order)
            async with contextlib.aclosing(answer):
                async for part in answer:
                    if isinstance(part, Audio):
                        self._speech.count(part)
                        yield AudioChunk(samples=part.pcm, finish_reason=part.finish_reason)
                    elif part.deltas:
                        yield Tokens(deltas=part.deltas, num_cached_tokens=part.num_cached_tokens)

    async def _message(
        self,
        request_id: str,
        request: GenerationRequest,
        claims: list[MediaClaim],
        early_ids: list[int] | None,
    ) -> Generate:
        items = [claim.item for claim in claims]
        prompt = await self._prompts.build(request.input, items, early_ids)
        forced = None if request.speech is None else self._prompts.forced(request.speech)
        return Generate(
            request_id=request_id,
            prompt=prompt,
            sampling=self._prompts.complete(prompt, request, forced),
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            speech=request.speech is not None,
            forced=forced,
        )

    async def _resolve(self, given: Conversation | str | tuple[int, ...]) -> list[MediaClaim]:
        sources = given.media() if isinstance(given, Conversation) else []
        if not sources:
            return []
        self._check_sources(sources)
        if len(sources) == 1:
            return list(await self._claim(sources[0]))
        tasks = [asyncio.create_task(self._claim(source)) for source in sources]
        try:
            return [claim for claims in await asyncio.gather(*tasks) for claim in claims]
        except BaseException:
            await _cancel_and_release(tasks)
            raise

    async def _claim(self, source: MediaSource) -> tuple[MediaClaim, ...]:
        """Claims of its own as soon as a source is resolved, so that a full arena may take features back."""
        assert self._preprocessor is not None
        assert self._claims is not None
        specs = self._family.media_specs
        resolved = await self._preprocessor.resolve(source, specs, self._auto_max_pixels())
        return tuple(map(self._claims.claim, resolved))

    def _auto_max_pixels(self) -> int | None:
        """The declared load policy: above half of `server.max_requests`, `detail: auto` gets the lower
        cap."""
        cap = self._deployment.preprocess.auto_max_pixels
        loaded = self._num_open * 2 > self._deployment.server.max_requests
        return cap if loaded else None

    def _check_sources(self, sources: Sequence[MediaSource]) -> None:
        limit = self._deployment.limits.max_items_per_request
        if len(sources) > limit:
            raise BadRequest(
                f"at most {limit} media items per request, got {len(sources)} over the whole conversation",
                param="messages",
                code="too_many_media_items",
            )
        for source in sources:
            if source.modality not in self.card.input_modalities or self._preprocessor is None:
                raise BadRequest(
                    f"{self.card.names[0]} takes {' and '.join(self.card.input_modalities)} only,"
                    f" not {source.modality}",
                    param=source.param,
                    code="unsupported_modality",
                )

    def spoken_of(self, text: str) -> str:
        return self._family.spoken_of(text)

    def _can_be_said(self, token_ids: Sequence[int]) -> bool:
        return self.spoken_of(self.tokenizer.decode(list(token_ids))) != ""

    def stop_sample(self, request_id: str, sample: int) -> None:
        self._coordinator.stop_sample(request_id, sample)

    def departure(self) -> asyncio.Event:
        return self._departure

    # --- the server as a whole --------------------------------------------------------------------------

    def health(self) -> tuple[StageHealth, ...]:
        stages = [
            StageHealth(name, state, detail)
            for name, (state, detail) in self._coordinator.board.states().items()
        ]
        if self._preprocessor is not None:
            works = self._preprocessor.pool.can_work()
            detail = "" if works else "its worker processes do not start"
            stages.append(StageHealth("preprocess", "ready" if works else "failed", detail))
        return tuple(stages)

    def ready(self) -> bool:
        return all(stage.state == "ready" for stage in self.health())

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._workers.infos()

    def stats(self) -> dict[str, dict[str, float]]:
        stats = dict(self._coordinator.board.stats)
        if self._preprocessor is not None:
            stats["preprocess"] = self._preprocessor.stats()
        if routing := self._coordinator.router.stats():
            stats["routing"] = routing
        stats["front"] = {"open_requests": float(self._num_open), **self._speech.stats()}
        return stats

    def timings(self) -> tuple[Timing, ...]:
        return self._coordinator.board.timings()

    @property
    def router(self) -> PrefixRouter:
        return self._coordinator.router

    async def stages_changed(self) -> None:
        """Returns at the next change of a stage's state, or when a request has left."""
        await self._coordinator.board.changed()

    @property
    def preprocessor(self) -> Preprocessor | None:
        return self._preprocessor

    async def drained(self) -> None:
        """Returns when no stage holds anything of any request."""
        await self._coordinator.drained()

    async def reset_cache(self) -> None:
        if self._preprocessor is not None:
            self._preprocessor.index.clear()
        self._coordinator.router.forget_blocks()
        await self._coordinator.board.reset_cache()

    async def check_integrity(self) -> tuple[IntegrityReport, ...]:
        reports = await self._coordinator.board.check_integrity()
        if self._preprocessor is not None:
            problem = self._preprocessor.check_integrity()
            reports += (IntegrityReport(0, "preprocess", problem, False),)
        return reports


@contextlib.contextmanager
def _released_on_error(claims: Sequence[MediaClaim]) -> Iterator[None]:
    """Until the graph takes the claims over; also when the client leaves meanwhile."""
    try:
        yield
    except BaseException:
        for claim in claims:
            claim.release()
        raise


async def _cancel_and_release(tasks: Sequence[asyncio.Task[tuple[MediaClaim, ...]]]) -> None:
    """One source failed: the others are cancelled, and what was already resolved gives its features back."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, BaseException):
            for claim in outcome:
                claim.release()


async def _next_before(
    deadline: float, events: AsyncGenerator[EventT, None], request_id: str, timeout_s: float
) -> EventT | None:
    try:
        async with asyncio.timeout_at(deadline):
            return await anext(events, None)
    except TimeoutError:
        message = f"the request took longer than {timeout_s:g} s"
        raise RequestTimeout(message, request_id=request_id) from None
