"""A worker process: hosts the shells of its stages, one thread each, and speaks to the front process over
ZMQ."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from functools import partial

import msgspec
import torch
import zmq

from contracts.messages import FromStage, StageReady
from stages.compile_ahead import start_compiling
from stages.control import FromWorker, Heartbeat, Hello, StopWorker, decode_to_worker, encode
from stages.control_socket import ControlSocket
from stages.deployment import num_cores
from stages.edges import ArenaDescription, EdgeEnd, open_arena, open_edge_ends
from stages.encoder_stage import no_arena
from stages.event_loops import loop_factory
from stages.local_worker import LocalWorker
from stages.mailbox import Mailbox
from stages.options import SWITCH_INTERVAL_S, ServeOptions
from stages.planning import make_plan
from stages.stage_logics import make_shells


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs; descriptors named in it are inherited."""

    name: str
    stages: tuple[str, ...]
    endpoint: str
    token: str
    options: ServeOptions
    edges: tuple[EdgeEnd, ...]
    arena: ArenaDescription | None
    threads: int  # 0: as many as there are cores
    heartbeat_s: float
    kv_blocks: dict[str, int]  # stage → what an earlier life of this worker has measured
    again: bool = False  # it replaces one that was ready
    checkpoint: str = ""  # fingerprint of the front's, for a worker on another machine
    address: str = ""  # of this machine, as the others reach it; "": the route's own


class _Worker:
    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._outbox: Mailbox[FromStage] = Mailbox()
        plan = make_plan(setup.options, check_memory=False, check_weights=False)  # the front process did
        plan = plan.with_kv_blocks(setup.kv_blocks)
        if setup.again:
            plan = plan.starting_again()
        compiled = start_compiling(plan, setup.stages, setup.threads or num_cores())
        senders, receivers = open_edge_ends(setup.edges, setup.address)
        read = open_arena(setup.arena) if setup.arena is not None else no_arena
        self._shells = make_shells(
            plan, setup.stages, senders, receivers, read, self._outbox.put_all, compiled
        )
        self._local = LocalWorker(self._shells)

    async def run(self) -> None:
        self._outbox.bind()
        ended = asyncio.get_running_loop().create_future()
        socket = ControlSocket(zmq.DEALER, partial(self._take, ended))
        socket.connect(self._setup.endpoint)
        socket.start()
        try:
            socket.send(encode(Hello(self._setup.name, self._setup.token, os.getpid())))
            self._local.start()
            tasks = [asyncio.create_task(self._send_all(socket)), asyncio.create_task(self._beat(socket))]
            await ended
            await self._local.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            socket.close()

    def _take(self, ended: asyncio.Future[None], frames: list[bytes]) -> None:
        """`ended` is done with StopWorker."""
        if ended.done():
            return
        try:
            message = decode_to_worker(frames[0])
        except msgspec.DecodeError as error:
            ended.set_exception(error)
            return
        if isinstance(message, StopWorker):
            ended.set_result(None)
            return
        for stage, content in message.messages:
            self._local.send(stage, content)

    async def _send_all(self, socket: ControlSocket) -> None:
        while True:
            messages = await self._outbox.drain()
            if any(isinstance(message, StageReady) for message in messages):
                gc.freeze()  # what a stage is made of stays, and need not be looked through again
            socket.send(encode(FromWorker(messages)))

    async def _beat(self, socket: ControlSocket) -> None:
        while True:
            await asyncio.sleep(self._setup.heartbeat_s)
            now = time.monotonic()
            started = {shell.name: shell.step_started_s for shell in self._shells}
            busy = {name: now - since for name, since in started.items() if since is not None}
            socket.send(encode(Heartbeat(busy)))


def run(setup_json: bytes) -> None:
    """The whole life of a worker, in a process of its own."""
    setup = decode_setup(setup_json)
    form = f"%(asctime)s %(levelname)s {setup.name}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
    torch.set_num_threads(setup.threads or num_cores())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_Worker(setup).run())


def decode_setup(setup_json: bytes) -> WorkerSetup:
    return msgspec.json.decode(setup_json, type=WorkerSetup, dec_hook=_decode_path)


def _decode_path(kind: type, value: object) -> object:
    return kind(value)
