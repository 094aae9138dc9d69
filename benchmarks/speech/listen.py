"""One spoken answer over HTTP as it came: from /v1/audio/speech, or from a chat with audio out."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from benchmarks.speech.playback import Packet
from benchmarks.wire.chat_stream import CHAT_PATH, MAX_DETAIL_CHARS, Failure
from benchmarks.wire.connection import HttpPool, Outcome
from benchmarks.wire.sse import SseDecoder, SseEvent

SPEECH_PATH = "/v1/audio/speech"
Kind = Literal["speech", "chat"]


class _Audio(msgspec.Struct):
    data: str | None = None


class _Delta(msgspec.Struct):
    audio: _Audio | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True)
class Heard:
    started_s: float
    packets: tuple[Packet, ...]
    failure: Failure | None


class _Speech:
    """The sink of a body of raw PCM."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.error: Failure | None = None
        self.ended = True  # the body's own end is the end

    def feed(self, at_s: float, data: bytes) -> None:
        self.packets.append(Packet(at_s, data))


class _Chat:
    """The sink of a chat stream whose deltas carry base64 PCM."""

    def __init__(self) -> None:
        self._sse = SseDecoder()
        self.packets: list[Packet] = []
        self.error: Failure | None = None
        self.ended = False

    def feed(self, at_s: float, data: bytes) -> None:
        for event in self._sse.feed(data):
            if event.data != b"[DONE]" and self.error is None:
                self._event(at_s, event)

    def _event(self, at_s: float, sse: SseEvent) -> None:
        detail = sse.data[:MAX_DETAIL_CHARS].decode(errors="replace")
        try:
            event = _decode(sse.data)
            if bytes(event.error) != b"null":
                self.error = Failure("error_event", detail)
            for choice in event.choices[:1]:
                self.ended |= choice.finish_reason is not None
                audio = choice.delta.audio if choice.delta is not None else None
                if audio is not None and audio.data:
                    self.packets.append(Packet(at_s, base64.b64decode(audio.data, validate=True)))
        except (msgspec.DecodeError, binascii.Error) as error:
            self.error = Failure("bad_event", f"{error}: {detail}"[:MAX_DETAIL_CHARS])


_SINKS: dict[Kind, Callable[[], _Speech | _Chat]] = {"speech": _Speech, "chat": _Chat}
_PATHS: dict[Kind, str] = {"speech": SPEECH_PATH, "chat": CHAT_PATH}


def _failure(sink: _Speech | _Chat, outcome: Outcome) -> Failure | None:
    if outcome.status == 0:
        return Failure("connect", "the server closed the connection without an answer")
    if outcome.status != 200:
        detail = outcome.error_body[:MAX_DETAIL_CHARS].decode(errors="replace")
        return Failure("http_status", detail, outcome.status)
    if sink.error is not None:
        return sink.error
    if not outcome.complete:
        return Failure("truncated_stream", f"{len(sink.packets)} packets, then the stream ended")
    return None if sink.ended else Failure("missing_finish_reason", "the stream ended without one")


async def listen(pool: HttpPool, kind: Kind, body: bytes, timeout_s: float) -> Heard:
    """Sends one request and records what came. Never raises for what the server does: that is `failure`."""
    sink = _SINKS[kind]()
    started_s = pool.clock.now()
    try:
        async with asyncio.timeout(timeout_s):
            failure = _failure(sink, await pool.request("POST", _PATHS[kind], body, sink.feed))
    except TimeoutError:
        failure = Failure("timeout", f"no end after {timeout_s:g} s, {len(sink.packets)} packets came")
    except OSError as error:
        failure = Failure("connect", str(error)[:MAX_DETAIL_CHARS])
    return Heard(started_s, tuple(sink.packets), failure)
