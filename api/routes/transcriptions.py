"""POST /v1/audio/transcriptions and /v1/audio/translations: a recording in, its text out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from api.form import Form, read_form
from api.routes.base import Api, client_left
from api.sse import EventStream, EventWriter, event, unless_disconnected
from api.transcript_formats import MIME, RESPONSE_FORMATS, Transcript, render
from api.validation import check_model, checked, invalid, unsupported
from contracts.errors import BadRequest, OmnistageError
from contracts.media import MediaSource
from contracts.transcription import (
    TranscriptionOptions,
    TranscriptLanguage,
    TranscriptSegment,
    TranscriptText,
    TranscriptUsage,
)
from stages.service import RecordingReady, TranscriptionEvent, TranscriptionRequest

MAX_PROMPT_CHARS = 4096
TIMED_FORMATS = ("verbose_json", "srt", "vtt")
GRANULARITIES = ("segment", "word")
NumberT = TypeVar("NumberT", int, float)


class TextDelta(msgspec.Struct, frozen=True):
    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    audio_tokens: int
    text_tokens: int


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputDetails
    type: Literal["tokens"] = "tokens"


class TextDone(msgspec.Struct, frozen=True):
    text: str
    language: str
    usage: TokenUsage
    type: Literal["transcript.text.done"] = "transcript.text.done"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    request: TranscriptionRequest
    response_format: str
    stream: bool
    granularities: tuple[str, ...]


def routes(api: Api) -> list[BaseRoute]:
    return [
        Route("/v1/audio/transcriptions", partial(_transcribe, api, "transcribe"), methods=["POST"]),
        Route("/v1/audio/translations", partial(_transcribe, api, "translate"), methods=["POST"]),
    ]


async def _transcribe(api: Api, task: Literal["transcribe", "translate"], request: Request) -> ASGIApp:
    form = await read_form(request, api.settings.max_body_bytes)
    job = await _job(api, task, form)
    if job.stream:
        return EventStream(partial(_stream, api, job), api.settings.send_stall_timeout_s)
    transcript = await unless_disconnected(request.receive, _whole(api, job))
    if transcript is None:
        return client_left()
    return Response(render(transcript, job.response_format), media_type=MIME[job.response_format])


async def _job(api: Api, task: Literal["transcribe", "translate"], form: Form) -> Job:
    card = api.service.card
    check_model(form.text("model"), card)
    if not card.transcribes:
        raise BadRequest(
            f"{card.names[0]} does not transcribe: serve a Whisper or Qwen3-ASR checkpoint, or ask in a chat",
            param="model",
            code="unsupported_model",
        )
    data = form.file("file")
    if data is None:
        raise BadRequest("`file` is required", param="file", code="missing_required_parameter")
    if not data:
        raise invalid("file", "is empty")
    response_format = form.text("response_format") or "json"
    if response_format not in RESPONSE_FORMATS:
        raise invalid("response_format", f"must be one of: {', '.join(RESPONSE_FORMATS)}")
    stream = form.flag("stream")
    if stream and response_format not in ("json", "text"):
        raise invalid("stream", f"is not possible with response_format '{response_format}'")
    granularities = _granularities(form, response_format)
    url = await asyncio.to_thread(_data_url, data)
    return Job(
        request=TranscriptionRequest(
            source=MediaSource("audio", url, param="file"),
            options=TranscriptionOptions(
                language=form.text("language"),
                task=task,
                prompt=_prompt(form),
                temperature=checked(
                    "transcription_temperature", _number(form, "temperature", float), 0.0, param="temperature"
                ),
                seed=checked("seed", _number(form, "seed", int), 0) % 2**63,
                timestamps=response_format in TIMED_FORMATS,
                words="word" in granularities,
            ),
            timeout_s=api.settings.request_timeout_s,
        ),
        response_format=response_format,
        stream=stream,
        granularities=granularities,
    )


def _granularities(form: Form, response_format: str) -> tuple[str, ...]:
    wanted = form.texts("timestamp_granularities[]") + form.texts("timestamp_granularities")
    for granularity in wanted:
        if granularity not in GRANULARITIES:
            raise invalid("timestamp_granularities", f"must be among: {', '.join(GRANULARITIES)}")
    if wanted and response_format != "verbose_json":
        raise invalid("timestamp_granularities", "needs response_format 'verbose_json'")
    for name in ("include", "include[]", "chunking_strategy"):
        value = form.text(name)
        if value is not None and value != "auto":
            raise unsupported(name)
    return tuple(wanted) or ("segment",)


def _prompt(form: Form) -> str:
    prompt = form.text("prompt") or ""
    if len(prompt) > MAX_PROMPT_CHARS:
        raise invalid("prompt", f"must be at most {MAX_PROMPT_CHARS} characters long")
    return prompt


def _number(form: Form, name: str, kind: type[NumberT]) -> NumberT | None:
    text = form.text(name)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise invalid(name, "must be a number") from None


def _data_url(data: bytes) -> str:
    return "data:audio/unknown;base64," + base64.b64encode(data).decode()


async def _events(api: Api, job: Job) -> AsyncGenerator[TranscriptionEvent, None]:
    """The service's events, accounted for."""
    events = api.service.transcribe(job.request)
    accepted = finished = False
    api.metrics.open_requests.inc()
    try:
        async with contextlib.aclosing(events):
            async for found in events:
                if isinstance(found, RecordingReady):
                    accepted = True
                    api.metrics.transcribed_s.inc(found.duration_s)
                yield found
        finished = True
        api.metrics.finished("stop")
    except OmnistageError as error:
        finished = True
        if accepted:
            api.metrics.finished("error")
        else:
            api.metrics.rejected(error.status)
        raise
    finally:
        api.metrics.open_requests.dec()
        if not finished:
            api.metrics.finished("abort")


async def _whole(api: Api, job: Job) -> Transcript:
    text: list[str] = []
    segments: list[TranscriptSegment] = []
    language, duration_s = "", 0.0
    async for found in _events(api, job):
        match found:
            case RecordingReady():
                duration_s = found.duration_s
            case TranscriptLanguage(language):
                pass
            case TranscriptText(piece):
                text.append(piece)
            case TranscriptSegment():
                segments.append(found)
    options = job.request.options
    return Transcript(
        task=options.task,
        language=language,
        duration_s=duration_s,
        text="".join(text).strip(),
        segments=tuple(segments),
        granularities=job.granularities,
    )


async def _stream(api: Api, job: Job, writer: EventWriter) -> None:
    text: list[str] = []
    language, usage = "", None
    async for found in _events(api, job):
        match found:
            case TranscriptLanguage(language):
                pass
            case TranscriptText(piece):
                delta = piece if text else piece.lstrip()
                if delta:
                    text.append(delta)
                    await writer.write(event(TextDelta(delta)))
            case TranscriptUsage():
                usage = _usage(found)
            case _:
                pass
    assert usage is not None, "every transcription ends with it"
    await writer.write(event(TextDone("".join(text).rstrip(), language, usage)), last=True)


def _usage(told: TranscriptUsage) -> TokenUsage:
    num_input = told.audio_tokens + told.text_tokens
    return TokenUsage(
        input_tokens=num_input,
        output_tokens=told.output_tokens,
        total_tokens=num_input + told.output_tokens,
        input_token_details=InputDetails(audio_tokens=told.audio_tokens, text_tokens=told.text_tokens),
    )
