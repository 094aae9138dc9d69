"""Edges between stages: made by the parent, their ends opened by the workers that hold them; the
preprocessing arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, assert_never

import msgspec

from connectors.cuda_ipc import CudaIpcDescription, CudaIpcEdge
from connectors.inproc import inproc_pair
from connectors.interface import Receiver, Sender
from connectors.nixl import NixlDescription, NixlEdge, NixlReceiver, NixlSender
from connectors.shm import ShmDescription, ShmEdge, ShmReceiver, ShmSender
from preprocess.arena import ArenaMapping
from stages.deployment import Connector, Deployment, parse_bytes
from stages.encoder_stage import FeatureReader

End = Literal["sender", "receiver"]


class InprocDescription(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An edge inside one worker, which holds both ends."""

    name: str
    capacity: int


EdgeDescription = InprocDescription | ShmDescription | CudaIpcDescription | NixlDescription


class EdgeEnd(msgspec.Struct, frozen=True):
    """One end of an edge, handed to the worker that holds it."""

    source: str
    target: str
    end: End
    edge: EdgeDescription


class ArenaDescription(msgspec.Struct, frozen=True):
    """The inherited descriptor of the preprocessing arena."""

    fd: int
    name: str
    size: int


class ParentEdge(Protocol):
    """An edge as the process that made it has it; see `ShmEdge`."""

    @property
    def fds(self) -> tuple[int, ...]:
        """What a process that holds an end must inherit."""
        ...

    def description(self) -> EdgeDescription: ...

    def mark_dead(self, end: End) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class _InprocEdge:
    """Both its ends live and die with one worker."""

    fds: tuple[int, ...] = ()

    def __init__(self, description: InprocDescription) -> None:
        self._description = description

    def description(self) -> InprocDescription:
        return self._description

    def mark_dead(self, end: End) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


def make_edge(
    deployment: Deployment, source: str, target: str, connector: Connector, address: str = ""
) -> ParentEdge:
    """`address`: of this machine, for an edge with an end on another one."""
    config = deployment.edge(source, target)
    name, capacity = f"{source}->{target}", config.capacity
    capacity_bytes = parse_bytes(config.capacity_bytes, f"edge {name}.capacity_bytes")
    match connector:
        case "inproc":
            return _InprocEdge(InprocDescription(name=name, capacity=capacity))
        case "shm":
            return ShmEdge.create(name, capacity_bytes, capacity)
        case "nixl":
            return NixlEdge.create(name, capacity_bytes, capacity, address or "127.0.0.1")
        case "cuda_ipc":
            devices = (deployment.placed[stage].device_list[0] for stage in (source, target))
            return CudaIpcEdge.create(name, capacity_bytes, capacity, *devices)
    assert_never(connector)


Ends = tuple[dict[tuple[str, str], Sender], dict[tuple[str, str], Receiver]]


def open_edge_ends(ends: Sequence[EdgeEnd], local_host: str = "") -> Ends:
    """`local_host`: see `NixlDescription`."""
    senders: dict[tuple[str, str], Sender] = {}
    receivers: dict[tuple[str, str], Receiver] = {}
    for end in ends:
        key = (end.source, end.target)
        if isinstance(end.edge, InprocDescription):
            if end.end == "sender":  # the other end is in this worker as well
                senders[key], receivers[key] = inproc_pair(end.edge.name, end.edge.capacity)
        elif end.end == "sender":
            senders[key] = open_sender(_seen_from(end.edge, local_host))
        else:
            receivers[key] = open_receiver(_seen_from(end.edge, local_host))
    return senders, receivers


Apart = ShmDescription | CudaIpcDescription | NixlDescription


def _seen_from(edge: Apart, local_host: str) -> Apart:
    return msgspec.structs.replace(edge, local_host=local_host) if isinstance(edge, NixlDescription) else edge


def open_sender(edge: Apart) -> Sender:
    match edge:
        case ShmDescription():
            return ShmSender(edge)
        case NixlDescription():
            return NixlSender(edge)
        case CudaIpcDescription():
            from connectors.cuda_lanes import open_cuda_sender  # only where there is a GPU

            return open_cuda_sender(edge)
    assert_never(edge)


def open_receiver(edge: Apart) -> Receiver:
    match edge:
        case ShmDescription():
            return ShmReceiver(edge)
        case NixlDescription():
            return NixlReceiver(edge)
        case CudaIpcDescription():
            from connectors.cuda_lanes import open_cuda_receiver  # only where there is a GPU

            return open_cuda_receiver(edge)
    assert_never(edge)


def open_arena(description: ArenaDescription) -> FeatureReader:
    return ArenaMapping(description.fd, description.name, description.size).view
