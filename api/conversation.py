"""OpenAI message shapes to a Conversation: which role may hold what."""

from __future__ import annotations

from typing import get_args

import msgspec

from api.media_parts import MODALITY_OF, MediaTaken, check_kwargs, media_part
from api.schemas import ChatMessage, ContentPart, MediaKwargs, ToolCallPart, ToolDefinition, is_given
from api.validation import invalid, require_length
from contracts.conversation import Conversation, MediaPart, Message, Role, TextPart, ToolCall

MAX_NAME_CHARS = 256
MAX_TOOLS = 256

_ROLES: tuple[Role, ...] = get_args(Role)
_tools_decoder = msgspec.json.Decoder(list[ToolDefinition])


def conversation_of(
    messages: list[ChatMessage],
    *,
    tools: msgspec.Raw,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    input_modalities: tuple[str, ...],
    media_kwargs: MediaKwargs | None = None,
) -> Conversation:
    """Raises BadRequest naming the message and part at fault."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    taken = MediaTaken(input_modalities, check_kwargs(media_kwargs))
    converted = tuple(_message(m, f"messages[{i}]", taken) for i, m in enumerate(messages))
    go_on = bool(continue_final_message)
    if go_on and add_generation_prompt:
        raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")
    if go_on and not any(isinstance(p, TextPart) and p.text for p in converted[-1].parts):
        raise invalid("continue_final_message", "needs a last message with text to go on from")
    return Conversation(
        messages=converted,
        add_generation_prompt=not go_on if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=go_on,
        tools_json=tools_json(tools),
    )


def tools_json(tools: msgspec.Raw) -> str | None:
    """The array as sent, once its entries look like function tools; an empty one counts as none."""
    if not is_given(tools):
        return None
    try:
        text = bytes(tools).decode()
        definitions = _tools_decoder.decode(text)
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        raise invalid("tools", "must be a list of {type: 'function', function: {name, ...}}") from None
    if len(definitions) > MAX_TOOLS:
        raise invalid("tools", f"may hold at most {MAX_TOOLS} tools")
    for i, tool in enumerate(definitions):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type", "must be 'function'")
        require_length(f"tools[{i}].function.name", tool.function.name, MAX_NAME_CHARS)
    return text if definitions else None


def _message(message: ChatMessage, path: str, taken: MediaTaken) -> Message:
    role = next((known for known in _ROLES if known == message.role), None)
    if role is None:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    if message.name is not None:
        require_length(f"{path}.name", message.name, MAX_NAME_CHARS)
    if role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{path}.tool_call_id", "is required in a tool message")
        require_length(f"{path}.tool_call_id", message.tool_call_id, MAX_NAME_CHARS)
    if message.tool_calls and role != "assistant":
        raise invalid(f"{path}.tool_calls", "is only allowed in an assistant message")
    return Message(
        role=role,
        parts=_parts(message, role, path, taken),
        name=message.name,
        tool_calls=tuple(
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id if role == "tool" else None,
    )


def _tool_call(call: ToolCallPart, path: str) -> ToolCall:
    if call.type != "function":
        raise invalid(f"{path}.type", "must be 'function'")
    if len(call.id) > MAX_NAME_CHARS:
        raise invalid(f"{path}.id", f"must be at most {MAX_NAME_CHARS} characters")
    require_length(f"{path}.function.name", call.function.name, MAX_NAME_CHARS)
    return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)


def _parts(
    message: ChatMessage, role: Role, path: str, taken: MediaTaken
) -> tuple[TextPart | MediaPart, ...]:
    content = message.content
    if isinstance(content, str):
        return (TextPart(content),)
    if not content and role == "assistant" and message.audio is not None:
        if not message.audio.transcript:
            raise invalid(
                f"{path}.audio", "is not kept here; send what was said, as `content` or `transcript`"
            )
        return (TextPart(message.audio.transcript),)
    path = f"{path}.content"
    if not content:
        # An assistant turn may be tool calls or a refusal alone; clients send null, [] and tool_calls: [].
        if role == "assistant" and (message.tool_calls is not None or message.refusal is not None):
            return (TextPart(message.refusal),) if message.refusal else ()
        raise invalid(path, "must be a string or a non-empty list of parts")
    return tuple(_part(p, role, f"{path}[{i}]", taken) for i, p in enumerate(content))


def _part(part: ContentPart, role: Role, path: str, taken: MediaTaken) -> TextPart | MediaPart:
    match part.type:
        case "text":
            if part.text is None:
                raise invalid(f"{path}.text", "is required in a text part")
            return TextPart(part.text)
        case "refusal" if role == "assistant":
            return TextPart(part.refusal or "")
        case kind if kind in MODALITY_OF:
            return media_part(part, role, path, taken)
        case None:
            raise invalid(f"{path}.type", "is required")
        case "image":
            raise invalid(f"{path}.type", "must be 'image_url' for an image, not 'image'")
        case "file":
            raise invalid(f"{path}.type", "must not be 'file': send image_url, input_audio or video_url")
        case kind:
            raise invalid(f"{path}.type", f"is {kind[:32]!r}, which is no known type of content part")
