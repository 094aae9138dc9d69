"""A worker that crashes, hangs, hoards or floods when its payload says so; otherwise it is the real one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from preprocess.protocol import Done, Task
from preprocess.worker import Worker, main

HOARD: list[bytearray] = []


class MisbehavingWorker(Worker):
    def make(self, task: Task, payload: bytes) -> Done | None:
        order, _, rest = payload.partition(b"\n")
        match order:
            case b"crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"crash once":
                marker, _, payload = rest.partition(b"\n")
                path = Path(os.fsdecode(marker))
                if not path.exists():
                    path.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            case b"exit":
                os._exit(0)
            case b"hang":
                signal.pause()
            case b"hang holding memory":
                assert super().make(task, rest)
                signal.pause()
            case b"hog":
                bytearray(1 << 40)
            case b"hoard":
                HOARD.append(bytearray(b"x" * (64 << 20)))
                payload = rest
        return super().make(task, payload)


if __name__ == "__main__":
    main(MisbehavingWorker)
