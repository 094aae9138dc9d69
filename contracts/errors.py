"""The error tree: every failure a user can meet, with its HTTP status and OpenAI error fields.

OmnistageError
├── BadRequest (400)                 the client can fix it
│   ├── MediaError                   an image, audio or video item could not be used
│   │   ├── MediaFetchError          the URL could not be fetched (status, time-out, refused address)
│   │   ├── MediaTooLarge            over a byte, pixel, sample or frame limit
│   │   └── MediaDecodeError         unreadable, truncated or unsupported content
│   ├── ContextLengthExceeded        prompt (text + media) and output do not fit the model
│   ├── PayloadTooLarge (413)        the request body is over its limit
│   └── MethodNotAllowed (405)       the path is there, for another method
├── NotAuthorized (401)
├── NotFound (404)
├── TooManyRequests (429)            a declared bound is full; carries Retry-After
├── ServiceUnavailable (503)         a required stage is missing, draining or over capacity
├── RequestTimeout (504)             the request outlived its time limit
└── EngineError (500)                our fault; the process goes on
    ├── NoSpeech                     a text was given to a talker that made no sound of it
    └── PeerLost                     the other end of an edge is gone
"""

from __future__ import annotations

import msgspec

MAX_MESSAGE_CHARS = 400


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it crosses the control plane; `to_exception` gives back the typed error."""

    kind: str
    message: str
    request_id: str | None = None
    stage: str | None = None
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def to_exception(self) -> OmnistageError:
        cls = _BY_NAME[self.kind]
        return cls(
            self.message,
            request_id=self.request_id,
            stage=self.stage,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )


class OmnistageError(Exception):
    """Root of the tree. `message` is for the user: short, no payload echo, says what to do next."""

    status = 500
    type = "server_error"
    default_code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        stage: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.stage = stage
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            kind=type_name(self),
            message=self.message,
            request_id=self.request_id,
            stage=self.stage,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )


class BadRequest(OmnistageError):
    status = 400
    type = "invalid_request_error"


class MediaError(BadRequest):
    default_code = "invalid_media"


class MediaFetchError(MediaError):
    default_code = "media_fetch_failed"


class MediaTooLarge(MediaError):
    default_code = "media_too_large"


class MediaDecodeError(MediaError):
    default_code = "media_decode_failed"


class ContextLengthExceeded(BadRequest):
    default_code = "context_length_exceeded"


class PayloadTooLarge(BadRequest):
    status = 413
    default_code = "request_too_large"


class MethodNotAllowed(BadRequest):
    status = 405
    default_code = "method_not_allowed"


class NotAuthorized(OmnistageError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class NotFound(OmnistageError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class TooManyRequests(OmnistageError):
    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"


class ServiceUnavailable(OmnistageError):
    status = 503
    type = "server_error"
    default_code = "unavailable"


class RequestTimeout(OmnistageError):
    status = 504
    type = "server_error"
    default_code = "timeout"


class EngineError(OmnistageError):
    default_code = "engine_error"


class NoSpeech(EngineError):
    default_code = "no_speech"


class PeerLost(EngineError):
    default_code = "peer_lost"


def type_name(error: OmnistageError) -> str:
    return type(error).__name__


def _subclasses(cls: type[OmnistageError]) -> list[type[OmnistageError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _subclasses(sub))]


_BY_NAME = {cls.__name__: cls for cls in _subclasses(OmnistageError)}
