"""The fork server: a process that has imported everything a worker needs, once, and forks workers on demand.

Importing torch and the stages takes seconds, a fork milliseconds: it is what makes a restart short. The
server runs one thread, no event loop and no CUDA, so that a fork of it is a clean process. It ends, and every
worker with it, when the front process does.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec

import msgspec
import torch

from stages import worker_main
from stages.control import MAX_FORK_BYTES, MAX_FORK_FDS, Forked, ForkRequest
from stages.options import GPU_CONTROL
from stages.prctl import die_with, set_process_name
from stages.worker_processes import FRONT_SIGNALS

logger = logging.getLogger(__name__)


def main() -> None:
    """Run as `python -m stages.fork_server SOCKET_FD PARENT_PID`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    for number in FRONT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FRONT_SIGNALS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s workers: %(message)s")
    if GPU_CONTROL.exists():
        _import_for_gpus()
    assert threading.active_count() == 1
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert not uses_cuda, "a fork of a process that uses CUDA cannot use it"
    gc.freeze()  # what is imported stays shared between the workers instead of being copied at collections
    request = _Server(control).serve()
    if request is not None:
        worker_main.run(request.setup)
        logging.shutdown()
        os._exit(0)  # the kernel takes everything back at once; torch's own clearing up takes a second


def _import_for_gpus() -> None:
    """What workers on GPUs need beside: Triton, and seconds of torch's compiler, which its attention of
    packed rows brings along and tensors without values ask for."""
    if find_spec("torch.nn.attention.varlen") is not None:
        import torch.nn.attention.varlen  # noqa: F401
    if find_spec("triton") is not None:
        import lm_engine.triton.ahead  # noqa: F401


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._workers: dict[int, tuple[int, str]] = {}  # pidfd → (pid, name)
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def serve(self) -> ForkRequest | None:
        """Returns in every forked worker with its request, and in the server with None when it is to end."""
        while True:
            for fd, _ in self._poller.poll():
                if fd in self._workers:
                    self._reap(fd)
                    continue
                data, fds, flags, _ = socket.recv_fds(self._control, MAX_FORK_BYTES, MAX_FORK_FDS)
                if not data:
                    return None
                assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "a request was cut"
                request = msgspec.msgpack.decode(data, type=ForkRequest)
                if self._fork(request, fds):
                    return request

    def _fork(self, request: ForkRequest, fds: Sequence[int]) -> bool:
        """True in the worker."""
        try:
            pid = os.fork()
        except OSError as error:
            logger.error("worker %s cannot be forked: %s", request.name, error)
            self._answer(Forked(0), [])
            pid = -1
        if pid == 0:
            die_with(self._pid)
            self._become_worker(request, fds)
            return True
        for fd in fds:
            os.close(fd)
        if pid > 0:
            pidfd = os.pidfd_open(pid)
            self._workers[pidfd] = pid, request.name
            self._poller.register(pidfd, select.POLLIN)
            self._answer(Forked(pid), [pidfd])
        return False

    def _answer(self, answer: Forked, fds: list[int]) -> None:
        socket.send_fds(self._control, [msgspec.msgpack.encode(answer)], fds)

    def _reap(self, pidfd: int) -> None:
        pid, name = self._workers.pop(pidfd)
        self._poller.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        level = logging.INFO if code == 0 else logging.ERROR
        logger.log(level, "worker %s (pid %d) ended with status %d", name, pid, code)

    def _become_worker(self, request: ForkRequest, fds: Sequence[int]) -> None:
        """Nothing of the server stays open, and the descriptors get the numbers that the setup names."""
        self._control.close()
        for pidfd in self._workers:
            os.close(pidfd)
        above = max(request.fds, default=0) + 1
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
        for fd in fds:
            os.close(fd)
        for source, target in zip(moved, request.fds, strict=True):
            os.dup2(source, target, inheritable=False)
            os.close(source)
        set_process_name(request.name)


if __name__ == "__main__":
    main()
