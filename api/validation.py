"""Ranges, lengths and unsupported values: request structs to SamplingParams and TextOptions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from api.sample_text import TextOptions
from api.schemas import ChatRequest, CompletionRequest, GenerationFields, is_given
from contracts.errors import BadRequest, NotFound
from contracts.params import SamplingDefaults, SamplingParams
from stages.service import UNLIMITED, ModelCard

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOKEN_LISTS = 1024  # entries of logit_bias and of stop_token_ids
MAX_IDENTIFIER_CHARS = 256
COMPLETION_MAX_TOKENS = 16  # the legacy endpoint's default


@dataclass(frozen=True)
class Bounds:
    low: float
    high: float
    above_low: bool = False  # the low end itself is excluded

    def holds(self, value: float) -> bool:
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"must be at least {self.low}"
        if self.above_low:
            return f"must be above {self.low}, at most {self.high}"
        return f"must be from {self.low} to {self.high}"


BOUNDS = {
    "temperature": Bounds(0, 2),
    "transcription_temperature": Bounds(0, 1),
    "top_p": Bounds(0, 1, above_low=True),
    "min_p": Bounds(0, 1),
    "presence_penalty": Bounds(-2, 2),
    "frequency_penalty": Bounds(-2, 2),
    "repetition_penalty": Bounds(0.01, 100),
    "logit_bias": Bounds(-100, 100),
    "top_k": Bounds(-1, math.inf),
    "min_tokens": Bounds(0, math.inf),
    "max_tokens": Bounds(1, math.inf),
    "max_completion_tokens": Bounds(1, math.inf),
    "top_logprobs": Bounds(0, MAX_LOGPROBS),
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "seed": Bounds(-(2**63), 2**64 - 1),
    "priority": Bounds(-(2**31), 2**31 - 1),
    "speed": Bounds(0.25, 4),
    "pixels": Bounds(1, 2**31 - 1),
    "fps": Bounds(0, 1000, above_low=True),
    "frames": Bounds(1, 2**31 - 1),
}

NumberT = TypeVar("NumberT", int, float)


def invalid(param: str, problem: str) -> BadRequest:
    return BadRequest(f"`{param}` {problem}", param=param, code="invalid_value")


def unsupported(param: str, problem: str = "is not supported yet") -> BadRequest:
    return BadRequest(f"`{param}` {problem}", param=param, code="unsupported_value")


def checked(name: str, value: NumberT | None, default: NumberT, *, param: str | None = None) -> NumberT:
    if value is None:
        return default
    if not BOUNDS[name].holds(value):
        raise invalid(param or name, str(BOUNDS[name]))
    return value


def require_length(param: str, text: str, max_chars: int) -> None:
    if not 1 <= len(text) <= max_chars:
        raise invalid(param, f"must be 1 to {max_chars} characters long")


def check_model(name: str | None, card: ModelCard) -> str:
    """The canonical or alias name the client used; no name means the served model."""
    if name is None:
        return card.names[0]
    if name not in card.names:
        raise NotFound(
            f"the model {name[:64]!r} is not served here; see /v1/models",
            param="model",
            code="model_not_found",
        )
    return name


def sampling_of(
    request: ChatRequest | CompletionRequest, vocab_size: int, max_samples: int, defaults: SamplingDefaults
) -> SamplingParams:
    max_tokens = _max_tokens(request)
    min_tokens = checked("min_tokens", request.min_tokens, 0)
    if min_tokens > max_tokens:
        raise invalid("min_tokens", "must not be above max_tokens")
    n = 1 if request.n is None else request.n
    if not 1 <= n <= max_samples:
        raise invalid("n", f"must be from 1 to {max_samples}")
    seed = None if request.seed is None else checked("seed", request.seed, 0) % 2**63
    return SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=checked("temperature", request.temperature, defaults.temperature),
        top_p=checked("top_p", request.top_p, defaults.top_p),
        # -1 means off in vLLM; more than the vocabulary leaves out nothing
        top_k=min(max(0, checked("top_k", request.top_k, defaults.top_k)), vocab_size),
        min_p=checked("min_p", request.min_p, defaults.min_p),
        presence_penalty=checked("presence_penalty", request.presence_penalty, 0.0),
        frequency_penalty=checked("frequency_penalty", request.frequency_penalty, 0.0),
        repetition_penalty=checked(
            "repetition_penalty", request.repetition_penalty, defaults.repetition_penalty
        ),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        seed=seed,
        logprobs=_num_logprobs(request),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab_size),
        ignore_eos=bool(request.ignore_eos),
    )


def text_options_of(request: GenerationFields, sampling: SamplingParams) -> TextOptions:
    skip = request.skip_special_tokens
    return TextOptions(
        stops=_stops(request.stop),
        include_stop_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=True if skip is None else skip,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        stop_token_ids=frozenset(sampling.stop_token_ids),
    )


def check_common(request: GenerationFields) -> None:
    """Fields that change nothing in the sampling: identifiers, streaming, and what is refused by name."""
    if request.user is not None and len(request.user) > MAX_IDENTIFIER_CHARS:
        raise invalid("user", f"must be at most {MAX_IDENTIFIER_CHARS} characters long")
    if request.cache_salt is not None:
        require_length("cache_salt", request.cache_salt, MAX_IDENTIFIER_CHARS)
    checked("priority", request.priority, 0)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "is only allowed when `stream` is true")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "is only supported when equal to `n`")
    if request.use_beam_search:
        raise unsupported("use_beam_search")
    if request.response_format is not None and request.response_format.type != "text":
        _refuse_response_format(request.response_format.type)
    refused = {
        "prompt_logprobs": request.prompt_logprobs,
        "guided_json": request.guided_json,
        "guided_regex": request.guided_regex,
        "guided_choice": request.guided_choice,
        "guided_grammar": request.guided_grammar,
        "structured_outputs": request.structured_outputs,
        "chat_template": request.chat_template,
        "chat_template_kwargs": request.chat_template_kwargs,
        "bad_words": request.bad_words,
        "allowed_token_ids": request.allowed_token_ids,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "media_io_kwargs": request.media_io_kwargs,
        "documents": request.documents,
        "prompt_embeds": request.prompt_embeds,
    }
    for name, raw in refused.items():
        if is_given(raw):
            raise unsupported(name)


def check_chat(request: ChatRequest, card: ModelCard) -> None:
    check_common(request)
    _check_modalities(request.modalities, card)
    choice = request.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise invalid("tool_choice", "must be 'none', 'auto', 'required' or an object")
    if choice is not None and choice not in ("none", "auto"):
        raise unsupported("tool_choice", "is only supported as 'none' or 'auto' yet")
    if request.audio is not None and not card.voices:
        raise unsupported("audio", "is not supported: this model answers in text")
    for name, raw, instead in (
        ("functions", request.functions, "is not supported; send `tools`"),
        ("function_call", request.function_call, "is not supported; send `tool_choice`"),
    ):
        if is_given(raw):
            raise unsupported(name, instead)


def check_completion(request: CompletionRequest) -> None:
    check_common(request)
    if is_given(request.mm_processor_kwargs):
        raise unsupported("mm_processor_kwargs", "is for messages that hold media")
    if request.suffix is not None:
        raise unsupported("suffix")
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "together with `logprobs` is not supported yet")


def _check_modalities(modalities: list[str] | None, card: ModelCard) -> None:
    if modalities is None:
        return
    supported = ", ".join(card.output_modalities)
    if not modalities or len(set(modalities)) != len(modalities):
        raise invalid("modalities", f"must list each wanted modality once; supported: {supported}")
    if any(m not in card.output_modalities for m in modalities):
        raise unsupported("modalities", f"asks for more than this model gives; supported: {supported}")


def _refuse_response_format(kind: str) -> None:
    if kind in ("json_object", "json_schema"):
        raise unsupported("response_format", f"of type '{kind}' is not supported yet")
    raise invalid("response_format.type", "must be 'text', 'json_object' or 'json_schema'")


def max_tokens_param(request: ChatRequest) -> str:
    """The one that counts, see `_max_tokens`."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def _max_tokens(request: ChatRequest | CompletionRequest) -> int:
    """Chat: `max_completion_tokens` wins over the older `max_tokens`; without both the context limits."""
    if isinstance(request, CompletionRequest):
        return min(checked("max_tokens", request.max_tokens, COMPLETION_MAX_TOKENS), UNLIMITED)
    older = checked("max_tokens", request.max_tokens, UNLIMITED)
    return min(checked("max_completion_tokens", request.max_completion_tokens, older), UNLIMITED)


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return None if request.logprobs is None else checked("logprobs", request.logprobs, 0)
    top = checked("top_logprobs", request.top_logprobs, 0)
    if not request.logprobs:
        if request.top_logprobs is not None and top > 0:
            raise invalid("top_logprobs", "needs `logprobs` to be true")
        return None
    return top


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_TOKEN_LISTS:
        raise invalid("logit_bias", f"may hold at most {MAX_TOKEN_LISTS} tokens")
    pairs: list[tuple[int, float]] = []
    for key, value in bias.items():
        # len first: int() of a huge digit string is slow and refused by Python itself.
        if len(key) > 10 or not (key.isascii() and key.isdecimal()) or int(key) >= vocab_size:
            raise invalid("logit_bias", f"must map token ids below {vocab_size} to numbers")
        pairs.append((int(key), checked("logit_bias", value, 0.0)))
    return tuple(pairs)


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_TOKEN_LISTS:
        raise invalid("stop_token_ids", f"may hold at most {MAX_TOKEN_LISTS} tokens")
    if any(not 0 <= i < vocab_size for i in ids):
        raise invalid("stop_token_ids", f"must be token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"may hold at most {MAX_STOPS} strings")
    for text in stops:
        require_length("stop", text, MAX_STOP_CHARS)
    return tuple(dict.fromkeys(stops))
