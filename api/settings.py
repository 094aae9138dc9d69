"""Environment variables: every OMNISTAGE_* the front process reads, typed, with its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

PREFIX = "OMNISTAGE_"


class SettingsError(ValueError):
    """A variable does not parse; the message names it."""


@dataclass(frozen=True)
class ApiSettings:
    """Limits of the HTTP edge. Field `max_body_bytes` is the variable OMNISTAGE_MAX_BODY_BYTES, and so on."""

    api_key: str | None = None
    max_body_bytes: int = 256 << 20
    max_prompts: int = 256  # prompts of one /v1/completions request
    max_speech_chars: int = 16_384  # of one /v1/audio/speech request
    max_samples: int = 128  # `n`, and prompts x n
    request_timeout_s: float | None = None
    send_stall_timeout_s: float = 300.0  # a reader that takes nothing for so long is dropped
    drain_timeout_s: float = 30.0  # open requests may finish for so long after SIGTERM
    access_log: bool = False

    @staticmethod
    def from_environment(environment: Mapping[str, str], *, api_key: str | None = None) -> ApiSettings:
        """Unset or empty variables keep the default; `api_key`, the command line's, wins over its own."""
        given = {f.name: environment.get(PREFIX + f.name.upper()) or None for f in fields(ApiSettings)}
        default = ApiSettings()
        timeout = given["request_timeout_s"]
        return ApiSettings(
            api_key=api_key or given["api_key"],
            max_body_bytes=_whole("max_body_bytes", given["max_body_bytes"], default.max_body_bytes),
            max_prompts=_whole("max_prompts", given["max_prompts"], default.max_prompts),
            max_samples=_whole("max_samples", given["max_samples"], default.max_samples),
            max_speech_chars=_whole("max_speech_chars", given["max_speech_chars"], default.max_speech_chars),
            request_timeout_s=_seconds("request_timeout_s", timeout, 0.0) if timeout else None,
            send_stall_timeout_s=_seconds(
                "send_stall_timeout_s", given["send_stall_timeout_s"], default.send_stall_timeout_s
            ),
            drain_timeout_s=_seconds("drain_timeout_s", given["drain_timeout_s"], default.drain_timeout_s),
            access_log=_switch("access_log", given["access_log"], default.access_log),
        )


def _refuse(name: str, text: str, wanted: str) -> SettingsError:
    return SettingsError(f"{PREFIX}{name.upper()}={text[:40]!r}: expected {wanted}")


def _whole(name: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise _refuse(name, text, "a whole number of at least 1")
    return int(text)


def _seconds(name: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise _refuse(name, text, "seconds") from None
    if not 0 < value < float("inf"):
        raise _refuse(name, text, "seconds above 0")
    return value


def _switch(name: str, text: str | None, default: bool) -> bool:
    if text is None:
        return default
    if text.lower() not in ("0", "1", "true", "false"):
        raise _refuse(name, text, "0 or 1")
    return text.lower() in ("1", "true")
