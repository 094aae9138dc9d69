"""Edges between processes: which ends a worker holds, and the preprocessing arena it may read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from connectors.interface import Receiver, Sender
from connectors.shm import ShmDescription, ShmReceiver, ShmSender
from preprocess.arena import ArenaMapping
from stages.encoder_stage import FeatureReader


class EdgeEnd(msgspec.Struct, frozen=True):
    """One end of an edge, handed to the worker that holds it."""

    source: str
    target: str
    end: Literal["sender", "receiver"]
    ring: ShmDescription


class ArenaDescription(msgspec.Struct, frozen=True):
    """The inherited descriptor of the preprocessing arena."""

    fd: int
    name: str
    size: int


Ends = tuple[dict[tuple[str, str], Sender], dict[tuple[str, str], Receiver]]


def open_edge_ends(ends: Sequence[EdgeEnd]) -> Ends:
    senders: dict[tuple[str, str], Sender] = {}
    receivers: dict[tuple[str, str], Receiver] = {}
    for end in ends:
        key = (end.source, end.target)
        if end.end == "sender":
            senders[key] = ShmSender(end.ring)
        else:
            receivers[key] = ShmReceiver(end.ring)
    return senders, receivers


def open_arena(description: ArenaDescription) -> FeatureReader:
    return ArenaMapping(description.fd, description.name, description.size).view
