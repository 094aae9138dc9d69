"""The agent of a worker elsewhere, and who else may be where it is told to connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from api import cli
from contracts.errors import EngineError
from stages import worker_agent
from stages.options import ServeOptions
from stages.remote_workers import Rendezvous
from stages.worker_agent import AgentOptions, run_agent
from stages.worker_main import WorkerSetup
from tests.api.fakes import ScriptedService
from tests.api.serving import running
from tests.served import TIMEOUT_S

HERE = "127.0.0.1"


def agent(port: int, wait_s: float = 0.0) -> AgentOptions:
    return AgentOptions(HERE, port, "lm", "secret", wait_s=wait_s)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_agent, "RETRY_S", 0.01)


class Forks:
    """A fork server that is only heard of."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    def start(self) -> None:
        self.started.set()

    def stop(self) -> None:
        pass


@contextlib.asynccontextmanager
async def stranger(banner: bytes = b"", answer: Callable[[bytes], bytes] | None = None) -> AsyncIterator[int]:
    """A port whose owner says `banner` at once and, to what comes, `answer`; None hangs up after it."""
    talks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks[task] = writer
        with contextlib.suppress(ConnectionError):
            writer.write(banner)
            while answer is not None and (heard := await reader.read(1 << 16)):
                writer.write(answer(heard))
        writer.close()

    server = await asyncio.start_server(talk, HERE, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in talks.values():
            writer.transport.abort()
        await asyncio.gather(*talks)


def refused(port_of: Callable[[], contextlib.AbstractAsyncContextManager[int]], message: str) -> None:
    async def run() -> None:
        async with port_of() as port:
            with pytest.raises(EngineError, match=message) as caught:
                await run_agent(agent(port, wait_s=TIMEOUT_S))
            assert f"tcp://{HERE}:{port} is no omnistage server's" in caught.value.message
            assert "cluster.port" in caught.value.message

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@contextlib.asynccontextmanager
async def api_port() -> AsyncIterator[int]:
    async with running(ScriptedService()) as server:
        yield server.port


def test_the_port_of_the_api_is_told_to_be_that() -> None:
    refused(api_port, "it is an HTTP server; want the address that the server logs for its workers")


ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"


@pytest.mark.parametrize(
    ("banner", "answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", None, "it is an ssh server"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", lambda _: b"", "it is an ssh server"),
        (b"", lambda _: b"\x15\x03\x01\0\x02\x02\x0a", "it wants TLS"),
        (ZMTP, lambda _: b"", "it is a ZeroMQ socket"),
        (b"220 mail", None, "it says b'220 mail'"),
        (b"\x05\0", None, r"it says b'\\x05\\x00'"),
        (b"", lambda heard: heard, "it answers what no server of omnistage does"),
        (b"", lambda _: b"\0\0\0\0", "it answers what no server of omnistage does"),
        (b"", lambda _: b"", "it takes the connection and says nothing for 0.5 s"),
    ],
)
def test_whoever_else_is_there_is_named(
    banner: bytes, answer: Callable[[bytes], bytes] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_agent, "GREETING_LIMIT_S", 0.5)
    refused(lambda: stranger(banner, answer), message)


def test_who_hangs_up_without_a_word_is_tried_for_as_long_as_nobody_is() -> None:
    async def run() -> None:
        async with stranger() as port:
            with pytest.raises(EngineError, match=r"ends the connection without a word, for 0\.1 s"):
                await run_agent(agent(port, wait_s=0.1))

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_closed_port_is_told_at_once_and_given_up_after_the_wait(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind((HERE, 0))
        port = closed.getsockname()[1]
        arguments = ["worker", "--connect", f"tcp://{HERE}:{port}", "--name", "lm", "--token", "t"]
        assert cli.main([*arguments, "--wait", "0"]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        nobody = f"nobody answers at tcp://{HERE}:{port}: connection refused"
        assert last.startswith(f"omnistage: {nobody}, for 0 s; want the address that the server logs")
        assert cli.main([*arguments, "--wait", "0.1"]) == 1
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"{nobody}; trying again for 0 s"]


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "long"])
def test_a_wait_is_a_number_of_seconds(wait: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["worker", "--connect", "tcp://a:1", "--name", "lm", "--token", "t", "--wait", wait])
    assert "--wait" in capsys.readouterr().err


def test_a_front_process_that_wants_nothing_yet_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """It greets; and when it has gone, the wait begins anew."""

    async def run() -> None:
        forks = Forks()
        monkeypatch.setattr(worker_agent, "ForkServer", lambda: forks)
        monkeypatch.setattr(worker_agent, "GREETING_LIMIT_S", TIMEOUT_S)
        rendezvous = Rendezvous(HERE, 0, "secret", ["lm"])
        port = int(rendezvous.endpoint.rpartition(":")[2])
        running = asyncio.create_task(run_agent(agent(port)))
        rendezvous.start()
        await forks.started.wait()
        assert rendezvous.places["lm"].is_taken
        rendezvous.close()
        with pytest.raises(EngineError, match="nobody answers at"):
            await running

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize("missing", ["folder", "config", "weights"])
def test_a_checkpoint_that_is_not_here_is_declined_by_name(tmp_path: Path, missing: str) -> None:
    if missing != "folder":
        (tmp_path / "model").mkdir()
    if missing == "weights":
        (tmp_path / "model" / "config.json").write_text("{}")
    setup = WorkerSetup(
        name="lm",
        stages=(),
        endpoint="",
        token="",
        options=ServeOptions(model=Path("/of/the/server")),
        edges=(),
        arena=None,
        threads=1,
        heartbeat_s=1.0,
        kv_blocks={},
        checkpoint="another",
    )

    async def run() -> None:
        rendezvous = Rendezvous(HERE, 0, "secret", ["lm"])
        rendezvous.start()
        content = msgspec.json.encode(setup, enc_hook=str)
        rendezvous.places["lm"].fork("lm", content, (), lambda: None)
        port = int(rendezvous.endpoint.rpartition(":")[2])
        options = replace(agent(port), model=tmp_path / "model")
        with pytest.raises(EngineError, match=f"worker lm is refused: .*{tmp_path / 'model'}"):
            await run_agent(options)
        rendezvous.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
