"""Errors as HTTP: the OpenAI error body on every 4xx and 5xx, whoever raised it."""

from __future__ import annotations

import math

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from contracts.errors import BadRequest, EngineError, MethodNotAllowed, NotFound, OmnistageError


class ErrorFields(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorFields


CLIENT_LEFT_STATUS = 499  # never reaches anyone: the connection is gone


async def _left(request: Request, error: Exception) -> Response:
    """The client went while it was sending its body: nobody reads this."""
    return Response(status_code=CLIENT_LEFT_STATUS)


def error_fields(error: OmnistageError) -> ErrorFields:
    return ErrorFields(message=error.message, type=error.type, param=error.param, code=error.code)


def error_json(error: OmnistageError) -> bytes:
    return msgspec.json.encode(ErrorBody(error_fields(error)))


def error_headers(error: OmnistageError) -> dict[str, str]:
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    # Retry-After takes whole seconds; rounding down would invite the client too early.
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def error_response(error: OmnistageError) -> Response:
    return Response(
        error_json(error), error.status, headers=error_headers(error), media_type="application/json"
    )


def internal_error() -> EngineError:
    """What the client learns of a bug of ours: nothing but that it is ours."""
    return EngineError("internal server error", code="internal_error")


CHAT = "for answers POST to /v1/chat/completions"
AUDIO = "for sound there are /v1/audio/speech, transcriptions, translations and voices"
# What a path that is no route may have been meant for: the first word of these that is in it tells.
NEAREST = {
    "embed": "embeddings are not made here",
    "images": "pictures are only taken, as parts of messages, in /v1/chat/completions",
    "files": "files are only taken as parts of messages in /v1/chat/completions, as data: or http(s) URLs",
    "upload": "files are only taken as parts of messages in /v1/chat/completions, as data: or http(s) URLs",
    "audio": AUDIO,
    "speech": AUDIO,
    "transcri": AUDIO,
    "realtime": CHAT,
    "response": CHAT,
    "message": CHAT,
    "assistant": CHAT,
    "thread": CHAT,
    "complet": f"{CHAT}, or to /v1/completions",
    "chat": CHAT,
    "generate": CHAT,
    "token": "there are /tokenize and /detokenize",
    "model": "models are listed at /v1/models",
    "health": "there are /health, /ready and /stages",
    "live": "there are /health, /ready and /stages",
}


def _no_route(path: str) -> NotFound:
    words = path.lower()
    near = next((what for word, what in NEAREST.items() if word in words), f"{CHAT}; see /v1/models")
    return NotFound(f"no such route; {near}", code="route_not_found")


def _from_http_exception(error: HTTPException, path: str) -> OmnistageError:
    if error.status_code == 404:
        return _no_route(path)
    if error.status_code == 405:
        return MethodNotAllowed("this route does not take that method")
    if error.status_code < 500:
        return BadRequest("the request could not be read")
    return internal_error()


def install_error_handlers(app: FastAPI) -> None:
    """For errors we know; the outermost middleware answers for bugs."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, OmnistageError)
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_from_http_exception(error, request.url.path))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(OmnistageError, ours)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(HTTPException, http)
