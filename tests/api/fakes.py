"""Fakes of the seams under `api`: a byte-level toy tokenizer and a service that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from contracts.conversation import Conversation, MediaPart, TextPart
from contracts.errors import BadRequest, OmnistageError, TooManyRequests
from contracts.messages import FinishReason, IntegrityReport, SampleDelta, TokenLogprobs
from contracts.timings import Timing
from stages.service import (
    UNLIMITED,
    Event,
    GenerationRequest,
    ModelCard,
    PromptReady,
    StageHealth,
    Tokens,
    TranscriptionEvent,
    TranscriptionRequest,
    WorkerInfo,
)

START, END, IMAGE = 256, 257, 258
SPECIALS = {START: "<|start|>", END: "<|end|>", IMAGE: "<|image|>"}
FIRST_PIECE = 259
IMAGE_TOKENS = 4  # of every image, once expanded
CONTEXT = 4096
UNSAYABLE = "😀"  # what no voice here has a sound for


class ToyTokenizer:
    """Ids 0-255 are bytes, then the specials, then `pieces` of several bytes each."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.vocab_size = FIRST_PIECE + len(pieces)

    def encode(
        self, text: str, *, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        return ([START] if add_special_tokens else []) + list(text.encode())

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        ids: list[int] = list((conversation.tools_json or "").encode())
        for message in conversation.messages:
            ids += [START, *message.role.encode()]
            for part in message.parts:
                ids += [IMAGE] if isinstance(part, MediaPart) else list(part.text.encode())
            for call in message.tool_calls:
                ids += list(f"{call.name}({call.arguments})".encode())
            ids.append(END)
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in SPECIALS:
            return SPECIALS[token_id].encode()
        return bytes([token_id]) if token_id < 256 else self._pieces[token_id - FIRST_PIECE]

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIALS


def pieces(count: int, first: int = FIRST_PIECE) -> list[int]:
    return list(range(first, first + count))


@dataclass
class Script:
    """What the service does with one request. `answers`: token ids per sample (repeated when too few)."""

    answers: Sequence[Sequence[int]] = (tuple(b"Hello!"),)
    ends: bool = True  # the answer is followed by the end token
    per_step: int = 1  # tokens of one step
    refusal: OmnistageError | None = None  # instead of PromptReady
    fail_at_step: int | None = None  # 0 is before the first token
    error: Exception | None = None
    hold_at_step: int | None = None  # waits there for `ScriptedService.release`
    stop_lag_steps: int = 0  # steps that a stopped sample still takes: they were under way
    num_cached: int = 0
    logprobs: Callable[[int, int], TokenLogprobs] | None = None  # (token, position)


def plain_logprobs(token_id: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, 1, ((token_id, -0.5), ((token_id + 1) % 256, -1.5), (65, -2.5)))


@dataclass
class Flow:
    """One request inside the service, and how it ended: "completed", "aborted" or "failed"."""

    request: GenerationRequest
    stopped: set[int] = field(default_factory=set)
    stopped_at: dict[int, int] = field(default_factory=dict)  # positions, of samples stopped by the client
    position: int = 0
    num_steps: int = 0
    spoken: bool = False  # its last sound was handed out
    outcome: str = "open"


class ScriptedService:
    def __init__(self, *scripts: Script, tokenizer: ToyTokenizer | None = None) -> None:
        self.tokenizer = tokenizer or ToyTokenizer()
        self.card = ModelCard(
            names=("toy", "toy-alias"),
            family="toy",
            context_length=CONTEXT,
            input_modalities=("text", "image"),
            output_modalities=("text",),
            created=1_700_000_000,
        )
        self._scripts = scripts or (Script(),)
        self.flows: dict[str, Flow] = {}
        self.release = asyncio.Event()
        self.changed = asyncio.Condition()
        self.stages = (StageHealth("encoder", "ready"), StageHealth("thinker", "ready"))
        self.values: dict[str, dict[str, float]] = {}
        self.times: tuple[Timing, ...] = ()
        self.num_resets = 0
        self.max_open: int | None = None  # requests at once; more are refused
        self._departure = asyncio.Event()

    @property
    def last(self) -> Flow:
        return list(self.flows.values())[-1]

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(120), self.changed:
            await self.changed.wait_for(predicate)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        number = len(self.flows)
        script = self._scripts[min(number, len(self._scripts) - 1)]
        request_id = f"req-{number}"
        num_open = sum(flow.outcome == "open" for flow in self.flows.values())
        flow = self.flows[request_id] = Flow(request)
        refused = False
        try:
            if self.max_open is not None and num_open >= self.max_open:
                raise TooManyRequests("full")
            async for event in self._events(script, request_id, flow):
                yield event
            flow.outcome = "completed"
        except Exception as error:
            flow.outcome = "failed"
            refused = isinstance(error, TooManyRequests)
            raise
        finally:
            if not refused:
                self._departure.set()
                self._departure = asyncio.Event()
            if flow.outcome == "open":
                finished = flow.stopped == set(range(request.sampling.n))
                finished &= request.speech is None or flow.spoken
                flow.outcome = "completed" if finished else "aborted"
            # A generator being closed must not wait for a lock that someone else may hold.
            self._notifying = asyncio.ensure_future(self._notify())

    async def _events(self, script: Script, request_id: str, flow: Flow) -> AsyncGenerator[Event, None]:
        if script.refusal is not None:
            raise script.refusal
        prompt, media = self._prompt(flow.request)
        sampling = flow.request.sampling
        max_tokens = min(sampling.max_tokens, CONTEXT - len(prompt))
        yield PromptReady(
            request_id=request_id,
            prompt_token_ids=prompt,
            media_tokens=media,
            max_tokens=sampling.max_tokens if sampling.max_tokens < UNLIMITED else max_tokens,
        )
        answers = [
            [*script.answers[k % len(script.answers)], *([END] if script.ends else [])]
            for k in range(sampling.n)
        ]
        position = 0
        while True:
            step = position // script.per_step
            if step == script.fail_at_step:
                assert script.error is not None
                raise script.error
            if step == script.hold_at_step:
                await self._notify()
                await self.release.wait()
            await asyncio.sleep(0)
            flow.position = position
            deltas = self._step(script, flow, answers, position, max_tokens)
            if not deltas:
                return
            flow.num_steps += 1
            await self._notify()
            yield Tokens(deltas=tuple(deltas), num_cached_tokens=script.num_cached if step == 0 else None)
            position += script.per_step

    async def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptionEvent, None]:
        raise BadRequest("this model does not transcribe")
        yield  # a generator

    def _step(
        self, script: Script, flow: Flow, answers: list[list[int]], position: int, max_tokens: int
    ) -> list[SampleDelta]:
        deltas = []
        for sample, answer in enumerate(answers):
            tokens = answer[:max_tokens][position : position + script.per_step]
            lag = script.stop_lag_steps * script.per_step
            if position >= flow.stopped_at.get(sample, CONTEXT) + lag or not tokens:
                continue
            at_end = position + len(tokens) == min(len(answer), max_tokens)
            ended = at_end and tokens[-1] == END
            reason: FinishReason | None = ("stop" if ended else "length") if at_end else None
            if at_end:
                flow.stopped.add(sample)
            logprobs = script.logprobs or plain_logprobs
            deltas.append(
                SampleDelta(
                    sample=sample,
                    token_ids=tuple(tokens),
                    logprobs=tuple(logprobs(t, position + i) for i, t in enumerate(tokens))
                    if flow.request.sampling.logprobs is not None
                    else (),
                    finish_reason=reason,
                    stop_token_id=END if ended else None,
                )
            )
        return deltas

    def _prompt(self, request: GenerationRequest) -> tuple[list[int], dict[str, int]]:
        if isinstance(request.input, tuple):
            return list(request.input), {}
        if isinstance(request.input, str):
            return self.tokenizer.encode(request.input, add_special_tokens=True), {}
        ids: list[int] = []
        for token in self.tokenizer.encode_conversation(request.input):
            ids += [IMAGE] * IMAGE_TOKENS if token == IMAGE else [token]
        num_images = len(request.input.media())
        return ids, {"image": num_images * IMAGE_TOKENS} if num_images else {}

    def stop_sample(self, request_id: str, sample: int) -> None:
        flow = self.flows[request_id]
        flow.stopped.add(sample)
        flow.stopped_at[sample] = flow.position + 1

    def spoken_of(self, text: str) -> str:
        return text if text.strip(f"{UNSAYABLE} \n") else ""

    def departure(self) -> asyncio.Event:
        return self._departure

    def health(self) -> tuple[StageHealth, ...]:
        return self.stages

    def ready(self) -> bool:
        return all(stage.state == "ready" for stage in self.stages)

    def workers(self) -> tuple[WorkerInfo, ...]:
        return (WorkerInfo(name="w", stages=("lm",), pid=7, devices=("cpu",), state="ready", restarts=2),)

    def stats(self) -> dict[str, dict[str, float]]:
        return self.values

    def timings(self) -> tuple[Timing, ...]:
        return self.times

    async def reset_cache(self) -> None:
        self.num_resets += 1

    async def check_integrity(self) -> tuple[IntegrityReport, ...]:
        return ()

    async def drained(self) -> None:
        await self.wait_for(lambda: all(f.outcome != "open" for f in self.flows.values()))


def shown(conversation: Conversation) -> list[list[str]]:
    """Per message its parts: text, or the URL of a picture."""
    return [
        [p.text if isinstance(p, TextPart) else p.source.url for p in message.parts]
        for message in conversation.messages
    ]
