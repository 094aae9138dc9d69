"""Control-plane framing between the front process and worker processes: msgspec structs over ZMQ."""

from __future__ import annotations

import msgspec

from contracts.messages import FromStage, ToStage


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    """Messages for the worker's stages, in order."""

    messages: list[tuple[str, ToStage]]


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker. `token` proves that it was started by this front process."""

    worker: str
    token: str
    pid: int


class FromWorker(msgspec.Struct, frozen=True, tag=True):
    messages: list[FromStage]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent at a fixed interval by the worker's main loop; `busy_s`: how long each stage's step has run."""

    busy_s: dict[str, float]


# --- to and from the fork server, over a socket that carries descriptors ------------------------------------

MAX_FORK_BYTES = 1 << 17
MAX_FORK_FDS = 253  # what one message may carry (SCM_MAX_FD)


class ForkRequest(msgspec.Struct, frozen=True):
    """`fds`: the numbers by which the worker knows the descriptors that come with this message, in order."""

    name: str
    setup: bytes
    fds: tuple[int, ...]


class Forked(msgspec.Struct, frozen=True):
    """Answers a ForkRequest; a pidfd comes with it. `pid` 0 and no pidfd: the fork failed."""

    pid: int


ControlToWorker = ToWorker | StopWorker
ControlFromWorker = Hello | FromWorker | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ControlToWorker)
_from_worker = msgspec.msgpack.Decoder(ControlFromWorker)


def encode(message: ControlToWorker | ControlFromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> ControlToWorker:
    return _to_worker.decode(frame)


def decode_from_worker(frame: bytes) -> ControlFromWorker:
    return _from_worker.decode(frame)
