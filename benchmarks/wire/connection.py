"""A keep-alive HTTP/1.1 pool that stamps body bytes when the socket is read, with next to no work per chunk.

The general clients spend 100 us or more of one core on each streamed chunk, which 128 streams of 50 tokens
a second would feel; a protocol over the C parser spends a few.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from benchmarks.wire.clock import Clock

BodySink = Callable[[float, bytes], None]
"""(time the socket was read, bytes of the response body)"""

MAX_ERROR_BODY_BYTES = 64 << 10


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool
    prefix: str
    """Path before `/v1`, with no slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Takes a server's address with or without the `/v1` that client libraries want."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is not an http(s) address; give one such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, prefix)


@dataclass(frozen=True)
class Outcome:
    """What became of one request at the HTTP level. `status` 0: the peer closed before any status line."""

    status: int
    complete: bool
    error_body: bytes


class _Connection(asyncio.Protocol):
    """One socket; at most one exchange at a time, owned by whoever called `begin` until it is done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._sink: BodySink | None = None
        self._finished: asyncio.Future[Outcome] | None = None
        self._read_at_s = 0.0
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def begin(self, request: bytes, sink: BodySink) -> asyncio.Future[Outcome]:
        assert self._finished is None
        assert self._transport is not None
        self._finished = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._status = 0
        self._framed = False
        self._error_body = b""
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        return self._finished

    def data_received(self, data: bytes) -> None:
        self._read_at_s = self._clock.now()
        if self._finished is None:  # bytes outside an exchange: the peer is confused, never reuse it
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish(complete=False)
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._sink is not None
        if self._status == 200:
            self._sink(self._read_at_s, body)
        elif len(self._error_body) < MAX_ERROR_BODY_BYTES:
            self._error_body += body

    def on_message_complete(self) -> None:
        if self._status >= 200:  # 1xx answers precede the real one
            self.reusable &= self._parser.should_keep_alive()
            self._finish(complete=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        # A body with neither a length nor chunks ends where the connection does.
        self._finish(complete=exc is None and self._status != 0 and not self._framed)

    def _finish(self, *, complete: bool) -> None:
        finished, self._finished = self._finished, None
        if finished is not None and not finished.done():
            finished.set_result(Outcome(self._status, complete, self._error_body))

    def close(self) -> None:
        self.reusable = False
        self._finished = None
        if self._transport is not None:
            self._transport.abort()


class HttpPool:
    """Connections to one server. Idle ones are reused, last in first out; `close` drops them all."""

    def __init__(self, url: str, clock: Clock, *, api_key: str | None = None) -> None:
        self.url = url
        self.address = Address.parse(url)
        self.clock = clock
        self._api_key = api_key
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes, sink: BodySink) -> Outcome:
        """Feeds the body of a 200 answer to `sink`. Raises OSError when no connection can be made."""
        data = self._head(method, path, len(body)) + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            outcome = await self._exchange(connection, data, sink)
            if outcome.status != 0:
                return outcome
            # The server closed the idle connection just as it was taken; nothing was answered, so ask again.
        return await self._exchange(await self._connect(), data, sink)

    async def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """(status, body); status 0 when the server could not be reached or did not answer in time."""
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await self.request("GET", path, b"", lambda _at_s, data: body.extend(data))
        except (OSError, TimeoutError):
            return 0, b""
        return (outcome.status, bytes(body)) if outcome.complete else (0, b"")

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: _Connection, data: bytes, sink: BodySink) -> Outcome:
        try:
            outcome = await connection.begin(data, sink)
        except BaseException:
            connection.close()
            raise
        if connection.reusable and outcome.complete:
            self._idle.append(connection)
        else:
            connection.close()
        return outcome

    async def _connect(self) -> _Connection:
        address = self.address
        context = ssl.create_default_context() if address.tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self.clock), address.host, address.port, ssl=context
        )
        return connection

    def _head(self, method: str, path: str, num_bytes: int) -> bytes:
        address = self.address
        lines = [
            f"{method} {address.prefix}{path} HTTP/1.1",
            f"Host: {address.host}:{address.port}",
            "Accept: */*",
            f"Content-Length: {num_bytes}",
        ]
        if num_bytes:
            lines.append("Content-Type: application/json")
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return "\r\n".join([*lines, "", ""]).encode()
