"""`omnistage chat`: a conversation in the terminal with a running server, streamed, with pictures."""

from __future__ import annotations

import base64
import mimetypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

HELP = "/image FILE adds a picture to your next message, /reset forgets the conversation, /quit ends"
CONNECT_TIMEOUT_S = 10.0
REFUSALS = (400, 413, 415, 422)
CLOSED = (401, 403, 503)  # for every question, so there is no use in asking one


@dataclass(frozen=True)
class ChatOptions:
    url: str
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    images: tuple[Path, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None


# --- the wire, as far as this client needs it ---------------------------------------------------------------
class ImageUrl(msgspec.Struct):
    url: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ImagePart | TextPart]


class ChatBody(msgspec.Struct, omit_defaults=True):
    messages: list[ChatMessage]
    stream: bool | None = None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class ChunkDelta(msgspec.Struct):
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    delta: ChunkDelta


class ErrorText(msgspec.Struct):
    message: str


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] = []
    error: ErrorText | None = None


class ChatError(Exception):
    """The server refused or broke off; the message is its own. `refused`: the same turn would be again."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class ImageError(Exception):
    """A picture cannot be read; the message names it."""


def _reason(error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "it is a folder"
        case PermissionError():
            return "no permission"
        case _:
            return (error.strerror or "it cannot be read").lower()


@dataclass
class Conversation:
    """History as it is sent again with every turn, and pictures waiting for the next message."""

    system: str | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    pictures: list[ImagePart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [ChatMessage("system", self.system)] if self.system else []
        self.pictures = []

    def attach(self, file: Path) -> None:
        """Raises ImageError."""
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        try:
            data = base64.b64encode(file.read_bytes()).decode()
        except OSError as error:
            raise ImageError(f"cannot read image {file}: {_reason(error)}") from None
        self.pictures.append(ImagePart(ImageUrl(f"data:{kind};base64,{data}")))

    def ask(self, text: str) -> None:
        content: str | list[ImagePart | TextPart] = text
        if self.pictures:
            content = [*self.pictures, TextPart(text)]
        self.messages.append(ChatMessage("user", content))
        self.pictures = []


def _route(options: ChatOptions, path: str) -> str:
    return f"{options.url.rstrip('/').removesuffix('/v1')}{path}"


def _headers(options: ChatOptions) -> dict[str, str]:
    return {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}


def _unreachable(options: ChatOptions, error: httpx.HTTPError | httpx.InvalidURL) -> ChatError:
    return ChatError(f"no answer from {options.url}: {str(error) or 'it takes too long'}")


def check_server(client: httpx.Client, options: ChatOptions) -> None:
    """Raises ChatError where no server is, or one that takes no questions (yet)."""
    try:
        response = client.get(_route(options, "/v1/models"), headers=_headers(options))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(options, error) from None
    if response.status_code in CLOSED:
        raise ChatError(f"{options.url} refuses: {_refusal(response.status_code, response.content)}")


def stream_answer(client: httpx.Client, options: ChatOptions, messages: list[ChatMessage]) -> Iterator[str]:
    """Pieces of the answer as they come. Raises ChatError."""
    body = ChatBody(messages, True, options.model, options.max_tokens, options.temperature)
    headers, url = _headers(options), _route(options, "/v1/chat/completions")
    try:
        with client.stream("POST", url, content=msgspec.json.encode(body), headers=headers) as response:
            if response.status_code != 200:
                status = response.status_code
                raise ChatError(_refusal(status, response.read()), refused=status in REFUSALS)
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    chunk = msgspec.json.decode(line[len("data: ") :], type=Chunk)
                    if chunk.error is not None:
                        raise ChatError(chunk.error.message)
                    yield from (c.delta.content for c in chunk.choices if c.delta.content)
    except httpx.HTTPError as error:
        raise _unreachable(options, error) from None
    raise ChatError("the server ended the answer before it was complete")


def _refusal(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=Chunk).error
    except msgspec.DecodeError:
        error = None
    return f"{error.message} (HTTP {status})" if error else f"HTTP {status}"


def _fail(error: Exception) -> int:
    print(f"omnistage: {error}", file=sys.stderr)
    return 1


def _to_terminal(text: str) -> None:
    print(text, end="", flush=True)


def run(
    options: ChatOptions,
    read_line: Callable[[str], str] = input,
    write: Callable[[str], object] = _to_terminal,
    client: httpx.Client | None = None,
) -> int:
    """Reads lines until /quit or the end of input. An error of one turn takes that turn back and goes on.
    Returns 1 when no turn was answered though some were asked."""
    conversation = Conversation(options.system)
    try:
        for file in options.images:
            conversation.attach(file)
    except ImageError as error:
        return _fail(error)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    outcomes: set[bool] = set()
    with client or httpx.Client(timeout=timeout) as http:
        try:
            check_server(http, options)
        except ChatError as error:
            return _fail(error)
        write(HELP + "\n")
        while True:
            try:
                line = read_line("> ").strip()
            except (EOFError, KeyboardInterrupt):
                write("\n")
                break
            if line == "/quit":
                break
            if (answered := _turn(line, conversation, options, http, write)) is not None:
                outcomes.add(answered)
    return 1 if outcomes == {False} else 0


def _turn(
    line: str,
    conversation: Conversation,
    options: ChatOptions,
    client: httpx.Client,
    write: Callable[[str], object],
) -> bool | None:
    """Whether the server answered; None for a line that asks it nothing."""
    command, _, argument = line.partition(" ")
    match command:
        case "":
            return None
        case "/reset":
            conversation.reset()
        case "/help":
            write(HELP + "\n")
        case "/image":
            try:
                conversation.attach(Path(argument.strip()).expanduser())
                write(f"{len(conversation.pictures)} picture(s) for the next message\n")
            except ImageError as error:
                write(f"! {error}\n")
        case _ if command.startswith("/"):
            write(f"! there is no {command}; {HELP}\n")
        case _:
            return _ask(line, conversation, options, client, write)
    return None


def _ask(
    line: str,
    conversation: Conversation,
    options: ChatOptions,
    client: httpx.Client,
    write: Callable[[str], object],
) -> bool:
    pictures = conversation.pictures
    conversation.ask(line)
    pieces: list[str] = []
    try:
        for piece in stream_answer(client, options, conversation.messages):
            pieces.append(piece)
            write(piece)
        write("\n")
    except ChatError as error:
        write(f"\n! {error}\n")
        conversation.messages.pop()
        if not error.refused:
            conversation.pictures = pictures
        elif pictures:
            write(f"! {len(pictures)} picture(s) dropped\n")
        return False
    except KeyboardInterrupt:  # closing the response makes the server abort the rest
        write(" …\n")
    conversation.messages.append(ChatMessage("assistant", "".join(pieces)))
    return True
