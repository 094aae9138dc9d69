"""The most that each count of a deployment may be: what lies far beyond is a slip, which would otherwise be
found out by a machine that no longer answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from stages.deployment import (
    MAX_BYTES,
    Connector,
    Deployment,
    DeploymentError,
    EncoderConfig,
    LMConfig,
    PlacedConfig,
    VocoderConfig,
    num_cores,
    parse_bytes,
    stage_of,
)

PER_CORE = 4  # processes or threads; more of them take memory and turns, and finish nothing sooner
ALWAYS_ALLOWED = 16  # of them, however small the machine: a deployment moves to one for a try


@dataclass(frozen=True)
class Bound:
    most: int
    why: str


_PROCESS = "each is a process"
_THREAD = "each is a thread"
_ROW = "each has a row in tables that are made at the start"
_STEP = "a step's activations are made for them"
_WAITING = "each is held in memory while it waits"
PREPROCESS = {
    "workers": Bound(4096, _PROCESS),
    "max_queued_jobs": Bound(1 << 20, _WAITING),
    "index_items": Bound(1 << 26, "each takes about a KiB"),
}
SERVER = {
    "max_requests": Bound(1 << 20, "each is a connection that is held open"),
    "threads": Bound(4096, _THREAD),
}
WORKER = {"threads": Bound(4096, _THREAD)}
PLACED = {"replicas": Bound(256, "each holds the weights and has an edge to every neighbour")}
ENCODER = {
    "max_batch_tokens": Bound(1 << 24, _STEP),
    "max_batch_patches": Bound(1 << 26, _STEP),
    "max_batch_items": Bound(1 << 20, _STEP),
    "max_tokens_ahead": Bound(1 << 28, "each is a row of embeddings in memory"),
}
LM = {
    "tensor_parallel": Bound(256, _PROCESS),
    "block_size": Bound(4096, "a sequence of one token takes a whole block"),
    "max_sequences": Bound(1 << 16, _ROW),
    "max_step_tokens": Bound(1 << 24, _STEP),
    "mixed_step_tokens": Bound(1 << 24, _STEP),
    "encoder_step_tokens": Bound(1 << 24, _STEP),
    "max_step_visual_tokens": Bound(1 << 24, _STEP),
    "long_prefill_cap": Bound(1 << 24, _STEP),
    "max_resident_embedding_tokens": Bound(1 << 28, "each is a row of embeddings in memory"),
    "max_waiting_requests": Bound(1 << 20, _WAITING),
}
VOCODER = {
    "max_streams": Bound(1 << 16, "each keeps a decoder's state"),
    "max_batch_rows": Bound(1 << 16, _STEP),
    "max_batch_frames": Bound(1 << 20, _STEP),
}
EDGE = {"capacity": Bound(1 << 16, "each is a slot of a ring that is made at the start")}


def check_number(where: str, value: object) -> None:
    """Of any field, before it is known what it means. Raises DeploymentError."""
    if isinstance(value, int | float) and abs(value) > MAX_BYTES:
        raise DeploymentError(f"{where}: no machine has so much; at most 2^60")


def check_counts(deployment: Deployment) -> None:
    """Whatever the machine. Raises DeploymentError."""
    _check("preprocess", deployment.preprocess, PREPROCESS)
    _check("server", deployment.server, SERVER)
    for worker in deployment.workers:
        _check(f"worker {worker.name!r}", worker, WORKER)
    for name, stage in deployment.placed.items():
        _check(f"stage.{name}", stage, {**PLACED, **_bounds_of(stage)})
    for edge in deployment.edges:
        _check(f"edge {edge.source}->{edge.target}", edge, EDGE)


def _bounds_of(stage: PlacedConfig) -> Mapping[str, Bound]:
    match stage:
        case EncoderConfig():
            return ENCODER
        case LMConfig():
            return LM
        case VocoderConfig():
            return VOCODER
        case _:
            raise AssertionError(f"a stage of kind {type(stage).__name__}")


def _check(where: str, config: msgspec.Struct, bounds: Mapping[str, Bound]) -> None:
    values = msgspec.structs.asdict(config)
    for field, bound in bounds.items():
        value = values[field]
        if value is not None and value > bound.most:
            raise DeploymentError(f"{where}.{field}: at most {bound.most}, is {value}: {bound.why}")


def check_machine(deployment: Deployment, connectors: Mapping[tuple[str, str], Connector]) -> None:
    """What runs in this machine's cores and lies in its memory; `deployment` has only the stages that run
    here, every replica for itself. Raises DeploymentError."""
    most = max(ALWAYS_ALLOWED, PER_CORE * num_cores())
    for where, what, value in _in_cores(deployment):
        if value > most:
            raise DeploymentError(
                f"{where}: at most {most} here, is {value}: {what}, this machine has {num_cores()} cores, and"
                f" more than {PER_CORE} each ({ALWAYS_ALLOWED} on a small machine) only take turns"
            )
    sizes = sorted(((size, where) for where, size in _in_memory(deployment, connectors)), reverse=True)
    wanted, there = sum(size for size, _ in sizes), machine_bytes()
    if wanted > there:
        parts = ", ".join(f"{where} {_gib(size)}" for size, where in sizes[:3])
        raise DeploymentError(
            f"{sizes[0][1]}: {_gib(wanted)} are to be kept in this machine's memory ({parts}),"
            f" which is {_gib(there)}"
        )


def _in_cores(deployment: Deployment) -> Iterator[tuple[str, str, int]]:
    yield "preprocess.workers", _PROCESS, deployment.preprocess.workers
    yield "server.threads", _THREAD, deployment.server.threads or 0
    for worker in deployment.workers:
        if not worker.host:
            yield f"worker {worker.name!r}.threads", _THREAD, worker.threads or 0
    for name, lm in deployment.lms.items():
        if lm.device_list == ("cpu",):
            yield f"stage.{name}.tensor_parallel", _PROCESS, lm.tensor_parallel
    placed = deployment.placed.items()
    on_cpu = Counter(stage_of(name) for name, stage in placed if stage.device_list == ("cpu",))
    for name, replicas in on_cpu.items():
        yield f"stage.{name}.replicas", "all compute with the same cores", replicas


def _in_memory(
    deployment: Deployment, connectors: Mapping[tuple[str, str], Connector]
) -> Iterator[tuple[str, int]]:
    yield "preprocess.arena_bytes", parse_bytes(deployment.preprocess.arena_bytes, "preprocess.arena_bytes")
    for name, encoder in deployment.encoders.items():
        where = f"stage.{name}.embedding_cache_host"
        yield where, parse_bytes(encoder.embedding_cache_host, where)
    for (source, target), connector in connectors.items():
        where = f"edge {source}->{target}.capacity_bytes"
        if connector == "shm" and source in deployment.placed:
            yield where, parse_bytes(deployment.edge(source, target).capacity_bytes, where)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def machine_bytes() -> int:
    """Memory of this machine, in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
