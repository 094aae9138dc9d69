"""Response bodies and stream chunks as msgspec structs, in OpenAI's field order."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishText = Literal["stop", "length"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt_tokens` counts media placeholders once; `prompt_tokens_details` has cached_tokens and one
    `<modality>_tokens` per modality of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # of a spoken answer


# --- log-probabilities --------------------------------------------------------------------------------------
class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


# --- chat ---------------------------------------------------------------------------------------------------
class AnswerAudio(msgspec.Struct, frozen=True, kw_only=True):
    """`expires_at`: Unix seconds; nothing is kept, so it is the time of the answer."""

    id: str
    data: str
    expires_at: int
    transcript: str


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    audio: AnswerAudio | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishText
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class AudioDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Clients join these field by field, so each thing is said once: `id` first, `expires_at` last."""

    id: str | None = None
    data: str | None = None
    transcript: str | None = None
    expires_at: int | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    audio: AudioDelta | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishText | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET  # only beside finish_reason


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`: left out, null, or given, as stream_options asks."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# --- completions --------------------------------------------------------------------------------------------
class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishText | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Also a stream's chunk: the legacy endpoint has one shape for both."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# --- the rest -----------------------------------------------------------------------------------------------
class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["omnistage"] = "omnistage"
    root: str
    max_model_len: int
    family: str
    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...]
    description: str


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str
