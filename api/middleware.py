"""Around every request: its id, the API key, and an answer to whatever goes wrong inside."""

from __future__ import annotations

import secrets
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response, internal_error
from contracts.errors import NotAuthorized

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
MAX_REQUEST_ID_CHARS = 128


class Outermost:
    """A request id in every answer, and an answer to every bug.

    X-Request-Id is echoed, or made; the client's is never used inside, so nothing can collide.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = (b"x-request-id", _request_id(Headers(scope=scope).get("x-request-id")).encode())

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if not started:
                await error_response(internal_error())(scope, receive, send_with_id)
            raise  # the server logs it


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class ApiKey:
    """Asks for `Authorization: Bearer <key>` on everything but the open paths."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = key.strip().encode("utf-8", "surrogateescape")
            if scheme.lower() != "bearer" or not secrets.compare_digest(given, self._key):
                refusal = NotAuthorized("send the API key as 'Authorization: Bearer <key>'")
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)
