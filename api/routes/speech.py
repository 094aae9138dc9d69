"""POST /v1/audio/speech and GET /v1/audio/voices: text spoken word for word, streamed as it is made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from api.audio_encoding import Base64Pieces, SpeechEncoder
from api.generation import Generation
from api.routes.base import Api, client_left, json_response
from api.sample_text import TextOptions
from api.speech_parts import SpeechParts
from api.speech_text import pieces_of
from api.sse import ByteStream, EventStream, EventWriter, event, unless_disconnected
from api.validation import MAX_IDENTIFIER_CHARS, check_model, checked, invalid, require_length, unsupported
from api.voices import VoiceObject, check_voice
from contracts.conversation import Conversation, Message, TextPart
from contracts.errors import BadRequest
from contracts.params import SamplingParams
from stages.service import UNLIMITED, GenerationRequest, SpeechOptions
from vocoder.containers.formats import FORMATS

PIECE_CHARS = 400  # of a long text: some 25 s of speech
DEFAULT_FORMAT = "mp3"
FINISH_HEADER = "x-omnistage-finish-reason"  # of a whole file: what `speech.audio.done` says of a stream


class SpeechRequest(msgspec.Struct, kw_only=True):
    input: str
    model: str | None = None
    voice: str | VoiceObject | None = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: str | None = None
    stream: bool | None = None  # false: the whole file at once, with its length
    instructions: str | None = None
    seed: int | None = None
    user: str | None = None


class SpeechUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, frozen=True):
    audio: str
    type: Literal["speech.audio.delta"] = "speech.audio.delta"


class SpeechDone(msgspec.Struct, frozen=True):
    """`finish_reason`: "length" when the speech was cut at its bound."""

    usage: SpeechUsage
    finish_reason: Literal["stop", "length"]
    type: Literal["speech.audio.done"] = "speech.audio.done"


class Voice(msgspec.Struct, frozen=True):
    id: str
    name: str
    object: Literal["voice"] = "voice"


class VoiceList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Voice]
    voices: tuple[str, ...]
    default: str | None
    sample_rate: int | None  # of PCM, Hz


@dataclass(frozen=True)
class SpeechJob:
    """A validated request; `pieces` are spoken in order."""

    pieces: tuple[str, ...]
    voice: str | None
    format: str
    speed: float
    instructions: str
    seed: int | None


_decoder = msgspec.json.Decoder(SpeechRequest)


def routes(api: Api) -> list[BaseRoute]:
    return [
        Route("/v1/audio/speech", partial(_speech, api), methods=["POST"]),
        Route("/v1/audio/voices", partial(_voices, api), methods=["GET"]),
    ]


async def _voices(api: Api, request: Request) -> Response:
    voices = api.service.card.voices
    return json_response(
        VoiceList(
            data=[Voice(voice, voice) for voice in voices],
            voices=voices,
            default=voices[0] if voices else None,
            sample_rate=api.service.card.sample_rate,
        )
    )


async def _speech(api: Api, request: Request) -> ASGIApp:
    body = await api.read(request, _decoder)
    job = _job(api, body)
    stall_s = api.settings.send_stall_timeout_s
    mime = FORMATS[job.format].mime
    match body.stream_format:
        case None | "audio" if body.stream is False:
            whole = await unless_disconnected(request.receive, _whole(api, job))
            return client_left() if whole is None else whole
        case None | "audio":
            return ByteStream(mime, partial(_stream_bytes, api, job), stall_s)
        case "sse":
            return EventStream(partial(_stream_events, api, job), stall_s)
        case _:
            raise invalid("stream_format", "must be 'audio' or 'sse'")


def _job(api: Api, body: SpeechRequest) -> SpeechJob:
    card, limit = api.service.card, api.settings.max_speech_chars
    check_model(body.model, card)
    if not card.voices:
        raise BadRequest(f"{card.names[0]} does not speak", param="model", code="unsupported_model")
    if not body.input.strip():
        raise invalid("input", "must hold some text to speak")
    if len(body.input) > limit:
        raise invalid("input", f"must be at most {limit} characters long, not {len(body.input)}")
    if body.instructions:
        require_length("instructions", body.instructions, limit)
    if body.user is not None and len(body.user) > MAX_IDENTIFIER_CHARS:
        raise invalid("user", f"must be at most {MAX_IDENTIFIER_CHARS} characters long")
    container = body.response_format or DEFAULT_FORMAT
    if container not in FORMATS:
        raise unsupported("response_format", f"must be one of: {', '.join(FORMATS)}")
    pieces = pieces_of(api.service.spoken_of(body.input), PIECE_CHARS)
    spoken = tuple(piece for piece in pieces if api.service.spoken_of(piece))
    if not spoken:
        raise invalid("input", f"holds no word or number that {card.names[0]} can speak")
    return SpeechJob(
        pieces=spoken,
        voice=check_voice(body.voice, card),
        format=container,
        speed=checked("speed", body.speed, 1.0),
        instructions=body.instructions or "",
        seed=None if body.seed is None else checked("seed", body.seed, 0) % 2**63,
    )


def _generation(api: Api, job: SpeechJob, piece: str) -> Generation:
    """The model is asked to read a text, and the text is its answer."""
    messages = [Message(role="user", parts=(TextPart(f"Read this text aloud:\n{piece}"),))]
    if job.instructions:
        messages.insert(0, Message(role="system", parts=(TextPart(job.instructions),)))
    request = GenerationRequest(
        input=Conversation(messages=tuple(messages)),
        sampling=SamplingParams(max_tokens=UNLIMITED, seed=job.seed),
        timeout_s=api.settings.request_timeout_s,
        speech=SpeechOptions(voice=job.voice, verbatim=piece),
    )
    return Generation(api.service, request, TextOptions(), api.metrics, 0)


@asynccontextmanager
async def _spoken(
    api: Api, job: SpeechJob, *, goes_on: bool
) -> AsyncIterator[tuple[SpeechParts, SpeechEncoder]]:
    rate = api.service.card.sample_rate
    assert rate is not None, "a model with voices has a rate"
    encoder = SpeechEncoder(job.format, rate, job.speed)
    makers = [partial(_generation, api, job, piece) for piece in job.pieces]
    async with SpeechParts(makers, api.service.departure, goes_on=goes_on) as parts:
        yield parts, encoder


async def _encoded(parts: SpeechParts, encoder: SpeechEncoder) -> AsyncIterator[bytes]:
    """The container's bytes as they get ready."""
    while (samples := await parts.next()) is not None:
        if data := await encoder.encode(samples):
            yield data
    yield await encoder.finish()


async def _whole(api: Api, job: SpeechJob) -> Response:
    async with _spoken(api, job, goes_on=False) as (parts, encoder):
        pieces = [data async for data in _encoded(parts, encoder)]
    sound = encoder.with_sizes(b"".join(pieces))
    return Response(sound, media_type=encoder.mime, headers={FINISH_HEADER: parts.finish_reason})


async def _stream_bytes(api: Api, job: SpeechJob, writer: EventWriter) -> None:
    """A body has no place for an error: of a text that was not said in full it stays without its end."""
    async with _spoken(api, job, goes_on=True) as (parts, encoder):
        async for data in _encoded(parts, encoder):
            await writer.write(data)
    parts.check_said()
    await writer.write(b"", last=True)


async def _stream_events(api: Api, job: SpeechJob, writer: EventWriter) -> None:
    base64 = Base64Pieces()
    async with _spoken(api, job, goes_on=True) as (parts, encoder):
        async for data in _encoded(parts, encoder):
            if text := base64.push(data):
                await writer.write(event(SpeechDelta(text)))
    if tail := base64.finish():
        await writer.write(event(SpeechDelta(tail)))
    parts.check_said()
    frame = api.service.card.samples_per_frame or 1
    num_frames = -(-parts.num_samples // frame)
    usage = SpeechUsage(parts.num_prompt_tokens, num_frames, parts.num_prompt_tokens + num_frames)
    await writer.write(event(SpeechDone(usage, parts.finish_reason)), last=True)
