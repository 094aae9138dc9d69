"""Clients that leave, and clients that do not read (SSE-03, SSE-06): nothing of their requests stays."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.settings import ApiSettings
from tests.api.fakes import Script, ScriptedService
from tests.api.serving import TIMEOUT_S, running, user

CHAT = "/v1/chat/completions"
HOLDS_BEFORE = Script(hold_at_step=0)
HOLDS_INSIDE = Script(hold_at_step=3)


def raw_request(body: dict[str, Any], path: str = CHAT) -> bytes:
    content = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@asynccontextmanager
async def connected(
    port: int, body: dict[str, Any], path: str = CHAT, receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 10)
    try:
        writer.write(raw_request(body, path))
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


async def metric(url: str, name: str, **labels: str) -> float:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("stream", "script"), [(False, HOLDS_BEFORE), (False, HOLDS_INSIDE), (True, HOLDS_BEFORE)]
)
def test_leaving_before_the_first_byte(path: str, reset: bool, stream: bool, script: Script) -> None:
    async def run() -> None:
        service = ScriptedService(script)
        body = {**(user("a") if path == CHAT else {"prompt": "a"}), "stream": stream}
        async with running(service) as server:
            async with connected(server.port, body, path) as (_, writer):
                held = script.hold_at_step
                await service.wait_for(lambda: bool(service.flows) and service.last.num_steps == held)
                if not reset:
                    writer.close()  # FIN; leaving the block sends RST
                    await service.wait_for(lambda: service.last.outcome == "aborted")
            await service.wait_for(lambda: service.last.outcome == "aborted")
            assert await metric(server.url, "omnistage:api_open_requests") == 0

    asyncio.run(run())


def test_leaving_in_mid_stream() -> None:
    async def run() -> None:
        service = ScriptedService(HOLDS_INSIDE)
        async with running(service) as server:
            async with connected(server.port, {**user("a"), "stream": True}) as (reader, _):
                async with asyncio.timeout(TIMEOUT_S):
                    await reader.readuntil(b'"content":"H"')
            await service.wait_for(lambda: service.last.outcome == "aborted")
            assert await metric(server.url, "vllm:request_success_total", finished_reason="abort") == 1
            assert await metric(server.url, "omnistage:api_open_requests") == 0

    asyncio.run(run())


def test_leaving_with_several_prompts() -> None:
    async def run() -> None:
        service = ScriptedService(HOLDS_INSIDE)
        body = {"prompt": ["a", "b", "c"], "stream": True}
        async with running(service) as server:
            async with connected(server.port, body, "/v1/completions") as (reader, _):
                async with asyncio.timeout(TIMEOUT_S):
                    await reader.readuntil(b'"text":"H"')
            await service.wait_for(lambda: [f.outcome for f in service.flows.values()] == ["aborted"] * 3)

    asyncio.run(run())


def test_connection_is_used_again_after_an_answer() -> None:
    """Watching for the disconnect must not eat the next request of the connection."""

    async def run() -> None:
        service = ScriptedService()
        async with running(service) as server, httpx.AsyncClient(base_url=server.url) as client:
            for stream in (False, True, False, True):
                response = await client.post(CHAT, json={**user("a"), "stream": stream})
                assert response.status_code == 200
        assert [f.outcome for f in service.flows.values()] == ["completed"] * 4

    asyncio.run(run())


def test_slow_reader_holds_the_generation_back() -> None:
    """Nothing piles up in the process: the service is asked for tokens only as fast as the client reads."""

    async def run() -> None:
        text = tuple(b"x" * 1500)
        service = ScriptedService(Script([text]))
        body = {**user("a"), "stream": True, "max_tokens": 1500, "logprobs": True, "top_logprobs": 3}
        async with running(service, send_buffer=4096) as server:
            async with connected(server.port, body, receive_buffer=4096) as (reader, _):
                stalled_at = await steps_when_still(service)
                assert 0 < stalled_at < 1000, "bounded by the sockets' buffers"
                async with asyncio.timeout(TIMEOUT_S):
                    while b"[DONE]" not in await reader.read(1 << 16):
                        pass
            await service.wait_for(lambda: service.last.outcome == "completed")
            assert service.last.num_steps == 1500

    asyncio.run(run())


async def steps_when_still(service: ScriptedService) -> int:
    """Steps taken when nothing has moved for 300 rounds of the loop with work in between."""
    seen, still = -1, 0
    async with asyncio.timeout(TIMEOUT_S):
        while still < 300:
            now = service.last.num_steps if service.flows else -1
            still = still + 1 if now == seen and now > 0 else 0
            seen = now
            # A round trip through the kernel gives the server's sockets their turn.
            await asyncio.get_running_loop().run_in_executor(None, socket.gethostname)
    return seen


def test_reader_that_never_reads_is_dropped() -> None:
    async def run() -> None:
        service = ScriptedService(Script([tuple(b"x" * 1500)]))
        body = {**user("a"), "stream": True, "max_tokens": 1500, "logprobs": True, "top_logprobs": 3}
        settings = ApiSettings(send_stall_timeout_s=0.05)
        async with running(service, settings, send_buffer=4096) as server:
            async with connected(server.port, body, receive_buffer=4096):
                await service.wait_for(lambda: bool(service.flows) and service.last.outcome == "aborted")
            assert await metric(server.url, "omnistage:api_open_requests") == 0

    asyncio.run(run())


def test_many_aborts_leave_nothing_behind() -> None:
    async def run() -> None:
        service = ScriptedService(*[Script(hold_at_step=i % 4) for i in range(24)])
        async with running(service) as server:

            async def leave(i: int) -> None:
                body = {
                    **user([{"type": "image_url", "image_url": "data:image/png;base64,AA"}]),
                    "stream": i % 2 > 0,
                }
                async with connected(server.port, body):
                    await service.wait_for(lambda: len(service.flows) > i)

            await asyncio.gather(*(leave(i) for i in range(24)))
            await service.wait_for(lambda: all(f.outcome == "aborted" for f in service.flows.values()))
            assert len(service.flows) == 24
            assert await metric(server.url, "omnistage:api_open_requests") == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
