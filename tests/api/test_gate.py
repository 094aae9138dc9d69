"""While the server starts and while it ends: the port answers, and says what is being done."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from api import cli
from api.listener import listen
from api.server import ApiServer
from api.settings import ApiSettings
from contracts.errors import EngineError
from stages import start_progress
from stages.options import ServeOptions
from stages.service import Service
from stages.start_progress import StartProgress
from tests.api.fakes import Script, ScriptedService
from tests.api.serving import TIMEOUT_S, running, user
from tests.api.test_disconnect import connected

CHAT = "/v1/chat/completions"
STREAM = {**user("hi"), "stream": True}
DOING = r"thinker: measuring the largest step, \d+ s so far"


def address(capsys: pytest.CaptureFixture[str]) -> str:
    found = re.search(r"listening on (http://\S+);", capsys.readouterr().err)
    assert found is not None
    return found.group(1)


class Start:
    """What `cli.serve` waits for: begun, then held until the test lets it go on, or fail."""

    def __init__(self, progress: StartProgress, failure: Exception | None = None) -> None:
        self.progress = progress
        self.failure = failure
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    @asynccontextmanager
    async def service(self) -> AsyncIterator[Service]:
        self.progress.begin("thinker", "measuring the largest step")
        self.begun.set()
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        self.progress.end("thinker")
        yield ScriptedService()


async def started(start: Start) -> asyncio.Task[None]:
    serving = asyncio.create_task(
        cli.serve(start.service(), ServeOptions(port=0), ApiSettings(), start.progress)
    )
    async with asyncio.timeout(TIMEOUT_S):
        await start.begun.wait()
    return serving


async def until(http: httpx.AsyncClient, path: str, status: int) -> httpx.Response:
    async with asyncio.timeout(TIMEOUT_S):
        while (response := await http.get(path)).status_code != status:
            pass
    return response


# --- starting -----------------------------------------------------------------------------------------------
def test_every_route_answers_while_the_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        start = Start(StartProgress())
        serving = await started(start)
        async with httpx.AsyncClient(base_url=address(capsys)) as http:
            for path in ("/ready", "/health", "/stages", "/metrics", "/", "/v1/models", "/nowhere"):
                response = await http.get(path, headers={"x-request-id": "mine"})
                assert response.status_code == 503, path
                assert int(response.headers["retry-after"]) > 0
                assert response.headers["x-request-id"] == "mine"
                error = response.json()["error"]
                assert (error["code"], error["type"]) == ("starting", "server_error")
                assert re.fullmatch("starting: " + DOING, error["message"])
            assert (await http.post(CHAT, json=user("hi"))).json()["error"]["code"] == "starting"
            health = (await http.get("/health")).json()
            assert health["status"] == "starting"
            assert [(s["stage"], s["state"]) for s in health["stages"]] == [("thinker", "starting")]
            start.go_on.set()
            assert (await until(http, "/ready", 200)).json() == {"ready": True}
            assert (await http.post(CHAT, json=user("hi"))).status_code == 200
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(run())


def test_a_start_that_fails_says_why_and_frees_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        start = Start(StartProgress(), EngineError("no room"))
        serving = await started(start)
        url = address(capsys)
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/ready")).status_code == 503
        start.go_on.set()
        with pytest.raises(EngineError, match="no room"):
            await serving
        listen("127.0.0.1", int(url.rsplit(":", 1)[1])).close()

    asyncio.run(run())


def test_a_long_step_is_told_again_and_again_until_the_start_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_progress, "LOG_EVERY_S", 0.001)
    caplog.set_level(logging.INFO)

    class Heard(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.twice = asyncio.Event()
            self.texts: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.texts.append(record.getMessage())
            if len(self.texts) == 2:
                self.twice.set()

    async def run() -> None:
        heard, progress = Heard(), StartProgress()
        logging.getLogger("stages.start_progress").addHandler(heard)
        try:
            with progress.logged():
                progress.begin("thinker", "measuring the largest step")
                async with asyncio.timeout(TIMEOUT_S):
                    await heard.twice.wait()
            assert progress._timer is not None
            assert progress._timer.cancelled()
        finally:
            logging.getLogger("stages.start_progress").removeHandler(heard)
        assert all(re.fullmatch(DOING, text) for text in heard.texts)

    asyncio.run(run())


# --- ending -------------------------------------------------------------------------------------------------
def error_of(response: httpx.Response) -> tuple[int, str, bool]:
    return response.status_code, response.json()["error"]["code"], "retry-after" in response.headers


def test_draining_refuses_what_is_new_and_finishes_what_is_under_way() -> None:
    async def run() -> None:
        service = ScriptedService(Script(hold_at_step=2))
        server = ApiServer(ApiSettings())
        from api.app import create_app

        server.open(create_app(service, ApiSettings()))
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
            async with http.stream("POST", CHAT, json=STREAM) as stream:
                server.stop()
                for path in ("/ready", "/v1/models"):
                    assert error_of(await http.get(path)) == (503, "shutting_down", True)
                assert error_of(await http.post(CHAT, json=STREAM)) == (503, "shutting_down", True)
                health = await http.get("/health")
                assert error_of(health) == (503, "shutting_down", True)
                assert health.json()["status"] == "draining"
                assert (await http.get("/metrics")).status_code == 200
                service.release.set()
                text = (await stream.aread()).decode()
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"stop"' in text
            await serving

    asyncio.run(run())


async def cut(service: ScriptedService, url: str, server: ApiServer, body: dict[str, Any]) -> httpx.Response:
    """The answer to a request that the second `stop` finds under way."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        asking = asyncio.create_task(http.post(CHAT, json=body))
        await service.wait_for(lambda: bool(service.flows) and service.last.num_steps == 2)
        server.stop()
        server.stop()
        return await asking


@pytest.mark.parametrize("stream", [True, False])
def test_a_second_stop_tells_the_clients(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def run() -> None:
        service = ScriptedService(Script(hold_at_step=2))
        async with running(service) as server:
            response = await cut(service, server.url, server.server, {**user("hi"), "stream": stream})
        if stream:
            *_, last = response.text.removesuffix("\n\n").split("\n\n")
            assert last.startswith('data: {"error":{"message":"the server was told to stop at once"')
            assert '"code":"shutting_down"' in last
        else:
            assert error_of(response) == (503, "shutting_down", True)
        await service.wait_for(lambda: service.last.outcome == "aborted")

    asyncio.run(run())
    assert [r.getMessage() for r in caplog.records] == [
        "told to stop again: 1 requests under way are cut off"
    ]


def test_what_is_under_way_when_the_time_is_up_is_cut_off() -> None:
    async def run() -> None:
        service = ScriptedService(Script(hold_at_step=2))
        async with (
            running(service, ApiSettings(drain_timeout_s=0.01)) as server,
            httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http,
        ):
            async with http.stream("POST", CHAT, json=STREAM) as stream:
                server.server.stop()
                text = (await stream.aread()).decode()
            assert '"code":"shutting_down"' in text

    asyncio.run(run())


def test_a_client_that_does_not_read_does_not_keep_the_server() -> None:
    async def run() -> None:
        service = ScriptedService(Script(answers=[tuple(b"x" * 4000)]))
        async with (
            running(service, send_buffer=4096) as server,
            connected(server.port, STREAM, receive_buffer=4096),
        ):
            await service.wait_for(lambda: bool(service.flows))
            server.server.stop()
            server.server.stop()
            await service.wait_for(lambda: service.last.outcome != "open")
            async with asyncio.timeout(TIMEOUT_S):
                await server.server._gate.empty()

    asyncio.run(run())
