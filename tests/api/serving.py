"""A real server on a free port of 127.0.0.1, on the test's own event loop; and requests without sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from api.app import create_app
from api.listener import listen
from api.server import ApiServer
from api.settings import ApiSettings
from stages.service import Service

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Running:
    port: int
    server: ApiServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def running(
    service: Service, settings: ApiSettings | None = None, send_buffer: int | None = None
) -> AsyncIterator[Running]:
    """`send_buffer`: bytes the kernel keeps per connection for a client that does not read."""
    settings = settings or ApiSettings()
    server = ApiServer(settings)
    server.open(create_app(service, settings))
    listener = listen("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await server.listening.wait()
        yield Running(port, server)
    finally:
        server.stop()
        await serving


@asynccontextmanager
async def client(service: Service, settings: ApiSettings | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Talks ASGI to the application directly."""
    transport = httpx.ASGITransport(
        create_app(service, settings or ApiSettings()), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=TIMEOUT_S) as http:
        yield http


def post(
    service: Service, path: str, body: Any, settings: ApiSettings | None = None, **request: Any
) -> httpx.Response:
    """One request. `body`: bytes as they are, else as JSON."""

    async def run() -> httpx.Response:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with client(service, settings) as http:
            return await http.post(path, content=content, **request)

    return asyncio.run(run())


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each event; the string "[DONE]" for that one."""
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return found


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}
