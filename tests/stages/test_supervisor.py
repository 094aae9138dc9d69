"""The supervisor: workers that do not start, a stop at any moment, and processes that end with their
parents."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.messages import FromStage, StageReady, StageStats
from stages.options import ServeOptions
from stages.supervisor import Supervisor, SupervisorConfig, WorkerSpec
from stages.worker_main import decode_setup
from stages.worker_processes import ForkServer, WorkerProcess

LIMIT_S = 300  # never reached by a machine that is only slow
CONFIG = SupervisorConfig(failed_start_pause_s=0.0)


class Run:
    """A supervisor of one worker that hosts the thinker of a folder, and what it told its owner."""

    def __init__(self, folder: Path, config: SupervisorConfig = CONFIG) -> None:
        spec = WorkerSpec("thinker", ("thinker",), ("cpu",), (), 1, ())
        options = ServeOptions(model=folder, dtype="float32")  # the KV cache is measured
        self.messages: list[FromStage] = []
        self.losses: list[bool] = []
        self.changed = asyncio.Event()
        self.supervisor = Supervisor(
            [spec], options, None, deliver=self._deliver, on_lost=self._lost, config=config
        )

    def _deliver(self, messages: list[FromStage]) -> None:
        self.messages += messages
        self.changed.set()

    def _lost(self, spec: WorkerSpec, again: bool) -> None:
        self.losses.append(again)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @property
    def state(self) -> str:
        return self.supervisor.infos()[0].state

    @property
    def pid(self) -> int:
        return self.supervisor.infos()[0].pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_that_never_starts_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(tmp_path)  # no checkpoint in it
        await run.supervisor.start()
        await run.until(lambda: False in run.losses)
        assert run.losses == [True] * (CONFIG.max_failed_starts - 1) + [False]
        assert run.state == "failed"
        await run.supervisor.stop()

    asyncio.run(main())


@pytest.mark.parametrize("most", [0, 1])
def test_what_replaces_a_ready_worker_knows_unless_they_die_too_often(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    again: list[bool] = []
    fork = ForkServer.fork

    def spy(self: ForkServer, name: str, setup: bytes, *args: Any) -> WorkerProcess:
        again.append(decode_setup(setup).again)
        return fork(self, name, setup, *args)

    monkeypatch.setattr(ForkServer, "fork", spy)

    async def main() -> None:
        run = Run(tiny("llama"), replace(CONFIG, max_hurried_restarts=most))
        await run.supervisor.start()
        for deaths in range(3):
            await run.until(lambda: run.state == "ready")
            if deaths < 2:
                os.kill(run.pid, 9)
                await run.until(lambda deaths=deaths: len(run.losses) > deaths)
        await run.supervisor.stop()

    asyncio.run(main())
    assert again == [False, most > 0, False]


def test_a_ready_worker_is_restarted_at_once(tiny: Callable[..., Path]) -> None:
    async def main() -> None:
        run = Run(tiny("llama"))
        await run.supervisor.start()
        await run.until(lambda: run.state == "ready")
        pid, server = run.pid, parent_of(run.pid)
        assert server != os.getpid()
        assert Path(f"/proc/{pid}/comm").read_text() == "thinker\n"
        os.kill(pid, 9)
        await run.until(lambda: bool(run.losses))
        await run.until(lambda: run.state == "ready")
        assert run.losses == [True]
        details = [m.detail for m in run.messages if isinstance(m, StageReady)]
        assert ["weights and activations" in detail for detail in details] == [True, False], "measured once"
        blocks = {m.values["num_kv_blocks"] for m in run.messages if isinstance(m, StageStats)}
        assert len(blocks) == 1, "and of the same size since"
        assert run.pid != pid
        assert parent_of(run.pid) == server
        await run.supervisor.stop()
        assert run.state == "stopped"

    asyncio.run(main())


def test_it_stops_while_workers_are_starting(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(tmp_path)
        await run.supervisor.start()
        await run.supervisor.stop()
        assert run.state == "stopped"
        assert run.losses == []

    asyncio.run(main())


def test_a_fork_server_that_never_answers_is_replaced(tiny: Callable[..., Path]) -> None:
    """A start that takes longer than its limit counts as a death, also before there is a process."""

    async def main() -> None:
        run = Run(tiny("llama"), SupervisorConfig(start_limit_s=0.0, failed_start_pause_s=0.0))
        await run.supervisor.start()
        await run.until(lambda: False in run.losses)
        assert run.state == "failed"
        await run.supervisor.stop()

    asyncio.run(main())
