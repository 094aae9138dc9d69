"""Server-sent events over ASGI: headers only with the first event, back-pressure, and clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from api.errors import error_json, internal_error
from contracts.errors import OmnistageError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the tokens
]
ResultT = TypeVar("ResultT")
Headers = list[tuple[bytes, bytes]]
_encode = msgspec.json.Encoder().encode


def event(payload: msgspec.Struct) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


class ReaderStalled(Exception):
    """The client took no bytes for too long; its request ends."""


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, ResultT]) -> ResultT | None:
    """Runs `work`; cancels it the moment the client leaves, and then returns None after it has cleaned up.
    Raises what `receive` raises, where the server itself ends the request."""
    watched = asyncio.timeout(None)
    watching = asyncio.ensure_future(_disconnect(receive))
    watching.add_done_callback(lambda _: None if over else watched.reschedule(watching.get_loop().time()))
    over = False
    try:
        async with watched:  # in this task: one of its own would begin later
            return await work
    except Exception:
        if not watched.expired():
            raise
        return watching.result()
    finally:
        over = True
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventWriter:
    """Writes a stream's events. Awaiting a write is the back-pressure: the server waits for a slow reader.

    One timer watches all writes of a stream: one of each would cost more than the write.
    """

    def __init__(self, send: Send, stall_timeout_s: float, headers: Headers = _HEADERS) -> None:
        self._send = send
        self._headers = headers
        self._stall_timeout_s = stall_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[object] | None = None
        self._write_began_s = 0.0
        self._stalled = False
        self.started = False
        self.finished = False

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """One body message. The first one also decides the status: 200."""
        assert not self.finished
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self.finished = last
        self._writing = task = asyncio.current_task()
        assert task is not None, "written by a task"
        cancelling = task.cancelling()
        loop = task.get_loop()
        self._write_began_s = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._stall_timeout_s, self._look)
        try:
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})
        except asyncio.CancelledError:
            if self._stalled and task.uncancel() <= cancelling:
                raise ReaderStalled from None
            raise
        finally:
            self._writing = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._writing is None:
            return
        loop = self._writing.get_loop()
        ends_s = self._write_began_s + self._stall_timeout_s
        if loop.time() >= ends_s:
            self._stalled = True
            self._writing.cancel()
        else:
            self._timer = loop.call_at(ends_s, self._look)


class EventStream:
    """An ASGI response that `produce` writes. Errors before the first event become ordinary HTTP errors;
    later ones become one error event, and the stream ends without [DONE]."""

    def __init__(
        self, produce: Callable[[EventWriter], Coroutine[None, None, None]], stall_timeout_s: float
    ) -> None:
        self._produce = produce
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(send, self._stall_timeout_s)
        try:
            await self._write_all(writer, receive)
        finally:
            writer.close()

    async def _write_all(self, writer: EventWriter, receive: Receive) -> None:
        try:
            await unless_disconnected(receive, self._produce(writer))
        except ReaderStalled:
            return  # the server closes a connection whose response is left open
        except OmnistageError as error:
            if not writer.started:
                raise
            await self._report(writer, error)
        except Exception:
            if writer.started:
                await self._report(writer, internal_error())
            raise  # a bug: the log needs it

    def _report(self, writer: EventWriter, error: OmnistageError) -> Awaitable[None]:
        return writer.write(b"data: " + error_json(error) + b"\n\n", last=True)


class ByteStream:
    """An ASGI response of some media type that `produce` writes. Errors before the first byte become ordinary
    HTTP errors; after it the connection is closed with the body unfinished, which no client takes for
    whole."""

    def __init__(
        self,
        mime: str,
        produce: Callable[[EventWriter], Coroutine[None, None, None]],
        stall_timeout_s: float,
    ) -> None:
        self._headers = [(b"content-type", mime.encode()), (b"x-accel-buffering", b"no")]
        self._produce = produce
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(send, self._stall_timeout_s, self._headers)
        try:
            await unless_disconnected(receive, self._produce(writer))
        except ReaderStalled:
            return
        except OmnistageError as error:
            if not writer.started:
                raise
            logger.warning("a response was cut short: %s", error.message)
        finally:
            writer.close()
