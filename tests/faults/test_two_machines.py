"""Workers of another machine, here one of another loopback address: the answers of one process, also when a
worker there dies, or its agent with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from contracts.errors import EngineError
from stages.fingerprint import checkpoint_fingerprint
from stages.options import ServeOptions
from stages.remote_workers import Rendezvous
from stages.worker_agent import AgentOptions, run_agent
from stages.worker_main import WorkerSetup
from tests.connectors.test_contract import has_nixl
from tests.parity.test_matrix import A, B
from tests.served import TIMEOUT_S, Served, Turn

pytestmark = pytest.mark.skipif(not has_nixl(), reason="the extra omnistage[nixl] is not installed")

TOKEN = "secret"
HERE, THERE = "127.0.0.1", "127.0.0.2"
QUESTIONS: list[Sequence[Turn]] = [
    [("user", ["hello there, the answer is"])],
    [("user", [A, "what is it?"])],
    [("user", [B, "and this", A, "compare"])],
]
SAMPLING = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return int(server.getsockname()[1])


def deployment_text(port: int) -> str:
    return f"""
[cluster]
address = "{HERE}"
port = {port}
[[worker]]
name = "encoder"
stages = ["vision"]
host = "second"
[[worker]]
name = "lm"
stages = ["thinker"]
host = "second"
"""


@contextlib.contextmanager
def agent(port: int, name: str) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ["--connect", f"tcp://{HERE}:{port}", "--name", name, "--address", THERE]
    process = subprocess.Popen(
        [sys.executable, "-m", "api.cli", "worker", *arguments],
        env=os.environ | {"OMNISTAGE_WORKER_TOKEN": TOKEN},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


async def answers_while(served: Served, blow: Callable[[], object]) -> list[dict[int, list[int]]]:
    answers = [asyncio.create_task(served.answer(question, **SAMPLING)) for question in QUESTIONS]
    await served.progress(5)
    blow()
    return [(await answer).token_ids for answer in answers]


def test_workers_on_another_machine_answer_as_one_process_and_come_again(
    tiny: Callable[[str], Path], tmp_path: Path, free_port: int
) -> None:
    folder, file = tiny("qwen2_5_vl"), tmp_path / "deployment.toml"
    file.write_text(deployment_text(free_port))
    with Served(folder, "thinker.kv_memory=8MiB") as served:
        expected = [answer.token_ids for answer in served.ask_all(QUESTIONS, **SAMPLING)]
    with contextlib.ExitStack() as stack:
        encoder = stack.enter_context(agent(free_port, "encoder"))  # before there is a server
        stack.enter_context(agent(free_port, "lm"))
        options = {"deployment": file, "workers": "file", "worker_token": TOKEN}
        with Served(folder, "thinker.kv_memory=8MiB", **options) as served:
            assert [answer.token_ids for answer in served.ask_all(QUESTIONS, **SAMPLING)] == expected
            pids = {worker.name: worker.pid for worker in served.service.workers()}
            served.reset_cache()
            again = served.run(answers_while(served, lambda: os.kill(pids["lm"], signal.SIGKILL)))
            assert again == expected
            served.run(served.worker_restarted("thinker", 1))
            served.reset_cache()
            encoder.kill()
            encoder.wait()
            stack.enter_context(agent(free_port, "encoder"))
            served.run(served.worker_restarted("vision", 1))
            assert [answer.token_ids for answer in served.ask_all(QUESTIONS, **SAMPLING)] == expected
            assert not Path(f"/proc/{pids['encoder']}").exists(), "it outlived its agent"
            served.assert_clean()


@pytest.mark.parametrize(
    ("name", "token", "reason"),
    [("lm", "wrong", "the token is another one"), ("xy", TOKEN, "no worker 'xy' is wanted")],
)
def test_strangers_are_refused(name: str, token: str, reason: str) -> None:
    async def main() -> None:
        rendezvous = Rendezvous(HERE, 0, TOKEN, ["lm"])
        rendezvous.start()
        port = int(rendezvous.endpoint.rpartition(":")[2])
        with pytest.raises(EngineError, match=reason):
            await run_agent(AgentOptions(HERE, port, name, token))
        assert not rendezvous.places["lm"].is_taken
        rendezvous.close()

    asyncio.run(main())


@contextlib.contextmanager
def rendezvous_of(*names: str) -> Iterator[tuple[Rendezvous, int]]:
    """On the running loop; and its port."""
    rendezvous = Rendezvous(HERE, 0, TOKEN, names)
    rendezvous.start()
    try:
        yield rendezvous, int(rendezvous.endpoint.rpartition(":")[2])
    finally:
        rendezvous.close()


def test_a_crowd_of_strangers_keeps_no_agent_out() -> None:
    async def main() -> None:
        with rendezvous_of("lm") as (rendezvous, port):
            crowd = [socket.create_connection((HERE, port)) for _ in range(70)]
            for number in range(2):  # while they stand there, and when they have left
                with pytest.raises(EngineError, match="the token is another one"):
                    await run_agent(AgentOptions(HERE, port, "lm", "wrong"))
                for stranger in crowd if number == 0 else ():
                    stranger.close()
            with pytest.raises(EngineError, match="the token is another one"):
                await run_agent(AgentOptions(HERE, port, "lm", "wrong"))
            assert rendezvous._strangers == []

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.worker_agent.VERSION", "0.0.1")

    async def main() -> None:
        refusal = pytest.raises(EngineError, match=r"its omnistage is version 0\.0\.1, this one")
        with rendezvous_of("lm") as (_, port), refusal:
            await run_agent(AgentOptions(HERE, port, "lm", TOKEN))

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_worker_with_another_checkpoint_declines_and_the_next_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    setup = WorkerSetup(
        name="lm",
        stages=(),
        endpoint="",
        token="",
        options=ServeOptions(model=tmp_path),
        edges=(),
        arena=None,
        threads=1,
        heartbeat_s=1.0,
        kv_blocks={},
        checkpoint=checkpoint_fingerprint(tmp_path),
    )
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20).replace(b"\0", b"\1"))
    ended: list[None] = []

    async def main() -> None:
        with rendezvous_of("lm") as (rendezvous, port):
            place = rendezvous.places["lm"]
            content = msgspec.json.encode(setup, enc_hook=str)
            place.fork("lm", content, (), lambda: ended.append(None))
            for _ in range(2):
                with pytest.raises(EngineError, match="is another one than the front process has"):
                    await run_agent(AgentOptions(HERE, port, "lm", TOKEN))
            assert ended == []

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_options_for_another_machine_bring_the_deployment_along(tmp_path: Path) -> None:
    from stages.options import for_machine

    file = tmp_path / "d.toml"
    file.write_text("[server]\nmax_requests = 3\n")
    there = for_machine(ServeOptions(deployment=file, worker_token=TOKEN), "second")
    assert (there.deployment, there.machine, there.worker_token) == (None, "second", None)
    assert there.deployment_text == file.read_text()
