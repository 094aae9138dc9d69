"""Workers on other machines as the front process holds them: their agents join here, are asked for a worker,
and are taken for dead, worker and all, when their connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from connectors.link import Link
from contracts.version import VERSION
from stages.agent_messages import (
    Declined,
    Ended,
    FromAgent,
    Join,
    Kill,
    Refused,
    Start,
    Welcome,
    from_agent,
    tell,
)

logger = logging.getLogger(__name__)

GREETING_BYTES = 1 << 16  # no frame of a stranger is longer
MAX_STRANGERS = 64
KILL_LIMIT_S = 5.0  # an agent that has not ended its worker by then is taken for dead


class RemoteProcess:
    """One life of a worker. `pid`: on its machine, 0 until it has said so; `on_exit` is called once."""

    def __init__(self, setup: bytes, on_exit: Callable[[], None], kill: Callable[[], None]) -> None:
        self.setup = setup
        self.pid = 0
        self.kill = kill
        self._on_exit: Callable[[], None] | None = on_exit

    def gone(self) -> None:
        if self._on_exit is not None:
            on_exit, self._on_exit = self._on_exit, None
            on_exit()


class RemotePlace:
    """Where the worker of that name runs: wherever its agent is. Has the methods of `ForkServer`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._link: Link | None = None
        self._process: RemoteProcess | None = None

    @property
    def is_taken(self) -> bool:
        return self._link is not None

    def fork(self, name: str, setup: bytes, fds: Sequence[int], on_exit: Callable[[], None]) -> RemoteProcess:
        """Waits for an agent when none is there."""
        assert name == self._name
        assert not fds, "nothing is inherited across machines"
        self._process = RemoteProcess(setup, on_exit, self._kill_worker)
        if self._link is not None:
            tell(self._link, Start(setup))
        return self._process

    def joined(self, link: Link) -> None:
        self._link = link
        link.watch(self._heard)
        tell(link, Welcome())
        logger.info("the agent of worker %s has joined from %s", self._name, link.peer_host)
        if self._process is not None:
            tell(link, Start(self._process.setup))

    def kill(self) -> None:
        """Lets the agent go, which ends its worker, and may join again."""
        self._part_from_agent()
        self._end_process()

    def _part_from_agent(self) -> None:
        """The worker that is wanted waits for the next agent."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def stop(self) -> None:
        self.kill()

    def _kill_worker(self) -> None:
        process = self._process
        if self._link is None:
            return
        tell(self._link, Kill())
        loop = asyncio.get_running_loop()
        loop.call_later(KILL_LIMIT_S, lambda: self.kill() if self._process is process else None)

    def _heard(self) -> None:
        link = self._link
        if link is None:
            return
        try:
            messages = from_agent(link)
        except msgspec.DecodeError as error:
            logger.error("the agent of worker %s cannot be understood: %s", self._name, error)
            self.kill()
            return
        for message in messages:
            match message:
                case Ended():
                    self._end_process()
                case Declined(reason):
                    logger.error("worker %s cannot run at %s: %s", self._name, link.peer_host, reason)
                    self._part_from_agent()
                    return
        if self._link is not None and self._link.is_ended:
            logger.error("the agent of worker %s is gone", self._name)
            self.kill()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.gone()


class Rendezvous:
    """Where agents join. A token keeps strangers out; nothing is encrypted: the network must be trusted."""

    def __init__(self, address: str, port: int, token: str, names: Sequence[str]) -> None:
        self.address = address
        self.places = {name: RemotePlace(name) for name in names}
        self.token = token
        self._strangers: list[Link] = []
        self._listener = socket.create_server((address, port))
        self._listener.setblocking(False)

    @property
    def endpoint(self) -> str:
        """What agents are to connect to."""
        return f"tcp://{self.address}:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        for name in self.places:
            command = f"omnistage worker --connect {self.endpoint} --name {name}"
            logger.info("worker %s is to be started on its machine: %s", name, command)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for link in self._strangers:
            link.close()
        for place in self.places.values():
            place.stop()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            stream, _ = self._listener.accept()
            link = Link(stream, GREETING_BYTES)
            self._strangers.append(link)
            link.watch(partial(self._heard, link))
        for oldest in self._strangers[:-MAX_STRANGERS]:
            self._strangers.remove(oldest)
            oldest.close()

    def _heard(self, link: Link) -> None:
        try:
            messages = from_agent(link)
        except msgspec.DecodeError:
            messages = []
        else:
            if not messages and not link.is_ended:
                return  # a part of a greeting
        self._strangers.remove(link)
        link.unwatch()
        refusal = self._refusal(messages[0]) if messages else Refused("no greeting", final=True)
        if refusal is None and isinstance(messages[0], Join):
            self.places[messages[0].name].joined(link)
            return
        if refusal is not None and not link.is_ended:
            logger.error("an agent is refused: %s", refusal.reason)
            tell(link, refusal)
        link.close()

    def _refusal(self, first: FromAgent) -> Refused | None:
        if not isinstance(first, Join) or not secrets.compare_digest(
            first.token.encode(), self.token.encode()
        ):
            return Refused("the token is another one", final=True)
        if first.version != VERSION:
            return Refused(f"its omnistage is version {first.version}, this one {VERSION}", final=True)
        if first.name not in self.places:
            known = ", ".join(self.places)
            return Refused(f"no worker {first.name!r} is wanted, only {known}", final=True)
        if self.places[first.name].is_taken:
            return Refused(f"worker {first.name!r} has an agent", final=False)
        return None
