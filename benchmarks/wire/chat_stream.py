"""One streamed chat completion as seen: when each chunk came, what the server counted, how it failed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

import msgspec

from benchmarks.wire.connection import HttpPool, Outcome
from benchmarks.wire.sse import SseDecoder, SseEvent

CHAT_PATH = "/v1/chat/completions"
MAX_DETAIL_CHARS = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


_NULL = msgspec.Raw(b"null")


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = _NULL


_decode_event = msgspec.json.Decoder(_Event).decode

FailureKind = Literal[
    "connect",
    "timeout",
    "http_status",
    "truncated_stream",
    "error_event",
    "bad_event",
    "missing_finish_reason",
]


@dataclass(frozen=True)
class Failure:
    kind: FailureKind
    detail: str
    status: int = 0

    @property
    def label(self) -> str:
        """What failures are counted under: the kind, with the status of HTTP errors."""
        return f"http_{self.status}" if self.kind == "http_status" else self.kind


@dataclass(frozen=True)
class StreamChunk:
    """A chunk that carried output. `num_tokens` is known only where the server counts usage as it goes."""

    at_s: float
    num_tokens: int | None


@dataclass(frozen=True)
class StreamRecord:
    started_s: float
    ended_s: float
    chunks: tuple[StreamChunk, ...]
    text: str
    finish_reason: str | None
    usage: Usage | None
    failure: Failure | None

    @property
    def num_output_tokens(self) -> int:
        """The server's count; without one, the chunks, which is a lower bound."""
        return self.usage.completion_tokens if self.usage is not None else len(self.chunks)


class _Recorder:
    """The sink of one response body."""

    def __init__(self) -> None:
        self._sse = SseDecoder()
        self._num_counted = 0
        self._texts: list[str] = []
        self.chunks: list[StreamChunk] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.error: Failure | None = None
        self.done = False
        self.last_at_s = 0.0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, at_s: float, data: bytes) -> None:
        self.last_at_s = at_s
        for event in self._sse.feed(data):
            if event.data == b"[DONE]":
                self.done = True
            elif self.error is None:
                self._event(at_s, event)

    def _event(self, at_s: float, sse: SseEvent) -> None:
        detail = sse.data[:MAX_DETAIL_CHARS].decode(errors="replace")
        if sse.name == b"error":
            self.error = Failure("error_event", detail)
            return
        try:
            event = _decode_event(sse.data)
        except msgspec.DecodeError as error:
            self.error = Failure("bad_event", f"{error}: {detail}"[:MAX_DETAIL_CHARS])
            return
        if bytes(event.error) != bytes(_NULL):
            self.error = Failure("error_event", detail)
            return
        self.usage = event.usage or self.usage
        self._output(at_s, event)

    def _output(self, at_s: float, event: _Event) -> None:
        for choice in event.choices[:1]:
            self.finish_reason = choice.finish_reason or self.finish_reason
            delta = choice.delta
            if delta is None or not (delta.text or delta.tool_calls):
                continue
            num_tokens = None
            if event.usage is not None:
                num_tokens = event.usage.completion_tokens - self._num_counted
                self._num_counted = event.usage.completion_tokens
            self.chunks.append(StreamChunk(at_s, num_tokens))
            self._texts.append(delta.text)

    def failure(self, outcome: Outcome) -> Failure | None:
        if outcome.status == 0:
            return Failure("connect", "the server closed the connection without an answer")
        if outcome.status != 200:
            detail = outcome.error_body[:MAX_DETAIL_CHARS].decode(errors="replace")
            return Failure("http_status", detail, outcome.status)
        if self.error is not None:
            return self.error
        if not self.done and (not outcome.complete or self.finish_reason is None):
            return Failure("truncated_stream", f"{len(self.chunks)} chunks, then the stream ended")
        if self.finish_reason is None:
            return Failure("missing_finish_reason", "[DONE] came without a finish_reason")
        return None


async def stream_chat(pool: HttpPool, body: bytes, timeout_s: float) -> StreamRecord:
    """Sends one request and records its stream. Never raises for what the server does: that is `failure`."""
    recorder = _Recorder()
    started_s = pool.clock.now()
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await pool.request("POST", CHAT_PATH, body, recorder.feed)
        failure = recorder.failure(outcome)
    except TimeoutError:
        failure = Failure("timeout", f"no end after {timeout_s:g} s, {len(recorder.chunks)} chunks came")
    except OSError as error:
        failure = Failure("connect", str(error)[:MAX_DETAIL_CHARS])
    return StreamRecord(
        started_s=started_s,
        ended_s=recorder.last_at_s or pool.clock.now(),
        chunks=tuple(recorder.chunks),
        text=recorder.text,
        finish_reason=recorder.finish_reason,
        usage=recorder.usage,
        failure=failure,
    )
