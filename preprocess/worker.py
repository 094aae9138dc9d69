"""A preprocessing worker process: one source at a time, no network, no torch, killable at any moment.

Run as `python -m preprocess.worker SOCKET_FD ARENA_FD PARENT_PID`. It ends when its socket does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys

import msgspec
from PIL import Image

from contracts.errors import MediaTooLarge, OmnistageError
from preprocess.arena import ArenaMapping
from preprocess.items import Place, prepare
from preprocess.protocol import (
    Done,
    Drop,
    Grant,
    Ready,
    Setup,
    SizeKnown,
    Task,
    TaskFailed,
    WorkerChannel,
)
from preprocess.resampling import choose_resize, resize_threads

_PR_SET_PDEATHSIG = 1


class Worker:
    """Serves tasks until the pool closes the channel."""

    def __init__(self, channel: WorkerChannel, arena_fd: int) -> None:
        self._channel = channel
        setup = channel.receive()
        assert isinstance(setup, Setup)
        self._setup = setup
        self._arena = ArenaMapping(arena_fd, setup.arena, setup.arena_bytes, writable=True)
        self._resize = choose_resize(setup.resize, resize_threads())
        _limit_memory(setup.limits.worker_memory_bytes)

    def serve(self) -> None:
        """Raises EOFError when the pool is gone."""
        self._channel.send(Ready(_private_bytes()))
        while True:
            task = self._channel.receive()
            assert isinstance(task, Task)
            payload = self._channel.receive_bytes(task.payload_bytes)
            reply = self._process(task, payload)
            del payload
            if reply is not None:
                # Measured here, after everything of the source is freed.
                self._channel.send(msgspec.structs.replace(reply, rss_bytes=_private_bytes()))

    def _process(self, task: Task, payload: bytes) -> Done | TaskFailed | None:
        try:
            return self.make(task, payload)
        except OmnistageError as error:
            return TaskFailed(error.info())
        except MemoryError:
            return TaskFailed(
                MediaTooLarge("decoding the item needs more memory than a worker may use").info()
            )

    def make(self, task: Task, payload: bytes) -> Done | None:
        """None when the pool dropped the task."""
        prepared = prepare(task.recipe, payload, self._setup.limits, self._resize)
        self._channel.send(SizeKnown(prepared.nbytes))
        answer = self._channel.receive()
        if isinstance(answer, Drop):
            return None
        assert isinstance(answer, Grant)
        place = Place(self._arena, answer.offset, prepared.nbytes, task.bytes_digest, self._setup.digester)
        return Done(prepared.write(place))


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process as soon as the front process (the thread that started us) is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(1)


def _limit_memory(extra_bytes: int) -> None:
    """Address space: what the interpreter and the arena already map, and `extra_bytes` more."""
    limit = _statm(0) + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _private_bytes() -> int:
    """Resident memory without the shared pages of the arena."""
    return _statm(1) - _statm(2)


def _statm(field: int) -> int:
    """/proc/self/statm in bytes: 0 address space, 1 resident, 2 resident and shared. See proc(5)."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[field]) * resource.getpagesize()


def main(worker_type: type[Worker] = Worker) -> None:
    socket_fd, arena_fd, parent_pid = map(int, sys.argv[1:4])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front process's to handle
    Image.MAX_IMAGE_PIXELS = None  # the limit is max_source_pixels, checked from the header
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is gone or wants us gone
        worker_type(WorkerChannel(socket.socket(fileno=socket_fd)), arena_fd).serve()


if __name__ == "__main__":
    main()
