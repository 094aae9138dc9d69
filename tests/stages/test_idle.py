"""An idle server sleeps: between two rounds of heartbeats no process of it does anything else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.messages import FromStage
from stages.control import FromWorker, Heartbeat, Hello
from stages.supervisor import Supervisor
from tests.conftest import child_processes
from tests.served import Served, picture

ROUNDS = 2
# Of a worker: its loop, ZMQ's thread and back. Of the front's loop: what ZMQ needs to receive one message (11
# seen). Whoever polls thirty times a second comes to more.
WAKEUPS_A_HEARTBEAT = 8
TURNS_A_HEARTBEAT = 16


class Watch:
    """Counts what workers say, and wakes a waiter at every heartbeat."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.beats: Counter[bytes] = Counter()
        self.said: list[FromStage] = []
        self.beat = asyncio.Event()
        received = Supervisor._received

        def note(supervisor: Supervisor, identity: bytes, message: Hello | FromWorker | Heartbeat) -> None:
            received(supervisor, identity, message)
            if isinstance(message, Heartbeat):
                self.beats[identity] += 1
                self.beat.set()
            elif isinstance(message, FromWorker):
                self.said += message.messages

        patch.setattr(Supervisor, "_received", note)
        self.turns: Counter[asyncio.AbstractEventLoop] = Counter()  # of event loops in this process
        run_once = asyncio.BaseEventLoop._run_once

        def turn(loop: asyncio.AbstractEventLoop) -> None:
            self.turns[loop] += 1
            run_once(loop)

        patch.setattr(asyncio.BaseEventLoop, "_run_once", turn)

    async def rounds(self, number: int, num_workers: int) -> None:
        """Returns after so many heartbeats of every worker."""
        self.beats.clear()
        while sum(count >= number for count in self.beats.values()) < num_workers:
            self.beat.clear()
            await self.beat.wait()


def wakeups(pid: int) -> int:
    """How often a thread of the process has gone to sleep by itself."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        line = next(x for x in status.read_text().splitlines() if x.startswith("voluntary_ctxt_switches"))
        total += int(line.split()[1])
    return total


def test_only_heartbeats_wake_it(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    settings = ("preprocess.workers=1", "server.heartbeat_s=1.0")
    with Served(tiny("qwen2_5_vl"), *settings, workers="per-stage") as served:
        served.ask([("user", ["what is ", picture(1), "?"])])
        served.assert_clean()
        pids = {*child_processes(), *(worker.pid for worker in served.service.workers())}
        num_workers = len(served.service.workers())
        assert len(pids) == 2 + num_workers, "the fork server, a preprocessing worker and the stages' workers"

        async def measure() -> dict[int, int]:
            await watch.rounds(1, num_workers)
            watch.said.clear()
            before = {pid: wakeups(pid) for pid in pids}
            watch.turns.clear()
            await watch.rounds(ROUNDS, num_workers)
            return {pid: wakeups(pid) - count for pid, count in before.items()}

        counts = served.run(measure())
    assert watch.said == []
    beats = ROUNDS + 1  # one may fall between
    assert max(counts.values()) <= beats * WAKEUPS_A_HEARTBEAT, counts
    assert max(watch.turns.values()) <= beats * num_workers * TURNS_A_HEARTBEAT, "the front's own loop"
