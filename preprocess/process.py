"""One worker process as the pool sees it: started, watched through its pidfd, ended, reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from preprocess.protocol import PoolChannel

_IMPORT_ROOT = str(Path(__file__).resolve().parent.parent)
# Of what a picture took, glibc keeps this much for the next: given back, it comes again page by page, each
# cleared by the kernel, which takes longer than to resize the picture.
_KEPT_BYTES = 64 << 20
_LARGEST_ON_HEAP = 32 << 20  # as large as glibc lets a part of its heap be
_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
    "MALLOC_MMAP_THRESHOLD_": str(_LARGEST_ON_HEAP),
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerProcess:
    """Starts on construction. `exited` is done once the process is reaped: only then are its writes over."""

    def __init__(self, module: str, arena_fd: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel = PoolChannel(ours)
        # -P: nothing of the current directory is importable, only the root this package came from.
        command = [sys.executable, "-P", "-m", module]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(arena_fd), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), arena_fd),
                    env={
                        **_MEMORY,
                        **os.environ,
                        **dict.fromkeys(_THREAD_VARIABLES, "1"),
                        "PYTHONPATH": _import_path(),
                    },
                )
        except OSError:
            self.channel.close()
            raise
        self.pid = self._process.pid
        self.items_done = 0
        self.rss_bytes = 0
        self._pidfd = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    def kill(self) -> None:
        if not self.exited.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Closes the channel, kills the process, waits until it is gone. Also works on a stopped process."""
        self.channel.close()
        self.kill()
        await asyncio.shield(self.exited)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._process.wait()  # has exited: does not block
        os.close(self._pidfd)
        if not self.exited.done():
            self.exited.set_result(None)


def _import_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return _IMPORT_ROOT if not inherited else f"{_IMPORT_ROOT}{os.pathsep}{inherited}"
