"""Runs the application on a socket: uvicorn with httptools, one process, a clean end on SIGTERM."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from api.settings import ApiSettings


def bind(host: str, port: int) -> socket.socket:
    """Takes the address before the model loads, so that a taken port fails at once. Port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


class ApiServer(uvicorn.Server):
    """`listening` is set once connections are answered. Owns the listener from `serve` on."""

    def __init__(self, app: FastAPI, settings: ApiSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=settings.access_log,
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
                server_header=False,
            )
        )
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def stop(self) -> None:
        """Open requests may finish for `drain_timeout_s`; asked a second time, they are cut off."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's: uvicorn would raise them again afterwards, and so end the process
        before the stages have stopped."""
        yield
