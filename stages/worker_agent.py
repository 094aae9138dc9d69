"""The agent of a worker on another machine: joins the front process, runs the worker it is asked for in a
process of its own, and ends it with the connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from connectors.link import Link, connect
from contracts.errors import EngineError, OmnistageError
from contracts.version import VERSION
from stages.agent_messages import Declined, Ended, Join, Kill, Refused, Start, Welcome, tell, to_agent
from stages.fingerprint import checkpoint_fingerprint
from stages.worker_processes import ForkServer, WorkerProcess

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # between tries to reach a front process that is not there
GREETING_LIMIT_S = 30.0  # for a front process's first word; it may be reading its checkpoint
WAIT_S = 600.0
STRANGERS = {  # by how they begin
    b"HTTP/": "is an HTTP server",
    b"SSH-": "is an ssh server",
    b"\x15\x03": "wants TLS",
    b"\xff\x00\x00\x00": "is a ZeroMQ socket",
}
WHERE = "want the address that the server logs for its workers (`cluster.port`, not the port of its API)"


@dataclass(frozen=True)
class AgentOptions:
    """`host` and `port`: where the front process listens. `model`: where this machine has the checkpoint,
    when
    elsewhere than the front's. `address`: of this machine, as the others reach it, when it has several.
    `wait_s`: how long a front process that is not there yet, or not any more, is waited for."""

    host: str
    port: int
    name: str
    token: str
    model: Path | None = None
    address: str = ""
    wait_s: float = WAIT_S

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"


async def run_agent(options: AgentOptions) -> None:
    """Serves one front process after another, until it is cancelled. EngineError when it is refused, when
    none answers for `wait_s`, and at once when somebody else does."""
    patience = _Patience(options)
    while True:
        try:
            link = await asyncio.to_thread(connect, options.host, options.port, options.address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            await patience.again(f"nobody answers at {options.endpoint}: {reason}")
            continue
        session = _Session(options, link)
        try:
            await session.run()
        finally:
            session.close()
        if not session.was_greeted:
            await patience.again(f"{options.endpoint} ends the connection without a word")
            continue
        patience = _Patience(options)
        if not session.was_refused:
            logger.warning("the front process is gone, and worker %s with it", options.name)
        await asyncio.sleep(RETRY_S)


class _Patience:
    """With a front process that is not there. Each new reason is told once."""

    def __init__(self, options: AgentOptions) -> None:
        self._wait_s = options.wait_s
        self._ends_s = asyncio.get_running_loop().time() + options.wait_s
        self._told = ""

    async def again(self, reason: str) -> None:
        """Returns when another try is due. EngineError when none is."""
        left_s = self._ends_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise EngineError(f"{reason}, for {self._wait_s:g} s; {WHERE}")
        if reason != self._told:
            logger.warning("%s; trying again for %.0f s", reason, left_s)
        self._told = reason
        await asyncio.sleep(min(RETRY_S, left_s))


class _Session:
    """One connection to a front process."""

    def __init__(self, options: AgentOptions, link: Link) -> None:
        self._options = options
        self._link = link
        self._forks = ForkServer()
        self._worker: WorkerProcess | None = None
        self._refused: Refused | None = None
        self.was_greeted = False
        self._garbled = False  # frames came that are none of ours
        self._answered = asyncio.Event()  # greeted, refused, or over before that
        self._over = asyncio.Event()

    async def run(self) -> None:
        """EngineError when it is refused for good, and when what answers is no front process."""
        tell(self._link, Join(self._options.token, self._options.name, VERSION))
        self._link.watch(self._heard)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GREETING_LIMIT_S):
                await self._answered.wait()
        if not self.was_greeted:
            self._check_stranger()
            return
        await self._over.wait()
        if self._refused is not None and self._refused.final:
            raise EngineError(f"worker {self._options.name} is refused: {self._refused.reason}")

    @property
    def was_refused(self) -> bool:
        return self._refused is not None

    def close(self) -> None:
        self._link.close()
        self._forks.stop()

    def _check_stranger(self) -> None:
        """Who only hangs up may be a front process that ends."""
        said = self._link.leftover
        if self._garbled:
            what = "answers what no server of omnistage does"
        elif said:
            what = next((who for start, who in STRANGERS.items() if said.startswith(start)), f"says {said!r}")
        elif not self._link.is_ended:
            what = f"takes the connection and says nothing for {GREETING_LIMIT_S:g} s"
        else:
            return
        raise EngineError(f"{self._options.endpoint} is no omnistage server's: it {what}; {WHERE}")

    def _heard(self) -> None:
        try:
            messages = to_agent(self._link)
        except msgspec.DecodeError:
            self._garbled = True
            self._link.close()
            messages = []
        for message in messages:
            self.was_greeted = True
            match message:
                case Welcome():
                    self._forks.start()  # which takes seconds; the order to use it may be behind
                case Start(setup):
                    self._start(setup)
                case Kill():
                    self._kill()
                case Refused():
                    self._refused = message
                    logger.error("refused: %s", message.reason)
        if self._link.is_ended:
            self._over.set()
        if self.was_greeted or self._link.is_ended:
            self._answered.set()

    def _start(self, setup_json: bytes) -> None:
        from stages.planning import model_folder
        from stages.worker_main import decode_setup

        setup = decode_setup(self._made_local(setup_json))
        folder = setup.options.model
        try:
            folder = model_folder(setup.options)
            same = checkpoint_fingerprint(folder) == setup.checkpoint
            reason = "" if same else f"the checkpoint in {folder} is another one than the front process has"
        except OSError as error:
            reason = f"the checkpoint in {folder} cannot be read: {error.strerror}"
        except OmnistageError as error:
            reason = error.message
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
