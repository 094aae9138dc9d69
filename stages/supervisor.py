"""Supervisor: starts worker processes, watches them by pidfd and heartbeat, restarts the dead."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from contracts.messages import FromStage, ToStage
from stages.control import (
    ControlToWorker,
    FromWorker,
    Heartbeat,
    Hello,
    StopWorker,
    ToWorker,
    decode_from_worker,
    encode,
)
from stages.edges import ArenaDescription, EdgeEnd
from stages.mailbox import Mailbox
from stages.options import ServeOptions
from stages.service import WorkerInfo

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
WorkerState = Literal["starting", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True)
class SupervisorConfig:
    """`hang_after_s`: a worker whose heartbeat (or whose step) is later than this is killed and restarted."""

    heartbeat_s: float = 1.0
    hang_after_s: float = 10.0
    step_limit_s: float = 120.0
    start_limit_s: float = 600.0
    stop_grace_s: float = 10.0
    max_restarts: int = 20  # within `restart_window_s`; then the worker stays down
    restart_window_s: float = 300.0


@dataclass(frozen=True)
class WorkerSpec:
    name: str
    stages: tuple[str, ...]
    devices: tuple[str, ...]
    edges: tuple[EdgeEnd, ...]
    threads: int
    fds: tuple[int, ...]  # inherited


@dataclass(eq=False)
class _Worker:
    spec: WorkerSpec
    token: str = ""
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    identity: bytes | None = None  # of its ZMQ connection; None until Hello
    state: WorkerState = "starting"
    restarts: int = 0
    restart_times: list[float] = field(default_factory=list)
    deadline: asyncio.TimerHandle | None = None
    unsent: list[tuple[str, ToStage]] = field(default_factory=list)  # for its stages, until Hello
    ready_stages: set[str] = field(default_factory=set)
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """All methods on the front process's loop. `on_lost(stages)` is called when a worker is gone, after its
    edges were reset by the caller's hook and before its replacement starts."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        options: ServeOptions,
        arena: ArenaDescription | None,
        *,
        deliver: Callable[[list[FromStage]], None],
        on_lost: Callable[[WorkerSpec, bool], None],
        config: SupervisorConfig | None = None,
    ) -> None:
        self._config = config or SupervisorConfig()
        self._options = options
        self._arena = arena
        self._deliver = deliver
        self._on_lost = on_lost
        self._workers = {spec.name: _Worker(spec) for spec in specs}
        self._worker_of = {stage: worker for worker in self._workers.values() for stage in worker.spec.stages}
        self._by_identity: dict[bytes, _Worker] = {}
        self._outbox: Mailbox[tuple[bytes, ControlToWorker]] = Mailbox()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        # An abstract socket leaves no file behind; the token keeps strangers of this host out.
        self._endpoint = f"ipc://@omnistage-{os.getpid()}-{secrets.token_hex(8)}"

    async def start(self) -> None:
        self._outbox.bind()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(self._endpoint)
        self._tasks = [
            asyncio.create_task(self._send_all()),
            asyncio.create_task(self._receive_all()),
        ]
        for worker in self._workers.values():
            self._spawn(worker)

    def send(self, stage: str, message: ToStage) -> None:
        worker = self._worker_of[stage]
        if worker.identity is None:
            worker.unsent.append((stage, message))
        else:
            self._outbox.put((worker.identity, ToWorker([(stage, message)])))

    def infos(self) -> tuple[WorkerInfo, ...]:
        return tuple(
            WorkerInfo(
                name=w.spec.name,
                stages=w.spec.stages,
                pid=w.process.pid if w.process is not None else 0,
                devices=w.spec.devices,
                state=w.state,
                restarts=w.restarts,
            )
            for w in self._workers.values()
        )

    async def stop(self) -> None:
        """Asks every worker to end, kills those that do not, returns when all are reaped."""
        self._stopping = True
        for worker in self._workers.values():
            self._set_deadline(worker, None)
            if worker.identity is not None:
                self._outbox.put((worker.identity, StopWorker()))
            elif worker.process is not None:
                worker.process.kill()
        waits = [w.exited.wait() for w in self._workers.values() if w.process is not None]
        try:
            async with asyncio.timeout(self._config.stop_grace_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            for worker in self._workers.values():
                if worker.process is not None and not worker.exited.is_set():
                    logger.warning("worker %s did not stop in time and is killed", worker.spec.name)
                    worker.process.kill()
            await asyncio.gather(*(w.exited.wait() for w in self._workers.values() if w.process is not None))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._socket.close(linger=0)
            self._context.term()

    # --- processes ------------------------------------------------------------------------------------------

    def _spawn(self, worker: _Worker) -> None:
        from stages.worker_main import WorkerSetup

        spec = worker.spec
        worker.token = secrets.token_hex(16)
        setup = WorkerSetup(
            name=spec.name,
            stages=spec.stages,
            endpoint=self._endpoint,
            token=worker.token,
            parent_pid=os.getpid(),
            options=self._options,
            edges=spec.edges,
            arena=self._arena,
            threads=spec.threads,
            heartbeat_s=self._config.heartbeat_s,
        )
        argument = msgspec.json.encode(setup, enc_hook=str).decode()
        fds = spec.fds + ((self._arena.fd,) if self._arena is not None else ())
        command = [sys.executable, "-m", "stages.worker_main", argument]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        worker.process = subprocess.Popen(command, pass_fds=fds, env=environment)
        worker.exited.clear()
        worker.pidfd = os.pidfd_open(worker.process.pid)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._exited, worker)
        self._set_deadline(worker, self._config.start_limit_s)

    def _exited(self, worker: _Worker) -> None:
        assert worker.process is not None
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        status = worker.process.wait()
        self._set_deadline(worker, None)
        if worker.identity is not None:
            self._by_identity.pop(worker.identity, None)
        worker.identity = None
        worker.unsent.clear()
        worker.ready_stages.clear()
        worker.exited.set()
        if self._stopping:
            worker.state = "stopped"
            return
        logger.error("worker %s (pid %d) ended with status %d", worker.spec.name, worker.process.pid, status)
        self._restart(worker)

    def _restart(self, worker: _Worker) -> None:
        now = time.monotonic()
        window = self._config.restart_window_s
        worker.restart_times = [t for t in worker.restart_times if now - t < window] + [now]
        again = len(worker.restart_times) <= self._config.max_restarts
        worker.state = "restarting" if again else "failed"
        self._on_lost(worker.spec, again)
        if again:
            worker.restarts += 1
            self._spawn(worker)
        else:
            logger.error("worker %s died too often and stays down", worker.spec.name)

    def _set_deadline(self, worker: _Worker, seconds: float | None) -> None:
        if worker.deadline is not None:
            worker.deadline.cancel()
            worker.deadline = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            worker.deadline = loop.call_later(seconds, self._hung, worker)

    def _hung(self, worker: _Worker) -> None:
        if worker.process is None or worker.exited.is_set():
            return
        logger.error("worker %s (pid %d) hangs and is killed", worker.spec.name, worker.process.pid)
        worker.process.send_signal(signal.SIGKILL)

    # --- messages -------------------------------------------------------------------------------------------

    async def _send_all(self) -> None:
        while True:
            for identity, message in await self._outbox.drain():
                if identity in self._by_identity:
                    await self._socket.send_multipart([identity, encode(message)])

    async def _receive_all(self) -> None:
        while True:
            identity, frame = await self._socket.recv_multipart()
            try:
                message = decode_from_worker(frame)
            except msgspec.DecodeError as error:
                logger.error("a control message cannot be read and is dropped: %s", error)
                continue
            self._received(identity, message)

    def _received(self, identity: bytes, message: Hello | FromWorker | Heartbeat) -> None:
        if isinstance(message, Hello):
            self._greeted(identity, message)
            return
        worker = self._by_identity.get(identity)
        if worker is None:
            return  # a stranger, or what a dead worker had still under way
        match message:
            case Heartbeat(busy_s):
                if busy_s and max(busy_s.values()) > self._config.step_limit_s:
                    self._hung(worker)
                elif worker.state == "ready":
                    self._set_deadline(worker, self._config.hang_after_s)
            case FromWorker(messages):
                self._note_ready(worker, messages)
                self._deliver(messages)

    def _greeted(self, identity: bytes, hello: Hello) -> None:
        worker = self._workers.get(hello.worker)
        if worker is None or not secrets.compare_digest(worker.token, hello.token):
            logger.error("a stranger spoke to the control socket and is ignored")
            return
        worker.identity = identity
        self._by_identity[identity] = worker
        if worker.unsent:
            self._outbox.put((identity, ToWorker(list(worker.unsent))))
            worker.unsent.clear()

    def _note_ready(self, worker: _Worker, messages: Sequence[FromStage]) -> None:
        from contracts.messages import StageReady

        if worker.state == "ready":
            return
        worker.ready_stages.update(m.stage for m in messages if isinstance(m, StageReady))
        if worker.ready_stages >= set(worker.spec.stages):
            worker.state = "ready"
            self._set_deadline(worker, self._config.hang_after_s)
