"""The agent of a worker on another machine: joins the front process, runs the worker it is asked for in a
process of its own, and ends it with the connection."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from connectors.link import Link, connect
from contracts.errors import EngineError
from contracts.version import VERSION
from stages.agent_messages import Declined, Ended, Join, Kill, Refused, Start, tell, to_agent
from stages.fingerprint import checkpoint_fingerprint
from stages.worker_processes import ForkServer, WorkerProcess

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # between tries to reach a front process that is not there


@dataclass(frozen=True)
class AgentOptions:
    """`host` and `port`: where the front process listens. `model`: where this machine has the checkpoint,
    when
    elsewhere than the front's. `address`: of this machine, as the others reach it, when it has several."""

    host: str
    port: int
    name: str
    token: str
    model: Path | None = None
    address: str = ""


async def run_agent(options: AgentOptions) -> None:
    """Serves one front process after another, until it is cancelled. EngineError when it is refused."""
    while True:
        link = await _reach(options)
        session = _Session(options, link)
        try:
            await session.run()
        finally:
            session.close()
        if not session.was_refused:
            logger.warning("the front process is gone, and worker %s with it", options.name)
        await asyncio.sleep(RETRY_S)


async def _reach(options: AgentOptions) -> Link:
    told = False
    while True:
        try:
            return await asyncio.to_thread(connect, options.host, options.port, options.address)
        except OSError as error:
            if not told:
                logger.info("nobody answers at %s:%d yet: %s", options.host, options.port, error)
            told = True
            await asyncio.sleep(RETRY_S)


class _Session:
    """One connection to a front process."""

    def __init__(self, options: AgentOptions, link: Link) -> None:
        self._options = options
        self._link = link
        self._forks = ForkServer()
        self._worker: WorkerProcess | None = None
        self._refused: Refused | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        tell(self._link, Join(self._options.token, self._options.name, VERSION))
        self._link.watch(self._heard)
        self._forks.start()
        await self._over.wait()
        if self._refused is not None and self._refused.final:
            raise EngineError(f"worker {self._options.name} is refused: {self._refused.reason}")

    @property
    def was_refused(self) -> bool:
        return self._refused is not None

    def close(self) -> None:
        self._link.close()
        self._forks.stop()

    def _heard(self) -> None:
        for message in to_agent(self._link):
            match message:
                case Start(setup):
                    self._start(setup)
                case Kill():
                    self._kill()
                case Refused():
                    self._refused = message
                    logger.error("refused: %s", message.reason)
        if self._link.is_ended:
            self._over.set()

    def _start(self, setup_json: bytes) -> None:
        from stages.planning import model_folder
        from stages.worker_main import decode_setup

        setup = decode_setup(self._made_local(setup_json))
        folder = model_folder(setup.options)
        try:
            same = checkpoint_fingerprint(folder) == setup.checkpoint
            reason = "" if same else f"the checkpoint in {folder} is another one than the front process has"
        except OSError as error:
            reason = f"the checkpoint in {folder} cannot be read: {error.strerror}"
        if reason:
            tell(self._link, Declined(reason))
            self._refused = Refused(reason, final=True)
            self._over.set()
            return
        logger.info("starting worker %s", self._options.name)
        content = msgspec.json.encode(setup, enc_hook=str)
        self._worker = self._forks.fork(self._options.name, content, (), self._ended)

    def _kill(self) -> None:
        if self._worker is not None and self._worker.pid:
            self._worker.kill()
        else:
            self._forks.kill()

    def _ended(self) -> None:
        self._worker = None
        tell(self._link, Ended())

    def _made_local(self, setup_json: bytes) -> bytes:
        from stages.worker_main import WorkerSetup, decode_setup

        setup: WorkerSetup = decode_setup(setup_json)
        if self._options.model is not None:
            options = replace(setup.options, model=self._options.model)
            setup = msgspec.structs.replace(setup, options=options)
        setup = msgspec.structs.replace(setup, address=self._options.address)
        return msgspec.json.encode(setup, enc_hook=str)
