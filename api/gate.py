"""The gate before the application: 503 while the server starts and while it drains, and the end of what is
under way when it must not go on.

starting ──open()──▶ open ──drain()──▶ draining ──cut()──▶ cut
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_fields, error_headers, error_response
from api.health import Health, StageReport
from api.middleware import Outermost
from contracts.errors import ServiceUnavailable
from stages.start_progress import StartProgress

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
CUT_GRACE_S = 1.0  # for the last event of a stream that is cut, when its client does not read
WATCHED_PATHS = frozenset({"/metrics", "/stages"})  # answered to the end


class Gate:
    """An ASGI application around another, which `open` brings. All methods on the server's event loop."""

    def __init__(self, progress: StartProgress) -> None:
        self._progress = progress
        self._app: ASGIApp | None = None
        self._refusal = Outermost(self._refuse)
        self._under_way: set[asyncio.Task[object]] = set()
        self._draining = False
        self._cut = False
        self._receiving: set[asyncio.Timeout] = set()  # of those who wait for their clients
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, app: ASGIApp) -> None:
        assert self._app is None, "opened twice"
        self._app = app

    @property
    def is_open(self) -> bool:
        return self._app is not None

    def drain(self) -> None:
        """Nothing new is let in; what is under way may finish."""
        self._draining = True
        logger.info("shutting down: %d requests under way may finish", len(self._under_way))

    async def empty(self) -> None:
        """Returns when nothing is under way any more."""
        await self._empty.wait()

    def cut(self, why: str) -> None:
        """What is under way ends now, with an error that says so where its client can still be told."""
        assert self._draining
        if self._cut or self._empty.is_set():
            return
        logger.warning("%s: %d requests under way are cut off", why, len(self._under_way))
        self._cut = True
        loop = asyncio.get_running_loop()
        for waiting in self._receiving:
            waiting.reschedule(loop.time())
        loop.call_later(CUT_GRACE_S, self._cancel)

    def _cancel(self) -> None:
        for task in self._under_way:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"{scope['type']} is switched off"
        if self._app is None or (self._draining and scope["path"] not in WATCHED_PATHS):
            await self._refusal(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None, "uvicorn gives each request a task"
        self._under_way.add(task)
        self._empty.clear()
        try:
            await self._app(scope, lambda: self._receive(receive), send)
        except asyncio.CancelledError:
            if not self._cut:
                raise
        finally:
            self._under_way.discard(task)
            if not self._under_way:
                self._empty.set()

    async def _receive(self, receive: Receive) -> Message:
        """Whoever answers a request waits here for its client to leave, so here it hears of the cut."""
        if not self._cut:
            waiting = asyncio.timeout(None)
            try:
                async with waiting:
                    self._receiving.add(waiting)
                    return await receive()
            except TimeoutError:
                if not waiting.expired():
                    raise
            finally:
                self._receiving.discard(waiting)
        raise _unavailable("the server was told to stop at once", "shutting_down")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._draining:
            error = _unavailable("the server is shutting down and takes no new requests", "shutting_down")
        else:
            error = _unavailable(f"starting: {self._progress.text()}", "starting")
        if scope["path"] == "/health":
            await self._health(error)(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _health(self, error: ServiceUnavailable) -> Response:
        doing = {} if self._draining else self._progress.by_who()
        health = Health(
            status="draining" if self._draining else "starting",
            stages=[StageReport(who, "starting", what) for who, what in doing.items()],
            error=error_fields(error),
        )
        content, headers = msgspec.json.encode(health), error_headers(error)
        return Response(content, error.status, headers=headers, media_type="application/json")


def _unavailable(message: str, code: str) -> ServiceUnavailable:
    return ServiceUnavailable(message, code=code, retry_after_s=RETRY_AFTER_S)
