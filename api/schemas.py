"""Request bodies as msgspec structs: types are checked while parsing, ranges afterwards in `validation`.

Every optional field may be null, as some clients send. Unknown fields are ignored. Fields typed
`msgspec.Raw` are kept as JSON text: passed on (tools) or only looked at to be refused by name.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec

from api.voices import VoiceObject
from contracts.errors import BadRequest, PayloadTooLarge

ABSENT = msgspec.Raw()


def is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


# --- messages -----------------------------------------------------------------------------------------------
class ImageUrl(msgspec.Struct, kw_only=True):
    url: str | None = None
    detail: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


class InputAudio(msgspec.Struct, kw_only=True):
    data: str | None = None  # base64
    format: str | None = None


class AudioUrl(msgspec.Struct, kw_only=True):
    url: str | None = None


class VideoUrl(msgspec.Struct, kw_only=True):
    url: str | None = None
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    use_audio_in_video: bool | None = None


class MediaKwargs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `mm_processor_kwargs`: for every media part of the request that does not say otherwise."""

    use_audio_in_video: bool | None = None
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A superset of all part types; `type` says which fields count."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    input_audio: InputAudio | None = None
    audio_url: str | AudioUrl | None = None
    video_url: str | VideoUrl | None = None
    detail: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    use_audio_in_video: bool | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = "{}"


class ToolCallPart(msgspec.Struct, kw_only=True):
    id: str = ""
    type: str = "function"
    function: FunctionCall


class SpokenAnswer(msgspec.Struct, kw_only=True):
    """Of an earlier turn, as its answer had it or by its id alone."""

    id: str | None = None
    transcript: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: SpokenAnswer | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionDefinition


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str


class AudioOutput(msgspec.Struct, kw_only=True):
    voice: str | VoiceObject | None = None
    format: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# --- requests -----------------------------------------------------------------------------------------------
class ModelField(msgspec.Struct, kw_only=True):
    model: str | None = None


class GenerationFields(ModelField, kw_only=True):
    """What chat and plain completions have in common."""

    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    echo: bool | None = None
    # of vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    # refused by name when given
    best_of: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: msgspec.Raw = ABSENT
    guided_json: msgspec.Raw = ABSENT
    guided_regex: msgspec.Raw = ABSENT
    guided_choice: msgspec.Raw = ABSENT
    guided_grammar: msgspec.Raw = ABSENT
    structured_outputs: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    bad_words: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    truncate_prompt_tokens: msgspec.Raw = ABSENT
    media_io_kwargs: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[ChatMessage]
    tools: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    tool_choice: str | ToolChoice | None = None
    audio: AudioOutput | None = None
    mm_processor_kwargs: MediaKwargs | None = None
    # refused by name when given
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    mm_processor_kwargs: msgspec.Raw = ABSENT  # refused: a prompt holds no media


class TokenizeRequest(ModelField, kw_only=True):
    """A prompt, or messages (`messages` wins the shape: both given is refused)."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelField, kw_only=True):
    tokens: list[int]


# --- parsing ------------------------------------------------------------------------------------------------
RequestT = TypeVar("RequestT", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>[^`]{1,64})")
_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")


def parse(decoder: msgspec.json.Decoder[RequestT], body: bytes) -> RequestT:
    """Raises BadRequest whose `param` is the JSON path; quotes types and field names, never values."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest("the body is not valid JSON in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply", code="invalid_json") from None


def _wrong_type(text: str) -> BadRequest:
    where = _PATH.search(text)
    path = where["path"] if where else ""
    reason = text[: where.start()] if where else text
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return BadRequest(f"`{path}` is required", param=path, code="missing_required_parameter")
    unknown = _UNKNOWN.search(reason)
    if unknown:
        path = f"{path}.{unknown['field']}" if path else unknown["field"]
        return BadRequest(f"`{path}` is not known here", param=path, code="unknown_parameter")
    if not reason.startswith("Expected"):
        reason = "the value is out of range or malformed"
    name = f"`{path}`" if path else "the body"
    return BadRequest(f"{name}: {reason.replace('`', '')}", param=path or None, code="invalid_type")


async def read_body(chunks: AsyncIterator[bytes], declared: str | None, max_bytes: int) -> bytes:
    """The whole body, joined once. Raises PayloadTooLarge before holding more than `max_bytes`."""
    if declared is not None and declared.isdecimal() and int(declared) > max_bytes:
        raise too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is over the limit of {max_bytes} bytes")
