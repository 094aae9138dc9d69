"""This process's NIXL agent: registers memory, reads the memory of peers, on a thread that sleeps while
nothing is under way."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from connectors.wire import Memory
from contracts.errors import EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")
EXTRA = "install the extra: pip install 'omnistage[nixl]'"

# While something is under way the thread looks again at once for a while, then less and less often.
SPIN_S, NAP_S = 0.005, 0.0002
PATIENT_S, LONG_NAP_S = 0.5, 0.002
READ_LIMIT_S = 30.0  # of a peer that neither answers nor is known to be dead


class _Handle(Protocol):
    """A transfer, a list of descriptors or a registration: NIXL's own, opaque here."""


class _Agent(Protocol):
    """What is used of `nixl_cu13.nixl_agent`, which is not typed."""

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> _Handle: ...
    def deregister_memory(self, registered: _Handle) -> None: ...
    def get_partial_agent_metadata(self, registered: _Handle, with_connection: bool) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, name: str) -> None: ...
    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> _Handle: ...
    def initialize_xfer(self, way: str, local: _Handle, remote: _Handle, peer: str) -> _Handle: ...
    def transfer(self, handle: _Handle) -> str: ...
    def check_xfer_state(self, handle: _Handle) -> str: ...
    def release_xfer_handle(self, handle: _Handle) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


@dataclass(frozen=True)
class Registration:
    """Memory that peers who were given `metadata` may read."""

    memory: Memory
    handle: _Handle
    metadata: bytes


@dataclass(frozen=True)
class _Read:
    started_s: float
    handle: _Handle
    done: Callable[[bool], None]


def _open_agent(name: str) -> tuple[_Agent, tuple[type[Exception], ...]]:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        import nixl_cu13
        from nixl_cu13 import _bindings as bindings
    except ImportError as error:
        raise EngineError(f"connector 'nixl' needs the package nixl-cu13 ({error}); {EXTRA}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    # Its own progress thread would burn a core while nothing moves.
    config = nixl_cu13.nixl_agent_config(enable_prog_thread=False)
    kinds = (
        bindings.nixlBackendError,
        bindings.nixlCancelledError,
        bindings.nixlInvalidParamError,
        bindings.nixlMismatchError,
        bindings.nixlNotAllowedError,
        bindings.nixlNotFoundError,
        bindings.nixlNotPostedError,
        bindings.nixlNotSupportedError,
        bindings.nixlRemoteDisconnectError,
        bindings.nixlRepostActiveError,
        bindings.nixlUnknownError,
        RuntimeError,  # what its C++ throws otherwise
    )
    agent: _Agent = nixl_cu13.nixl_agent(name, config)
    return agent, kinds


class NixlDriver:
    """The agent and its thread. Methods may be called from any thread; those that answer block for it.

    Without RDMA hardware UCX moves nothing unless both processes drive it, so a process whose memory is
    being read says so (`serve`) and its thread drives until it is no longer.
    """

    def __init__(self) -> None:
        self.name = f"omnistage-{os.getpid()}-{secrets.token_hex(8)}"
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reads: list[_Read] = []
        self._serving = 0
        self._kept: list[Registration] = []
        self._met: Counter[str] = Counter()  # peer → edges from it; the agent's thread's
        self._agent, self._errors = _open_agent(self.name)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a thread cut off inside UCX would abort the process

    def register(self, memory: Memory) -> Registration:
        """The memory is kept until it is deregistered."""

        def register() -> Registration:
            handle = self._agent.register_memory([(memory.address, len(memory.pages), 0, "")], "DRAM")
            return Registration(memory, handle, self._agent.get_partial_agent_metadata(handle, True))

        return self._ask(register)

    def deregister(self, registration: Registration, *, keep: bool = False) -> None:
        """`keep`: a peer may still be reading the memory, so it must stay mapped."""
        if keep:
            self._kept.append(registration)
        else:
            self._post(lambda: self._agent.deregister_memory(registration.handle))

    def meet(self, peer: str, metadata: bytes) -> None:
        """Makes a peer's registered memory known. Each call is answered by one `part`."""
        if peer == self.name:
            return

        def meet() -> None:
            self._met[peer] += 1
            self._agent.add_remote_agent(metadata)

        self._post(meet)

    def part(self, peer: str) -> None:
        if peer == self.name:
            return

        def part() -> None:
            self._met[peer] -= 1
            if not self._met[peer]:
                del self._met[peer]
                self._agent.remove_remote_agent(peer)

        self._post(part)

    def read(self, peer: str, source: int, target: int, nbytes: int, done: Callable[[bool], None]) -> None:
        """Copies the peer's memory at `source` to ours at `target`; `done(ok)` is called on the agent's
        thread."""

        def start() -> None:
            handle = self._try(lambda: self._start_read(peer, source, target, nbytes))
            if handle is None:
                done(False)
            else:
                self._reads.append(_Read(time.monotonic(), handle, done))

        self._commands.put(start)

    def serve(self, delta: int) -> None:
        """`delta` more (or fewer) reads of our memory are under way."""

        def change() -> None:
            self._serving += delta
            assert self._serving >= 0

        self._commands.put(change)

    # --- the agent's thread ---------------------------------------------------------------------------------

    def _ask(self, function: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(function())
            except self._errors as error:
                answer.set_exception(EngineError(f"NIXL: {error}"))

        self._commands.put(call)
        return answer.result()

    def _post(self, function: Callable[[], object]) -> None:
        def call() -> None:
            self._try(function)

        self._commands.put(call)

    def _stop(self) -> None:
        def stop() -> None:
            self._stopped = True

        self._commands.put(stop)
        self._thread.join()

    def _run(self) -> None:
        since = time.monotonic()
        while not self._stopped:
            if not self._reads and not self._serving:
                self._commands.get()()
                since = time.monotonic()
            while not self._commands.empty():
                self._commands.get()()
                since = time.monotonic()
            if self._reads or self._serving:
                self._drive()
                _nap(time.monotonic() - since)

    def _drive(self) -> None:
        self._try(self._agent.get_new_notifs)  # drives UCX; there are no notifications
        for read in list(self._reads):
            state = self._state_of(read)
            if state != "PROC":
                self._reads.remove(read)
                self._try(partial(self._agent.release_xfer_handle, read.handle))
                read.done(state == "DONE")

    def _state_of(self, read: _Read) -> str | None:
        if time.monotonic() - read.started_s > READ_LIMIT_S:
            logger.warning("NIXL: a read did not end in %.0f s", READ_LIMIT_S)
            return None
        return self._try(partial(self._agent.check_xfer_state, read.handle))

    def _start_read(self, peer: str, source: int, target: int, nbytes: int) -> _Handle:
        agent = self._agent
        local = agent.get_xfer_descs([(target, nbytes, 0)], "DRAM")
        remote = agent.get_xfer_descs([(source, nbytes, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", local, remote, peer)
        agent.transfer(handle)
        return handle

    def _try(self, function: Callable[[], T]) -> T | None:
        try:
            return function()
        except self._errors as error:
            logger.warning("NIXL: %s", error)
            return None


def _nap(waited_s: float) -> None:
    """Lets others run; the longer nothing ended, the longer."""
    if waited_s < SPIN_S:
        time.sleep(0)
    else:
        time.sleep(NAP_S if waited_s < PATIENT_S else LONG_NAP_S)


_lock = threading.Lock()
_driver: NixlDriver | None = None


def process_driver() -> NixlDriver:
    """The one agent of this process, opened on first use. Raises EngineError when NIXL is not installed."""
    global _driver
    with _lock:
        if _driver is None:
            _driver = NixlDriver()
        return _driver
