"""What stays the same in every request of a run: model, output length, how it is pinned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from benchmarks.wire.chat_stream import Failure, StreamRecord, stream_chat
from benchmarks.wire.connection import HttpPool

PROBE_MESSAGE = b'{"role":"user","content":"Say something."}'


@dataclass(frozen=True)
class RequestShape:
    """`extra_json` is an object merged over the rest, for what one server needs and others do not know.

    The output length is pinned by `ignore_eos` and `min_tokens`, which are no part of the OpenAI API;
    `pin_length` and `ask_usage` are False for a server that rejects them.
    """

    model: str | None
    output_tokens: int
    pin_length: bool = True
    ask_usage: bool = True
    extra_json: bytes = b"{}"

    def body(self, messages: Iterable[bytes]) -> bytes:
        """`messages` are JSON objects already encoded, in pieces that are only joined."""
        fields: dict[str, object] = {} if self.model is None else {"model": self.model}
        fields |= {"stream": True, "temperature": 0, "max_tokens": self.output_tokens}
        if self.ask_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.pin_length:
            fields |= {"ignore_eos": True, "min_tokens": self.output_tokens}
        fields |= msgspec.json.decode(self.extra_json, type=dict[str, object])
        return b"".join((b'{"messages":[', b",".join(messages), b"],", msgspec.json.encode(fields)[1:]))


class ProbeFailed(Exception):
    """The server did not answer one short text request; the message is for the user."""


async def probe(pool: HttpPool, shape: RequestShape, timeout_s: float) -> RequestShape:
    """Asks once and drops the extras the server rejects (400, 422): a strict server can be measured too."""
    failure: Failure | None = None
    for attempt in (
        shape,
        replace(shape, pin_length=False),
        replace(shape, pin_length=False, ask_usage=False),
    ):
        record = await stream_chat(pool, attempt.body([PROBE_MESSAGE]), timeout_s)
        failure = record.failure
        if failure is None:
            return attempt
        if failure.status not in (400, 422):
            break
    assert failure is not None
    raise ProbeFailed(f"{pool.url} did not answer a short text request: {failure.label}: {failure.detail}")


def obeyed_length(record: StreamRecord, shape: RequestShape) -> bool | None:
    """Whether the answer is exactly as long as asked; None when the server does not count its tokens."""
    return None if record.usage is None else record.usage.completion_tokens == shape.output_tokens
