"""What the parties of a NIXL edge tell each other: ends and parent at the rendezvous, sender and receiver."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from connectors.link import Link, connect
from contracts.errors import EngineError

End = Literal["sender", "receiver"]
FIRST_EPOCH = 1
GREETING_BYTES = 1 << 20  # no frame of a stranger is longer
GRACE_S = 10.0  # a broken link without the parent's word for it means that the network broke


class NixlDescription(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an end needs to open an edge, from any host: where the parent listens, and the sizes.
    `local_host`: see
    `connect`."""

    name: str
    host: str
    port: int
    token: str
    pool_bytes: int
    max_chunks: int
    local_host: str = ""


# --- end → parent -------------------------------------------------------------------------------------------
class Attach(msgspec.Struct, frozen=True, tag=True):
    """An end is there. `port`: where a receiver listens for its sender."""

    token: str
    end: End
    port: int


# --- parent → end -------------------------------------------------------------------------------------------
class Begin(msgspec.Struct, frozen=True, tag=True):
    """The epoch that counts from now on."""

    epoch: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """To the sender: where this epoch's receiver listens."""

    epoch: int
    host: str
    port: int


class PeerDead(msgspec.Struct, frozen=True, tag=True):
    epoch: int


# --- sender → receiver --------------------------------------------------------------------------------------
class Open(msgspec.Struct, frozen=True, tag=True):
    """First on a link: who sends, and the memory to read from."""

    token: str
    epoch: int
    agent: str
    metadata: bytes
    pool_address: int


class Announce(msgspec.Struct, frozen=True, tag=True):
    """A chunk of `size` bytes: `body` itself when it is small, else to be read at `span` of the pool."""

    slot: int
    request_id: str
    header_nbytes: int
    size: int
    span: int | None
    sent_ns: int
    body: bytes


class CancelSlots(msgspec.Struct, frozen=True, tag=True):
    slots: tuple[int, ...]


# --- receiver → sender --------------------------------------------------------------------------------------
class Landed(msgspec.Struct, frozen=True, tag=True):
    """The read of the slot's chunk is over; its credit is not yet returned."""

    slot: int


class Returned(msgspec.Struct, frozen=True, tag=True):
    slots: tuple[int, ...]


FromParent = Begin | Meet | PeerDead
ToReceiver = Open | Announce | CancelSlots
ToSender = Landed | Returned
_encode = msgspec.msgpack.Encoder().encode
_decode_attach = msgspec.msgpack.Decoder(Attach).decode
_decode_from_parent = msgspec.msgpack.Decoder(FromParent).decode
_decode_to_receiver = msgspec.msgpack.Decoder(ToReceiver).decode
_decode_to_sender = msgspec.msgpack.Decoder(ToSender).decode


def tell(link: Link, message: Attach | FromParent | ToReceiver | ToSender) -> None:
    link.send(_encode(message))


def attachments(link: Link) -> list[Attach]:
    return [_decode_attach(frame) for frame in link.receive()]


def from_parent(link: Link) -> list[FromParent]:
    return [_decode_from_parent(frame) for frame in link.receive()]


def to_receiver(link: Link) -> list[ToReceiver]:
    return [_decode_to_receiver(frame) for frame in link.receive()]


def to_sender(link: Link) -> list[ToSender]:
    return [_decode_to_sender(frame) for frame in link.receive()]


def same_token(ours: str, theirs: str) -> bool:
    return secrets.compare_digest(ours.encode(), theirs.encode())


def attach(description: NixlDescription, link: Link, end: End, port: int = 0) -> tuple[int, list[FromParent]]:
    """Takes the end; the epoch it takes part in, and what came with it. Waits for the parent's answer."""
    tell(link, Attach(description.token, end, port))
    messages: list[FromParent] = []
    while not messages and not link.is_ended:
        link.wait()
        messages = from_parent(link)
    if not messages:
        link.close()
        raise EngineError(f"edge {description.name} has its {end} already: reset it first")
    begin = messages[0]
    assert isinstance(begin, Begin)
    return begin.epoch, messages[1:]


def reach_parent(description: NixlDescription) -> Link:
    try:
        return connect(description.host, description.port, description.local_host)
    except OSError as error:
        where = f"{description.host}:{description.port}"
        raise EngineError(f"edge {description.name}: nobody answers at {where}: {error}") from error
