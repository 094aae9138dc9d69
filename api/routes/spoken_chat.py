"""Chat answers with sound: the text as it is written, the speech as it is made, in one choice."""

from __future__ import annotations

import base64
import time

from api.answer import UsageField
from api.audio_encoding import Base64Pieces, SpeechEncoder
from api.chat_job import ChatJob
from api.generation import ChoiceDelta
from api.logprobs import LogprobWriter
from api.responses import (
    AnswerAudio,
    AudioDelta,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FinishText,
)
from api.routes.base import Api, new_id
from api.sample_text import ScoredToken
from api.sse import DONE, EventWriter, event
from contracts.errors import NoSpeech
from stages.service import AudioChunk

# As chat clients call them → the container's name.
FORMATS = {
    **{"wav": "wav", "mp3": "mp3", "flac": "flac", "opus": "opus", "aac": "aac"},
    **{"pcm16": "pcm", "pcm": "pcm"},
}


class _Ending:
    """How text and sound have ended so far, and what there was of them."""

    def __init__(self, echo: str) -> None:
        self.text = [echo]
        self.tokens: list[ScoredToken] = []
        self.num_samples = 0
        self._finish: FinishText = "stop"
        self.stop_reason: str | int | None = None
        self._cut = False

    def take_text(self, step: ChoiceDelta) -> None:
        delta = step.delta
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        if delta.finish is not None:
            self._finish, self.stop_reason = delta.finish, delta.stop_reason

    def take_sound(self, chunk: AudioChunk) -> None:
        self.num_samples += len(chunk.samples) // 4
        self._cut |= chunk.finish_reason == "length"

    @property
    def finish(self) -> FinishText:
        return "length" if self._cut else self._finish

    def check_said(self, api: Api) -> None:
        if not self.num_samples and api.service.spoken_of("".join(self.text)):
            raise NoSpeech("the model ended its speech before it began; try again")


def _encoder(api: Api, job: ChatJob) -> SpeechEncoder:
    rate = api.service.card.sample_rate
    assert rate is not None
    assert job.spoken is not None
    return SpeechEncoder(FORMATS[job.spoken.format], rate)


async def answer(api: Api, job: ChatJob) -> ChatCompletion:
    group = api.group((job.request,), job.text)
    encoder, ending, sound = _encoder(api, job), _Ending(job.echo), bytearray()
    async with group:
        await group.start()
        (generation,) = group.generations
        while not generation.done:
            part = await generation.next_part()
            if isinstance(part, AudioChunk):
                ending.take_sound(part)
                sound += await encoder.encode(part.samples)
            else:
                for step in part:
                    ending.take_text(step)
        ending.check_said(api)
        usage = group.usage()
    sound += await encoder.finish()
    text = "".join(ending.text)
    audio = AnswerAudio(
        id=new_id("audio"),
        data=base64.b64encode(encoder.with_sizes(bytes(sound))).decode(),
        expires_at=int(time.time()),
        transcript=text,
    )
    choice = ChatChoice(
        index=0,
        message=ChatAnswer(content=text, audio=audio),
        logprobs=_logprobs(api, job, ending.tokens),
        finish_reason=ending.finish,
        stop_reason=ending.stop_reason,
    )
    return ChatCompletion(id=job.id, created=job.created, model=job.model, choices=[choice], usage=usage)


def _logprobs(api: Api, job: ChatJob, tokens: list[ScoredToken]) -> ChatLogprobs | None:
    num_top = job.text.logprobs
    return None if num_top is None else LogprobWriter(api.service, num_top).chat(tuple(tokens))


async def stream(api: Api, job: ChatJob, writer: EventWriter) -> None:
    """Every part goes out as it comes. The last chunk has the reason of the end, text and sound together."""
    group = api.group((job.request,), job.text)
    encoder, ending, pieces = _encoder(api, job), _Ending(job.echo), Base64Pieces()
    async with group:
        await group.start()
        (generation,) = group.generations
        part = await generation.next_part()
        events = _opening(job, job.usage.field(group))
        while True:
            usage = job.usage.field(group)
            if isinstance(part, AudioChunk):
                ending.take_sound(part)
                if data := pieces.push(await encoder.encode(part.samples)):
                    events += _event(job, Delta(audio=AudioDelta(data=data)), usage)
            else:
                events += b"".join([_text_event(api, job, step, ending, usage) for step in part])
            if generation.done:
                break
            if events:
                await writer.write(events)
            events = b""
            part = await generation.next_part()
        ending.check_said(api)
        if tail := pieces.push(await encoder.finish()) + pieces.finish():
            events += _event(job, Delta(audio=AudioDelta(data=tail)), usage)
        events += _closing(job, ending, usage)
        if job.usage.final:
            events += _chunk(job, (), group.usage())
    await writer.write(events + DONE, last=True)


def _opening(job: ChatJob, usage: UsageField) -> bytes:
    audio = AudioDelta(id=new_id("audio"), transcript=job.echo or None)
    return _event(job, Delta(role="assistant", content=job.echo, audio=audio), usage)


def _text_event(api: Api, job: ChatJob, step: ChoiceDelta, ending: _Ending, usage: UsageField) -> bytes:
    ending.take_text(step)
    text = step.delta.text
    if not text and not step.delta.tokens:
        return b""  # the end alone, which waits for the sound's
    delta = Delta(content=text, audio=AudioDelta(transcript=text)) if text else Delta()
    logprobs = _logprobs(api, job, list(step.delta.tokens)) if step.delta.tokens else None
    return _chunk(job, (ChunkChoice(0, delta, logprobs),), usage)


def _closing(job: ChatJob, ending: _Ending, usage: UsageField) -> bytes:
    delta = Delta(audio=AudioDelta(expires_at=int(time.time())))
    choice = ChunkChoice(0, delta, None, ending.finish, ending.stop_reason)
    return _chunk(job, (choice,), usage)


def _event(job: ChatJob, delta: Delta, usage: UsageField) -> bytes:
    return _chunk(job, (ChunkChoice(0, delta),), usage)


def _chunk(job: ChatJob, choices: tuple[ChunkChoice, ...], usage: UsageField) -> bytes:
    return event(ChatChunk(id=job.id, created=job.created, model=job.model, choices=choices, usage=usage))
