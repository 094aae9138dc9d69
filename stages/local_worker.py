"""LocalWorker: runs stage shells in threads of this process, one event loop each."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence

from contracts.messages import Shutdown, ToStage
from stages.event_loops import loop_factory
from stages.service import WorkerInfo
from stages.shell import StageShell


class LocalWorker:
    """Starts and stops the shells; messages go straight into their mailboxes."""

    def __init__(self, shells: Sequence[StageShell]) -> None:
        self._shells = {shell.name: shell for shell in shells}
        self._threads = [
            threading.Thread(target=_run_shell, args=(shell,), name=f"stage-{shell.name}") for shell in shells
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, stage: str, message: ToStage) -> None:
        self._shells[stage].mailbox.put(message)

    def infos(self) -> tuple[WorkerInfo, ...]:
        alive = all(thread.is_alive() for thread in self._threads)
        return (
            WorkerInfo(
                name="front",
                stages=tuple(self._shells),
                pid=os.getpid(),
                devices=(),
                state="ready" if alive else "failed",
                restarts=0,
            ),
        )

    async def stop(self) -> None:
        """Ends every shell after what it is doing now; waits for the threads off the loop."""
        for shell in self._shells.values():
            shell.mailbox.put(Shutdown())
        for thread in self._threads:
            if thread.is_alive():
                await asyncio.to_thread(thread.join)


def _run_shell(shell: StageShell) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(shell.run())
