"""An OpenAI-compatible server whose every byte and instant the test decides."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.wire.clock import MonotonicClock

WAIT_S = 20


class FakeClock:
    """Time stands still until the server moves it; the server can wait until the client has looked."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self._reads = 0
        self._read = asyncio.Event()

    def now(self) -> float:
        self._reads += 1
        self._read.set()
        return self.now_s

    async def sleep_until(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)

    def cpu_s(self) -> float:
        return 0.0

    async def until_read(self, send: Callable[[], None]) -> None:
        before = self._reads
        send()
        while self._reads == before:
            self._read.clear()
            await asyncio.wait_for(self._read.wait(), WAIT_S)


class IdleClock(MonotonicClock):
    """Real time, but the fake server in the same process costs the client nothing."""

    def cpu_s(self) -> float:
        return 0.0


@dataclass
class Request:
    method: str
    path: str
    body: dict
    headers: dict[str, str]


@dataclass
class Reply:
    """`steps`: (instant to set before sending, or None; bytes of the body). `cut`: no ending chunk."""

    steps: Sequence[tuple[float | None, bytes]] = ()
    status: int = 200
    end: Literal["complete", "cut", "hang", "silent"] = "complete"
    close_after: bool = False
    hold: asyncio.Event | None = None
    """Answer only once it is set."""


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def role() -> bytes:
    return event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})


def text(content: str, counted: int | None = None) -> bytes:
    payload: dict = {"choices": [{"index": 0, "delta": {"content": content}}]}
    if counted is not None:
        payload["usage"] = {"prompt_tokens": 7, "completion_tokens": counted}
    return event(payload)


def finish(reason: str | None = "length") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    counts: dict = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


def answer(num_tokens: int, *, prompt: int = 10, cached: int | None = None, word: str = " w") -> Reply:
    """An honest answer, with no instants of its own."""
    chunks = [text(word) for _ in range(num_tokens)]
    parts = [role(), *chunks, finish(), usage(prompt, num_tokens, cached), DONE]
    return Reply([(None, part) for part in parts])


def honest(request: Request) -> Reply:
    if request.method == "GET":
        return models(request)
    return answer(request.body["max_tokens"])


def models(request: Request) -> Reply:
    if request.path == "/v1/models":
        return Reply([(None, json.dumps({"object": "list", "data": [{"id": "fake"}]}).encode())])
    return Reply(status=404)


@dataclass
class FakeServer:
    respond: Callable[[Request], Reply]
    clock: FakeClock | None = None
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    running: int = 0
    most_running: int = 0
    url: str = ""
    _tasks: set[asyncio.Task] = field(default_factory=set)

    @property
    def chats(self) -> list[Request]:
        return [request for request in self.requests if request.method == "POST"]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._tasks.add(asyncio.current_task())
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the test stops the server
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._tasks.discard(asyncio.current_task())

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(method, path, json.loads(raw) if raw else {}, headers)
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        reply = self.respond(request)
        try:
            if reply.hold is not None:
                await asyncio.wait_for(reply.hold.wait(), WAIT_S)
            await self._write(writer, reply)
        finally:
            self.running -= 1
        return reply.end == "complete" and not reply.close_after

    async def _write(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if reply.end == "silent":
            return
        head = f"HTTP/1.1 {reply.status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        await self._send(writer, head, timed=self.clock is not None)
        for at_s, data in reply.steps:
            if at_s is not None:
                self.clock.now_s = at_s
            await self._send(writer, b"%x\r\n%b\r\n" % (len(data), data), timed=at_s is not None)
        if reply.end == "hang":
            await asyncio.Event().wait()
        if reply.end == "complete":
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes, *, timed: bool) -> None:
        if timed:
            await self.clock.until_read(lambda: writer.write(data))
        else:
            writer.write(data)
            await writer.drain()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def serving(
    respond: Callable[[Request], Reply] = honest, clock: FakeClock | None = None
) -> AsyncIterator[FakeServer]:
    server = FakeServer(respond, clock)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0, limit=1 << 24)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await server.stop()
        await listener.wait_closed()


@contextmanager
def serving_in_thread(respond: Callable[[Request], Reply] = honest):
    """For commands that own the event loop of their thread."""
    ready, started = threading.Event(), []

    async def body() -> None:
        stop = asyncio.Event()
        async with serving(respond) as server:
            started.extend([server, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(body(),))
    thread.start()
    assert ready.wait(WAIT_S)
    server, loop, stop = started
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        assert not thread.is_alive()
