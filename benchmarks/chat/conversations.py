"""A user's own conversations as a workload: JSON lines of OpenAI messages.

Each line is `{"messages": [...]}` in the form of the chat API. Every user message is a turn; the assistant
message behind it is what later turns hold in their history. An image is a data URL, an http(s) URL (left to
the server), or the path of a file, relative to the JSONL.
"""

from __future__ import annotations

import base64
import binascii
import io
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from PIL import Image

from benchmarks.chat.distribution import Size
from benchmarks.chat.images import EncodedImage
from benchmarks.chat.workload import Session, Turn, Workload

UNKNOWN_SIZE = Size(1, 1)
"""Of an image that only the server fetches: it counts nothing in the expected shares of prefix tokens."""


class BadConversation(Exception):
    """A line cannot be used. The message names it, for the user."""


class _Url(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: Literal["text", "image_url"]
    text: str = ""
    image_url: _Url | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Part]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if part.type == "text")

    @property
    def urls(self) -> list[str]:
        parts = [] if isinstance(self.content, str) else self.content
        return [part.image_url.url for part in parts if part.image_url is not None]


class _Line(msgspec.Struct):
    messages: list[_Message]


def load_conversations(path: Path, num_warmup: int) -> Workload:
    """The first `num_warmup` lines are the warm-up. Images stand before the text in their message."""
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    sessions = [_session(path, number, line) for number, line in enumerate(lines, 1)]
    if len(sessions) <= num_warmup:
        raise BadConversation(
            f"{path} holds {len(sessions)} conversations, of which {num_warmup} are warm-up"
        )
    return Workload(tuple(sessions[num_warmup:]), tuple(sessions[:num_warmup]))


def _session(path: Path, number: int, line: bytes) -> Session:
    try:
        messages = msgspec.json.decode(line, type=_Line).messages
    except msgspec.DecodeError as error:
        raise BadConversation(f"{path}:{number}: {error}") from error
    system = ""
    if messages and messages[0].role == "system":
        system = messages[0].text
        messages = messages[1:]
    turns = _turns(path, number, messages)
    if not turns:
        raise BadConversation(f"{path}:{number}: no user message")
    return Session(system, tuple(turns))


def _turns(path: Path, number: int, messages: Sequence[_Message]) -> list[Turn]:
    turns: list[Turn] = []
    expected: Literal["user", "assistant"] = "user"
    for message in messages:
        if message.role != expected:
            raise BadConversation(
                f"{path}:{number}: a {message.role} message where one of {expected} must come"
            )
        if message.role == "user":
            images = tuple(_image(path, number, url) for url in message.urls)
            turns.append(Turn(message.text, images, answer=""))
            expected = "assistant"
        else:
            turns[-1] = Turn(turns[-1].question, turns[-1].images, message.text)
            expected = "user"
    return turns


def _image(path: Path, number: int, url: str) -> EncodedImage:
    escaped = msgspec.json.encode(url)[1:-1]
    if url.startswith(("http://", "https://")):
        return EncodedImage.of_url(escaped, UNKNOWN_SIZE)
    try:
        if url.startswith("data:"):
            content = base64.b64decode(url.partition(",")[2], validate=True)
            return EncodedImage.of_url(escaped, _size(content))
        content = (path.parent / url).read_bytes()
        mime = mimetypes.guess_type(url)[0] or "application/octet-stream"
        return EncodedImage.of(content, mime, _size(content))
    except (OSError, binascii.Error) as error:
        raise BadConversation(f"{path}:{number}: image {url[:80]}: {error}") from error


def _size(content: bytes) -> Size:
    with Image.open(io.BytesIO(content)) as image:
        return Size(*image.size)
