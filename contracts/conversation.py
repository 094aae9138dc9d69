"""A request's input before preprocessing: the conversation as the client sent it, in neutral types."""

from __future__ import annotations

from typing import Literal

import msgspec

from contracts.media import MediaSource

Role = Literal["system", "user", "assistant", "tool", "developer"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class MediaPart(msgspec.Struct, frozen=True, tag="media"):
    source: MediaSource


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str  # JSON text


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    parts: tuple[TextPart | MediaPart, ...] = ()
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in order; part order inside a message is kept all the way into the prompt."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools_json: str | None = None  # JSON array of OpenAI tool definitions, for the chat template

    def media(self) -> list[MediaSource]:
        return [p.source for m in self.messages for p in m.parts if isinstance(p, MediaPart)]
