"""Runs the application on a socket: uvicorn with httptools, one process, a clean end on SIGTERM."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from api.gate import Gate
from api.settings import ApiSettings
from stages.start_progress import StartProgress

LAST_ANSWERS_S = 5  # for refusals that are being written when all requests have left


class ApiServer(uvicorn.Server):
    """Answers 503 until `open` brings the application. `listening` is set once connections are answered.
    Owns the listener from `serve` on."""

    def __init__(self, settings: ApiSettings, progress: StartProgress | None = None) -> None:
        self._gate = Gate(progress or StartProgress())
        super().__init__(
            uvicorn.Config(
                self._gate,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=settings.access_log,
                timeout_graceful_shutdown=LAST_ANSWERS_S,
                server_header=False,
            )
        )
        self._drain_timeout_s = settings.drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self.listening = asyncio.Event()

    def open(self, app: ASGIApp) -> None:
        self._gate.open(app)

    @property
    def is_open(self) -> bool:
        return self._gate.is_open

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def stop(self) -> None:
        """Open requests may finish for `drain_timeout_s`, while new ones are refused; asked a second time,
        they are cut off."""
        if self._draining is None:
            self._gate.drain()
            self._draining = asyncio.create_task(self._drain())
        else:
            self._gate.cut("told to stop again")

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._gate.empty()
        except TimeoutError:
            self._gate.cut(f"not finished after {self._drain_timeout_s:g} s")
            await self._gate.empty()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's: uvicorn would raise them again afterwards, and so end the process
        before the stages have stopped."""
        yield
