"""What the front process and the agent of a worker on another machine tell each other, over a link."""

from __future__ import annotations

import msgspec

from connectors.link import Link


# --- agent → front ------------------------------------------------------------------------------------------
class Join(msgspec.Struct, frozen=True, tag=True):
    """First on a link: here the worker of that name can run."""

    token: str
    name: str
    version: str = ""  # of omnistage


class Declined(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot run here; the link ends."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The worker's process is gone."""


# --- front → agent ------------------------------------------------------------------------------------------
class Welcome(msgspec.Struct, frozen=True, tag=True):
    """First on a link that is not refused: this is a front process, which may want the worker later."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The link ends here. `final`: another try will go no better."""

    reason: str
    final: bool


class Start(msgspec.Struct, frozen=True, tag=True):
    """`setup`: a WorkerSetup as JSON."""

    setup: bytes


class Kill(msgspec.Struct, frozen=True, tag=True):
    pass


FromAgent = Join | Declined | Ended
ToAgent = Welcome | Refused | Start | Kill
_encode = msgspec.msgpack.Encoder().encode
_decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
_decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode


def tell(link: Link, message: FromAgent | ToAgent) -> None:
    link.send(_encode(message))


def from_agent(link: Link) -> list[FromAgent]:
    """Raises msgspec.DecodeError."""
    return [_decode_from_agent(frame) for frame in link.receive()]


def to_agent(link: Link) -> list[ToAgent]:
    """Raises msgspec.DecodeError."""
    return [_decode_to_agent(frame) for frame in link.receive()]
