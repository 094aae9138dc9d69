"""Supervisor: starts worker processes, watches them by pidfd and heartbeat, restarts the dead."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import zmq

from contracts.messages import Encode, FromStage, Listen, StageFailed, StageReady, StageStats, ToStage
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
from stages.control_socket import ControlSocket
from stages.edges import ArenaDescription, EdgeEnd
from stages.encoder_stage import FeatureReader, no_arena
from stages.options import ServeOptions, for_machine
from stages.remote_workers import RemotePlace, RemoteProcess, Rendezvous
from stages.service import WorkerInfo
from stages.worker_processes import ForkServer, WorkerProcess

logger = logging.getLogger(__name__)

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
    max_hurried_restarts: int = 3  # within it; a later start leaves nothing for later
    max_failed_starts: int = 5  # in a row, of a worker that dies before it is ready; then it stays down
    failed_start_pause_s: float = 0.5  # doubled at each further one: what it needs may be free again soon


@dataclass(frozen=True)
class WorkerSpec:
    name: str
    stages: tuple[str, ...]
    devices: tuple[str, ...]
    edges: tuple[EdgeEnd, ...]
    threads: int
    fds: tuple[int, ...]  # inherited
    host: str = ""  # another machine, where its agent starts it


@dataclass(eq=False)
class _Worker:
    spec: WorkerSpec
    token: str = ""
    process: WorkerProcess | RemoteProcess | None = None
    identity: bytes | None = None  # of its ZMQ connection; None until Hello
    state: WorkerState = "starting"
    was_ready: bool = False  # in any of its lives
    restarts: int = 0
    hurries: bool = False  # its next start: requests may wait for it
    restart_times: list[float] = field(default_factory=list)
    failed_starts: int = 0  # in a row
    timer: asyncio.TimerHandle | None = None  # when it counts as hung, or is to be started again
    unsent: list[tuple[str, ToStage]] = field(default_factory=list)  # for its stages, until Hello
    kv_blocks: dict[str, int] = field(default_factory=dict)  # by stage, as measured by the first start
    ready_stages: set[str] = field(default_factory=set)
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """All methods on the front process's loop. `on_lost(stages)` is called when a worker is gone, after its
    edges were reset by the caller's hook and before its replacement starts. `checkpoint`: its fingerprint,
    for workers on other machines. `forks`: a fork server that has been started already; the supervisor's from
    now on."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        options: ServeOptions,
        arena: ArenaDescription | None,
        *,
        deliver: Callable[[list[FromStage]], None],
        on_lost: Callable[[WorkerSpec, bool], None],
        config: SupervisorConfig | None = None,
        rendezvous: Rendezvous | None = None,
        checkpoint: str = "",
        read: FeatureReader = no_arena,
        forks: ForkServer | None = None,
    ) -> None:
        self._rendezvous = rendezvous
        self._checkpoint = checkpoint
        self._read = read
        self._config = config or SupervisorConfig()
        self._options = options
        self._arena = arena
        self._deliver = deliver
        self._on_lost = on_lost
        self._workers = {spec.name: _Worker(spec) for spec in specs}
        self._worker_of = {stage: worker for worker in self._workers.values() for stage in worker.spec.stages}
        self._by_identity: dict[bytes, _Worker] = {}
        self._socket: ControlSocket | None = None
        self._stopping = False
        self._fork_server = forks or ForkServer()
        # An abstract socket leaves no file behind; the token keeps strangers of this host out.
        self._endpoint = f"ipc://@omnistage-{os.getpid()}-{secrets.token_hex(8)}"

    async def start(self) -> None:
        self._socket = ControlSocket(zmq.ROUTER, self._take)
        self._socket.bind(self._endpoint)
        self._remote_endpoint = ""
        if self._rendezvous is not None:
            self._remote_endpoint = self._socket.bind(f"tcp://{self._rendezvous.address}:*")
            self._rendezvous.start()
        self._socket.start()
        if not self._fork_server.pid:
            self._fork_server.start()
        for worker in self._workers.values():
            self._spawn(worker)

    def send(self, stage: str, message: ToStage) -> None:
        worker = self._worker_of[stage]
        if (
            worker.spec.host
            and isinstance(message, Encode | Listen)
            and (ref := message.item.features) is not None
        ):
            message = msgspec.structs.replace(message, features=self._read(ref).tobytes())
        if worker.identity is None:
            worker.unsent.append((stage, message))
        else:
            self._send(worker.identity, ToWorker([(stage, message)]))

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
        asked = []
        for worker in self._workers.values():
            self._cancel_timer(worker)
            if worker.identity is not None:
                self._send(worker.identity, StopWorker())
                asked.append(worker)
        try:
            async with asyncio.timeout(self._config.stop_grace_s):
                await asyncio.gather(*(worker.exited.wait() for worker in asked))
        except TimeoutError:
            late = ", ".join(worker.spec.name for worker in asked if not worker.exited.is_set())
            logger.warning("workers that did not stop in time are killed: %s", late)
        self._fork_server.stop()
        if self._rendezvous is not None:
            self._rendezvous.close()
        await asyncio.gather(*(w.exited.wait() for w in self._workers.values() if w.process is not None))
        if self._socket is not None:
            self._socket.close()

    # --- processes ------------------------------------------------------------------------------------------

    def _spawn(self, worker: _Worker) -> None:
        from stages.worker_main import WorkerSetup

        spec = worker.spec
        worker.token = secrets.token_hex(16)
        arena = None if spec.host else self._arena
        setup = WorkerSetup(
            name=spec.name,
            stages=spec.stages,
            endpoint=self._remote_endpoint if spec.host else self._endpoint,
            token=worker.token,
            options=for_machine(self._options, spec.host),
            edges=spec.edges,
            arena=arena,
            threads=spec.threads,
            heartbeat_s=self._config.heartbeat_s,
            kv_blocks=worker.kv_blocks,
            again=worker.hurries,
            checkpoint=self._checkpoint if spec.host else "",
        )
        fds = spec.fds + ((arena.fd,) if arena is not None else ())
        worker.exited.clear()
        worker.process = self._place_of(worker).fork(
            spec.name, msgspec.json.encode(setup, enc_hook=str), fds, lambda: self._exited(worker)
        )
        self._set_timer(worker, self._config.start_limit_s, self._hung)

    def _place_of(self, worker: _Worker) -> ForkServer | RemotePlace:
        if not worker.spec.host:
            return self._fork_server
        assert self._rendezvous is not None, f"worker {worker.spec.name} is on {worker.spec.host}"
        return self._rendezvous.places[worker.spec.name]

    def _exited(self, worker: _Worker) -> None:
        assert worker.process is not None
        self._cancel_timer(worker)
        if worker.identity is not None:
            self._by_identity.pop(worker.identity, None)
        worker.identity = None
        worker.unsent.clear()
        worker.ready_stages.clear()
        worker.exited.set()
        if self._stopping:
            worker.state = "stopped"
            return
        logger.error("worker %s (pid %d) is gone", worker.spec.name, worker.process.pid)
        worker.failed_starts = 0 if worker.state == "ready" else worker.failed_starts + 1
        self._restart(worker)

    def _restart(self, worker: _Worker) -> None:
        config, now = self._config, time.monotonic()
        recent = [t for t in worker.restart_times if now - t < config.restart_window_s]
        worker.restart_times = [*recent, now]
        again = len(recent) < config.max_restarts and worker.failed_starts < config.max_failed_starts
        worker.state = "restarting" if again else "failed"
        self._on_lost(worker.spec, again)
        if not again:
            logger.error("worker %s died too often and stays down", worker.spec.name)
            return
        worker.restarts += 1
        worker.hurries = worker.was_ready and len(recent) < config.max_hurried_restarts
        if worker.failed_starts == 0:
            self._spawn(worker)
        else:
            pause_s = config.failed_start_pause_s * 2 ** (worker.failed_starts - 1)
            self._set_timer(worker, pause_s, self._spawn)

    def _set_timer(self, worker: _Worker, seconds: float, then: Callable[[_Worker], None]) -> None:
        self._cancel_timer(worker)
        worker.timer = asyncio.get_running_loop().call_later(seconds, then, worker)

    def _cancel_timer(self, worker: _Worker) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None

    def _hung(self, worker: _Worker) -> None:
        if worker.process is None or worker.exited.is_set():
            return
        if worker.process.pid == 0:
            logger.error("nothing gives a worker %s, and what should have is begun afresh", worker.spec.name)
            self._place_of(worker).kill()
            return
        logger.error("worker %s (pid %d) hangs and is killed", worker.spec.name, worker.process.pid)
        worker.process.kill()

    # --- messages -------------------------------------------------------------------------------------------

    def _send(self, identity: bytes, message: ControlToWorker) -> None:
        if self._socket is not None and identity in self._by_identity:
            self._socket.send(identity, encode(message))

    def _take(self, frames: list[bytes]) -> None:
        identity, *content = frames
        try:
            message = decode_from_worker(b"".join(content))
        except msgspec.DecodeError as error:
            logger.error("a control message cannot be read and is dropped: %s", error)
            return
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
                    self._set_timer(worker, self._config.hang_after_s, self._hung)
            case FromWorker(messages):
                self._note_ready(worker, messages)
                self._deliver(self._without_failures(worker, messages))

    def _without_failures(self, worker: _Worker, messages: list[FromStage]) -> list[FromStage]:
        """A stage that fails takes its worker down, to be started again. Only where it never ran is the
        failure everybody's: its reason then says what to change."""
        if not worker.was_ready:
            return messages
        failures = [m for m in messages if isinstance(m, StageFailed)]
        if failures and worker.process is not None:
            worker.process.kill()
        return [m for m in messages if not isinstance(m, StageFailed)]

    def _greeted(self, identity: bytes, hello: Hello) -> None:
        worker = self._workers.get(hello.worker)
        if worker is None or not secrets.compare_digest(worker.token, hello.token):
            logger.error("a stranger spoke to the control socket and is ignored")
            return
        if isinstance(worker.process, RemoteProcess):
            worker.process.pid = hello.pid
        worker.identity = identity
        self._by_identity[identity] = worker
        if worker.unsent:
            self._send(identity, ToWorker(list(worker.unsent)))
            worker.unsent.clear()

    def _note_ready(self, worker: _Worker, messages: Sequence[FromStage]) -> None:
        if worker.state == "ready":
            return
        for message in messages:
            if isinstance(message, StageStats) and (blocks := message.values.get("num_kv_blocks")):
                worker.kv_blocks[message.stage] = int(blocks)
        worker.ready_stages.update(m.stage for m in messages if isinstance(m, StageReady))
        if worker.ready_stages >= set(worker.spec.stages):
            worker.state = "ready"
            worker.was_ready = True
            self._set_timer(worker, self._config.hang_after_s, self._hung)
