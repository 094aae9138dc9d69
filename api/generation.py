"""Reads the service's events: tokens become text per sample, and usage and latencies are accounted for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

import msgspec

from api.metrics import Metrics
from api.responses import Usage
from api.sample_text import SampleText, TextDelta, TextOptions
from contracts.errors import EngineError, NoSpeech, OmnistageError
from contracts.messages import SampleDelta
from stages.service import AudioChunk, Event, GenerationRequest, PromptReady, Service, Tokens


@dataclass(frozen=True)
class ChoiceDelta:
    """`choice`: index in the response's `choices`."""

    choice: int
    delta: TextDelta


class Generation:
    """One prompt's samples. An async context manager: leaving it early aborts the request in every stage."""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        text: TextOptions,
        metrics: Metrics,
        first_choice: int,
    ) -> None:
        self._service = service
        self._request = request
        self._metrics = metrics
        self._first_choice = first_choice
        self._samples = [SampleText(service.tokenizer, text) for _ in range(request.sampling.n)]
        self._last_token_at_s: list[float | None] = [None] * request.sampling.n
        self._num_open = request.sampling.n
        self._awaits_audio = request.speech is not None
        self._heard_audio = False
        self._events: AsyncGenerator[Event, None] | None = None
        self._arrived_at_s = time.perf_counter()
        self._first_token_at_s: float | None = None
        self.prompt: PromptReady | None = None
        self.num_cached_tokens = 0
        self.num_audio_samples = 0

    async def __aenter__(self) -> Generation:
        self._events = self._service.generate(self._request)
        self._metrics.open_requests.inc()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._events is not None
        try:
            await self._events.aclose()
        finally:
            self._metrics.open_requests.dec()
            self._account(error)

    @property
    def entered(self) -> bool:
        return self._events is not None

    @property
    def done(self) -> bool:
        return self._num_open == 0 and not self._awaits_audio

    @property
    def num_generated_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self._samples)

    @property
    def num_audio_tokens(self) -> int:
        """Codec frames heard so far."""
        return -(-self.num_audio_samples // (self._service.card.samples_per_frame or 1))

    async def start(self) -> None:
        """Returns when the prompt is accepted. Raises what the service raises: bad input, a full queue."""
        event = await self._next_event()
        assert isinstance(event, PromptReady), "PromptReady comes first"
        self.prompt = event
        self._metrics.accepted_s.observe(time.perf_counter() - self._arrived_at_s)
        self._metrics.prompt_tokens.inc(len(event.prompt_token_ids))

    async def next_step(self) -> list[ChoiceDelta]:
        """What one engine step added; may be empty when all of it is held back."""
        part = await self.next_part()
        assert not isinstance(part, AudioChunk), "a spoken answer is read part by part"
        return part

    async def next_part(self) -> list[ChoiceDelta] | AudioChunk:
        """A step of the text, or the next sound of a spoken answer."""
        event = await self._next_event()
        assert not isinstance(event, PromptReady), "PromptReady comes once"
        if isinstance(event, AudioChunk):
            self._hear(event)
            return event
        return self._step(event)

    def _hear(self, chunk: AudioChunk) -> None:
        sample_rate = self._service.card.sample_rate
        assert sample_rate is not None, "a model that speaks has a rate"
        num_samples = len(chunk.samples) // 4
        self.num_audio_samples += num_samples
        self._metrics.audio_s.inc(num_samples / sample_rate)
        if num_samples and not self._heard_audio:
            self._heard_audio = True
            self._metrics.ttfa_s.observe(time.perf_counter() - self._arrived_at_s)
        if chunk.finish_reason is not None:
            self._awaits_audio = False
            if chunk.finish_reason == "length":
                self._metrics.speech_cut.inc()

    def _step(self, event: Tokens) -> list[ChoiceDelta]:
        if event.num_cached_tokens is not None:
            self.num_cached_tokens = event.num_cached_tokens
        now_s = time.perf_counter()
        if self._first_token_at_s is None:
            self._first_token_at_s = now_s
            self._metrics.ttft_s.observe(now_s - self._arrived_at_s)
        step: list[ChoiceDelta] = []
        num_tokens = 0
        for sample_delta in event.deltas:
            # Tokens drawn before stop_sample took effect are no part of the answer.
            if self._samples[sample_delta.sample].finished:
                continue
            delta = self._push(sample_delta, now_s)
            num_tokens += delta.num_tokens
            if delta.visible:
                step.append(ChoiceDelta(self._first_choice + sample_delta.sample, delta))
        if num_tokens:
            self._metrics.per_token.generated(num_tokens)
        return step

    def _push(self, sample_delta: SampleDelta, now_s: float) -> TextDelta:
        index = sample_delta.sample
        delta = self._samples[index].push(sample_delta)
        if delta.num_tokens:
            last_s = self._last_token_at_s[index]
            if last_s is not None:
                self._metrics.per_token.between_tokens(now_s - last_s)
            self._last_token_at_s[index] = now_s
        if delta.finish is not None:
            self._num_open -= 1
            self._metrics.finished(delta.finish)
            if sample_delta.finish_reason is None:
                assert self.prompt is not None
                self._service.stop_sample(self.prompt.request_id, index)
        return delta

    async def _next_event(self) -> Event:
        assert self._events is not None, "entered"
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            raise EngineError("the answer ended before it was complete; send the request again") from None

    def _account(self, error: BaseException | None) -> None:
        failed = isinstance(error, Exception)  # a cancellation is the client leaving
        if isinstance(error, NoSpeech):
            self._metrics.speech_mute.inc()
        if self.prompt is None:
            if failed:
                self._metrics.rejected(error.status if isinstance(error, OmnistageError) else 500)
            return
        for _ in range(self._num_open):
            self._metrics.finished("error" if failed else "abort")
        if not self.done or self._first_token_at_s is None:
            return
        now_s = time.perf_counter()
        num_tokens = self.num_generated_tokens
        self._metrics.e2e_s.observe(now_s - self._arrived_at_s)
        self._metrics.request_prompt_tokens.observe(len(self.prompt.prompt_token_ids))
        self._metrics.request_generation_tokens.observe(num_tokens)
        per_sample = num_tokens / len(self._samples)
        if per_sample > 1:
            self._metrics.tpot_s.observe((now_s - self._first_token_at_s) / (per_sample - 1))


class GenerationGroup:
    """The generations behind one response, read as one. A single one (chat) is read without extra tasks.

    Back-pressure: no generation is read ahead by more than one step.
    """

    def __init__(self, generations: list[Generation]) -> None:
        assert generations
        self.generations = generations
        self._open = AsyncExitStack()
        self._reads: dict[asyncio.Task[list[ChoiceDelta]], Generation] = {}

    async def __aenter__(self) -> GenerationGroup:
        for generation in self.generations:
            await self._open.enter_async_context(generation)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A generator that a task still reads cannot be closed: end the reads first.
        for read in self._reads:
            read.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)
        await self._open.__aexit__(kind, error, traceback)

    @property
    def done(self) -> bool:
        return all(generation.done for generation in self.generations)

    async def start(self) -> None:
        """All prompts accepted, or the first refusal raised."""
        for generation in self.generations:
            await generation.start()

    async def next_step(self) -> list[ChoiceDelta]:
        if len(self.generations) == 1:
            return await self.generations[0].next_step()
        reading = set(self._reads.values())
        for generation in self.generations:
            if not generation.done and generation not in reading:
                self._reads[asyncio.create_task(generation.next_step())] = generation
        finished, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
        step: list[ChoiceDelta] = []
        for read in finished:
            del self._reads[read]
            step.extend(read.result())
        return step

    def usage(self) -> Usage:
        prompts = [g.prompt for g in self.generations if g.prompt is not None]
        details = {"cached_tokens": sum(g.num_cached_tokens for g in self.generations)}
        for prompt in prompts:
            for modality, count in prompt.media_tokens.items():
                details[f"{modality}_tokens"] = details.get(f"{modality}_tokens", 0) + count
        num_prompt = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        num_text = sum(g.num_generated_tokens for g in self.generations)
        num_audio = sum(g.num_audio_tokens for g in self.generations)
        spoken = {"text_tokens": num_text, "audio_tokens": num_audio}
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_text + num_audio,
            total_tokens=num_prompt + num_text + num_audio,
            prompt_tokens_details=details,
            completion_tokens_details=spoken if num_audio else msgspec.UNSET,
        )
