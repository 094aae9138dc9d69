"""POST /v1/completions: plain prompts, one or many, as text or token ids."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from api.answer import Collected, UsageField, UsageMode, collect, stream
from api.generation import ChoiceDelta
from api.logprobs import LogprobWriter
from api.responses import Completion, CompletionChoice, Usage
from api.routes.base import Api, client_left, json_response, new_id
from api.sample_text import TextOptions
from api.schemas import CompletionRequest
from api.sse import EventStream, EventWriter, event, unless_disconnected
from api.validation import check_completion, check_model, invalid, sampling_of, text_options_of
from contracts.errors import BadRequest
from stages.service import GenerationRequest

_decoder = msgspec.json.Decoder(CompletionRequest)
PromptInput = str | tuple[int, ...]


@dataclass(frozen=True)
class CompletionJob:
    """A validated request. `echoes`: per prompt, text that its answers start with ("" without `echo`)."""

    requests: tuple[GenerationRequest, ...]
    text: TextOptions
    model: str
    echoes: tuple[str, ...]
    usage: UsageMode
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.requests[0].sampling.n

    def echo(self, choice: int) -> str:
        return self.echoes[choice // self.requests[0].sampling.n]


def routes(api: Api) -> list[BaseRoute]:
    return [Route("/v1/completions", partial(_complete, api), methods=["POST"])]


async def _complete(api: Api, request: Request) -> ASGIApp:
    body = await api.read(request, _decoder)
    job = _job(api, body)
    if body.stream:
        return EventStream(partial(_stream, api, job), api.settings.send_stall_timeout_s)
    answer = await unless_disconnected(request.receive, _answer(api, job))
    return client_left() if answer is None else json_response(answer)


def _job(api: Api, body: CompletionRequest) -> CompletionJob:
    model = check_model(body.model, api.service.card)
    check_completion(body)
    tokenizer, settings = api.service.tokenizer, api.settings
    sampling = sampling_of(body, tokenizer.vocab_size, settings.max_samples, api.service.card.sampling)
    prompts = _prompts(body.prompt, tokenizer.vocab_size, settings.max_prompts)
    if len(prompts) * sampling.n > settings.max_samples:
        raise invalid("n", f"times the number of prompts must be at most {settings.max_samples}")
    requests = tuple(
        GenerationRequest(
            input=prompt,
            sampling=sampling,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            timeout_s=settings.request_timeout_s,
        )
        for prompt in prompts
    )
    echoes = [p if isinstance(p, str) else tokenizer.decode(list(p)) for p in prompts if body.echo]
    return CompletionJob(
        requests=requests,
        text=text_options_of(body, sampling),
        model=model,
        echoes=tuple(echoes) or ("",) * len(prompts),
        usage=UsageMode.of(body.stream_options),
    )


def _prompts(
    prompt: str | list[str | int | list[int]] | None, vocab_size: int, max_prompts: int
) -> list[PromptInput]:
    """The four shapes of `prompt`: text, texts, token ids, lists of token ids."""
    if prompt is None:
        raise BadRequest("`prompt` is required", param="prompt", code="missing_required_parameter")
    if isinstance(prompt, str):
        return [_prompt(prompt, "prompt", vocab_size)]
    if not prompt:
        raise invalid("prompt", "must not be empty")
    if isinstance(prompt[0], int):
        ids = [i for i in prompt if isinstance(i, int)]
        if len(ids) != len(prompt):
            raise invalid("prompt", "must not mix token ids with texts or lists")
        return [_prompt(ids, "prompt", vocab_size)]
    if len({type(p) for p in prompt}) > 1:
        raise invalid("prompt", "must hold only texts or only lists of token ids")
    if len(prompt) > max_prompts:
        raise invalid("prompt", f"holds {len(prompt)} prompts; at most {max_prompts}")
    return [_prompt(p, f"prompt[{i}]", vocab_size) for i, p in enumerate(prompt) if not isinstance(p, int)]


def _prompt(prompt: str | list[int], param: str, vocab_size: int) -> PromptInput:
    if not prompt:
        raise invalid(param, "must not be empty")
    if isinstance(prompt, str):
        return prompt
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise invalid(param, f"must hold token ids from 0 to {vocab_size - 1}")
    return tuple(prompt)


async def _answer(api: Api, job: CompletionJob) -> Completion:
    choices, usage = await collect(
        api.group(job.requests, job.text), [job.echo(i) for i in range(job.num_choices)]
    )
    return Completion(
        id=job.id,
        created=job.created,
        model=job.model,
        choices=tuple(_choice(api, job, index, choice) for index, choice in enumerate(choices)),
        usage=usage,
    )


def _choice(api: Api, job: CompletionJob, index: int, choice: Collected) -> CompletionChoice:
    assert choice.finish is not None
    num_top = job.text.logprobs
    return CompletionChoice(
        index=index,
        text=choice.text,
        logprobs=None if num_top is None else LogprobWriter(api.service, num_top).completion(choice.tokens),
        finish_reason=choice.finish,
        stop_reason=choice.stop_reason,
    )


async def _stream(api: Api, job: CompletionJob, writer: EventWriter) -> None:
    await stream(api.group(job.requests, job.text), _CompletionChunks(api, job), job.usage, writer)


class _CompletionChunks:
    """Encodes a stream's chunks."""

    def __init__(self, api: Api, job: CompletionJob) -> None:
        self._job = job
        num_top = job.text.logprobs
        self._logprobs = None if num_top is None else LogprobWriter(api.service, num_top)

    def opening(self, usage: UsageField) -> bytes:
        """The echoed prompts, if any."""
        echoes = [(i, self._job.echo(i)) for i in range(self._job.num_choices)]
        return b"".join([self._event((self._echo(i, echo),), usage) for i, echo in echoes if echo])

    def _echo(self, choice: int, echo: str) -> CompletionChoice:
        return CompletionChoice(index=choice, text=echo, logprobs=None, finish_reason=None)

    def delta(self, step: ChoiceDelta, usage: UsageField) -> bytes:
        delta = step.delta
        choice = CompletionChoice(
            index=step.choice,
            text=delta.text,
            logprobs=self._logprobs.completion(delta.tokens) if self._logprobs and delta.tokens else None,
            finish_reason=delta.finish,
            stop_reason=msgspec.UNSET if delta.finish is None else delta.stop_reason,
        )
        return self._event((choice,), usage)

    def final_usage(self, usage: Usage) -> bytes:
        return self._event((), usage)

    def _event(self, choices: tuple[CompletionChoice, ...], usage: UsageField) -> bytes:
        job = self._job
        return event(
            Completion(id=job.id, created=job.created, model=job.model, choices=choices, usage=usage)
        )
