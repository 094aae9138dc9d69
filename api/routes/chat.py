"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from api.answer import Collected, UsageField, UsageMode, collect, stream
from api.chat_job import ChatJob, SpokenOptions
from api.conversation import conversation_of
from api.generation import ChoiceDelta
from api.logprobs import LogprobWriter
from api.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    Usage,
)
from api.routes import spoken_chat
from api.routes.base import Api, client_left, json_response
from api.schemas import ABSENT, ChatRequest
from api.sse import EventStream, EventWriter, event, unless_disconnected
from api.validation import check_chat, check_model, invalid, max_tokens_param, sampling_of, text_options_of
from api.voices import check_voice
from contracts.conversation import Conversation, TextPart
from stages.service import GenerationRequest, ModelCard, SpeechOptions

_decoder = msgspec.json.Decoder(ChatRequest)


def routes(api: Api) -> list[BaseRoute]:
    return [Route("/v1/chat/completions", partial(_chat, api), methods=["POST"])]


async def _chat(api: Api, request: Request) -> ASGIApp:
    body = await api.read(request, _decoder)
    job = _job(api, body)
    if body.stream:
        produce = _stream if job.spoken is None else spoken_chat.stream
        return EventStream(partial(produce, api, job), api.settings.send_stall_timeout_s)
    answering = _answer(api, job) if job.spoken is None else spoken_chat.answer(api, job)
    answer = await unless_disconnected(request.receive, answering)
    return client_left() if answer is None else json_response(answer)


def _job(api: Api, body: ChatRequest) -> ChatJob:
    card = api.service.card
    model = check_model(body.model, card)
    check_chat(body, card)
    sampling = sampling_of(
        body, api.service.tokenizer.vocab_size, api.settings.max_samples, api.service.card.sampling
    )
    spoken = _spoken(body, card)
    if spoken is not None and sampling.n != 1:
        raise invalid("n", "must be 1 for a spoken answer")
    conversation = conversation_of(
        body.messages,
        # A model that must not call tools is best not shown any.
        tools=ABSENT if body.tool_choice == "none" else body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        input_modalities=card.input_modalities,
        media_kwargs=body.mm_processor_kwargs,
    )
    return ChatJob(
        request=GenerationRequest(
            input=conversation,
            sampling=sampling,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            timeout_s=api.settings.request_timeout_s,
            speech=None if spoken is None else SpeechOptions(voice=spoken.voice),
            max_tokens_param=max_tokens_param(body),
        ),
        spoken=spoken,
        text=text_options_of(body, sampling),
        model=model,
        echo=_echoed(conversation) if body.echo else "",
        usage=UsageMode.of(body.stream_options),
    )


def _spoken(body: ChatRequest, card: ModelCard) -> SpokenOptions | None:
    """Only `modalities` asks for speech: `audio` alone, which some clients always send, costs nothing."""
    if "audio" not in (body.modalities or ()):
        return None
    if body.audio is None:
        raise invalid("audio", "is required when `modalities` asks for audio: voice and format")
    container = body.audio.format or "wav"
    if container not in spoken_chat.FORMATS:
        raise invalid("audio.format", f"must be one of: {', '.join(spoken_chat.FORMATS)}")
    return SpokenOptions(check_voice(body.audio.voice, card, "audio.voice"), container)


def _echoed(conversation: Conversation) -> str:
    """With `echo`, an answer that continues the last message repeats what it continues (as in vLLM)."""
    if not conversation.continue_final_message:
        return ""
    return "".join(p.text for p in conversation.messages[-1].parts if isinstance(p, TextPart))


async def _answer(api: Api, job: ChatJob) -> ChatCompletion:
    choices, usage = await collect(api.group((job.request,), job.text), [job.echo] * job.num_choices)
    return ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        choices=[_choice(api, job, index, choice) for index, choice in enumerate(choices)],
        usage=usage,
    )


def _choice(api: Api, job: ChatJob, index: int, choice: Collected) -> ChatChoice:
    assert choice.finish is not None
    num_top = job.text.logprobs
    return ChatChoice(
        index=index,
        message=ChatAnswer(content=choice.text),
        logprobs=None if num_top is None else LogprobWriter(api.service, num_top).chat(choice.tokens),
        finish_reason=choice.finish,
        stop_reason=choice.stop_reason,
    )


async def _stream(api: Api, job: ChatJob, writer: EventWriter) -> None:
    await stream(api.group((job.request,), job.text), _ChatChunks(api, job), job.usage, writer)


class _ChatChunks:
    """Encodes a stream's chunks."""

    def __init__(self, api: Api, job: ChatJob) -> None:
        self._job = job
        num_top = job.text.logprobs
        self._logprobs = None if num_top is None else LogprobWriter(api.service, num_top)

    def opening(self, usage: UsageField) -> bytes:
        role = Delta(role="assistant", content=self._job.echo)
        return b"".join([self._event((ChunkChoice(i, role),), usage) for i in range(self._job.num_choices)])

    def delta(self, step: ChoiceDelta, usage: UsageField) -> bytes:
        delta = step.delta
        choice = ChunkChoice(
            step.choice,
            Delta(content=delta.text or None),
            self._logprobs.chat(delta.tokens) if self._logprobs and delta.tokens else None,
            delta.finish,
            msgspec.UNSET if delta.finish is None else delta.stop_reason,
        )
        return self._event((choice,), usage)

    def final_usage(self, usage: Usage) -> bytes:
        return self._event((), usage)

    def _event(self, choices: tuple[ChunkChoice, ...], usage: UsageField) -> bytes:
        job = self._job
        return event(ChatChunk(id=job.id, created=job.created, model=job.model, choices=choices, usage=usage))
