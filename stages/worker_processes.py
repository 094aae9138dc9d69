"""Worker processes as the front process holds them: asked of the fork server, watched and killed by pidfd."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stages.control import MAX_FORK_BYTES, MAX_FORK_FDS, Forked, ForkRequest

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
FRONT_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the front process decides; they may reach a whole group


class WorkerProcess:
    """One worker. `pid` is 0 until it has been forked; `on_exit` is called once, on the loop."""

    def __init__(self, request: ForkRequest, fds: Sequence[int], on_exit: Callable[[], None]) -> None:
        self.request = request
        self.fds = fds
        self.pid = 0
        self._pidfd = -1
        self._on_exit: Callable[[], None] | None = on_exit

    def forked(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        asyncio.get_running_loop().add_reader(pidfd, self.gone)

    def kill(self) -> None:
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def gone(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._on_exit is not None:
            on_exit, self._on_exit = self._on_exit, None
            on_exit()


class ForkServer:
    """All methods on one event loop. The server is started by the first `fork`, and again after its death,
    which all its workers die with."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._queue: deque[WorkerProcess] = deque()  # the first one has been asked for
        self._stopped = False

    @property
    def pid(self) -> int:
        """0 when none runs."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        assert self._process is None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # numpy's BLAS would start threads as it loads, and only a process of one thread forks cleanly.
            path = os.pathsep.join([str(ROOT), *sys.path])
            environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
            # If a library it imports asks for GPUs, torch is to ask the driver's manager: a process that
            # has asked
            # CUDA itself has forks that cannot use it.
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            command = [sys.executable, "-m", "stages.fork_server", str(theirs.fileno()), str(os.getpid())]
            # While it imports, these would end it with a traceback; it ignores them and lets them in again.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, FRONT_SIGNALS)
            try:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._readable)

    def fork(self, name: str, setup: bytes, fds: Sequence[int], on_exit: Callable[[], None]) -> WorkerProcess:
        """`fds` have the same numbers in the worker as here."""
        assert not self._stopped
        assert len(fds) <= MAX_FORK_FDS
        worker = WorkerProcess(ForkRequest(name, setup, tuple(fds)), fds, on_exit)
        if self._process is None:
            self.start()
        self._queue.append(worker)
        if len(self._queue) == 1:
            self._ask()
        return worker

    def kill(self) -> None:
        """Ends the server and every worker there is or was to be; the next `fork` starts another."""
        self._end()

    def stop(self) -> None:
        """As `kill`, for good."""
        self._stopped = True
        self._end()

    def _ask(self) -> None:
        assert self._control is not None
        worker = self._queue[0]
        # One request is under way at a time, so that the socket has room for it.
        try:
            socket.send_fds(self._control, [msgspec.msgpack.encode(worker.request)], list(worker.fds))
        except ConnectionError:
            return  # the end of the stream tells the same

    def _readable(self) -> None:
        assert self._control is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_FORK_BYTES, 1)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            logger.error("the fork server (pid %d) is gone, and its workers with it", self.pid)
            self._end()
            return
        forked = msgspec.msgpack.decode(data, type=Forked)
        worker = self._queue.popleft()
        if self._queue:
            self._ask()
        if forked.pid:
            worker.forked(forked.pid, fds[0])
        else:
            worker.gone()

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._control is not None
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._process.kill()
        self._process.wait()  # after it no worker of it runs: the kernel has killed them
        self._process = self._control = None
        waiting = list(self._queue)
        self._queue.clear()
        for worker in waiting:
            worker.gone()
