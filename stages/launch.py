"""Launch: from options to a running graph. Starts the pool, the stages (here or in worker processes), the
service."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Protocol

import torch

from connectors.inproc import inproc_pair
from connectors.interface import Receiver, Sender
from contracts.digests import Digester
from contracts.messages import FromStage, ToStage
from model_families.registry import read_sampling_defaults
from preprocess.jobs import PoolConfig
from preprocess.service import Preprocessor, PreprocessorConfig
from stages.coordinator import Coordinator
from stages.deployment import Deployment, DeploymentError, WorkerConfig, num_cores, parse_bytes
from stages.edges import ArenaDescription, EdgeEnd, ParentEdge, make_edge
from stages.encoder_stage import no_arena
from stages.fingerprint import checkpoint_fingerprint
from stages.local_worker import LocalWorker
from stages.mailbox import Mailbox
from stages.omni_service import OmniService
from stages.options import ServeOptions
from stages.placement import group_stages
from stages.planning import Plan, make_plan, plan_text
from stages.ray_cluster import RayCluster
from stages.remote_workers import Rendezvous
from stages.service import ModelCard, WorkerInfo
from stages.stage_board import SendToStage
from stages.stage_logics import make_shells
from stages.start_progress import StartProgress
from stages.supervisor import Supervisor, SupervisorConfig, WorkerSpec
from stages.worker_processes import ForkServer

__all__ = ["plan_text", "serve_service"]

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """Where the stages run, as the service sees it."""

    def send(self, stage: str, message: ToStage) -> None: ...

    def infos(self) -> tuple[WorkerInfo, ...]: ...

    async def stop(self) -> None: ...


@contextlib.asynccontextmanager
async def serve_service(
    options: ServeOptions, progress: StartProgress | None = None, forks: ForkServer | None = None
) -> AsyncIterator[OmniService]:
    """A running graph; on leaving, stages and preprocessing workers are stopped and their memory is gone.
    `progress` is told what the start is at. `forks`: as begun ahead of the plan, ended in any case."""
    progress = progress or StartProgress()
    async with contextlib.AsyncExitStack() as stack:
        if forks is not None:
            stack.callback(forks.stop)
        with progress.step("server", "reading the checkpoint and planning"):
            plan = await asyncio.to_thread(make_plan, options)
        options = plan.options
        preprocessor = None
        if plan.family.media_specs.modalities:
            preprocessor = _make_preprocessor(plan.deployment)
            stack.push_async_callback(preprocessor.close)
            with progress.step("preprocess", "starting its processes"):
                await preprocessor.start()
        workers: Workers
        groups = group_stages(plan.deployment, options)
        if groups:
            coordinator, workers = await _start_processes(
                plan, options, groups, preprocessor, stack, progress, forks
            )
        else:
            if forks is not None:
                forks.stop()
            coordinator, workers = _start_threads(plan, preprocessor, stack, progress)
        with progress.step("server", "reading the tokenizer"):  # seconds, while the stages load
            await asyncio.to_thread(lambda: plan.family.tokenizer)
        await coordinator.board.wait_started()
        card = _model_card(options, plan)
        yield OmniService(
            card, plan.family, plan.deployment, coordinator, workers, preprocessor, plan.context_length
        )


def _make_preprocessor(deployment: Deployment) -> Preprocessor:
    config = deployment.preprocess
    pool = PoolConfig(
        num_workers=config.workers or max(1, num_cores() - 1),
        digester=Digester.random(config.digest),
        resize=config.resize,
        limits=deployment.limits,
        max_queued_jobs=config.max_queued_jobs,
        arena_bytes=parse_bytes(config.arena_bytes, "preprocess.arena_bytes"),
    )
    return Preprocessor(PreprocessorConfig(pool=pool, index_capacity=config.index_items))


# --- all stages in this process -----------------------------------------------------------------------------


def _start_threads(
    plan: Plan,
    preprocessor: Preprocessor | None,
    stack: contextlib.AsyncExitStack,
    progress: StartProgress,
) -> tuple[Coordinator, LocalWorker]:
    torch.set_num_threads(plan.deployment.server.threads or num_cores())
    inbox: Mailbox[FromStage] = Mailbox()
    inbox.bind()
    senders: dict[tuple[str, str], Sender] = {}
    receivers: dict[tuple[str, str], Receiver] = {}
    for source, target in plan.chunk_edges:
        capacity = plan.deployment.edge(source, target).capacity
        senders[source, target], receivers[source, target] = inproc_pair(f"{source}->{target}", capacity)
    read = None if preprocessor is None else preprocessor.pool.arena.view
    stages = list(plan.deployment.placed)
    worker = LocalWorker(make_shells(plan, stages, senders, receivers, read, inbox.put_all))
    coordinator = _make_coordinator(plan, worker.send, progress)
    stack.enter_context(_background(_dispatch(inbox, coordinator)))
    stack.push_async_callback(worker.stop)
    worker.start()
    return coordinator, worker


def _make_coordinator(plan: Plan, send: SendToStage, progress: StartProgress) -> Coordinator:
    return Coordinator(
        plan.family.pipeline,
        send,
        max_replays=plan.deployment.server.max_replays,
        replicas=plan.replicas,
        routing=plan.deployment.routing,
        progress=progress,
        encode_ahead=_encoders_remember(plan.deployment),
    )


def _encoders_remember(deployment: Deployment) -> bool:
    """Without a cache, embeddings that come before they are asked for would be computed again."""
    return all(
        parse_bytes(encoder.embedding_cache, f"stage.{name}.embedding_cache") > 0
        for name, encoder in deployment.encoders.items()
    )


async def _dispatch(inbox: Mailbox[FromStage], coordinator: Coordinator) -> None:
    while True:
        coordinator.dispatch(await inbox.drain())


@contextlib.contextmanager
def _background(coroutine: Coroutine[Any, Any, None]) -> Iterator[asyncio.Task[None]]:
    """A task that lives as long as the block."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()


# --- stages in worker processes -----------------------------------------------------------------------------


async def _start_processes(
    plan: Plan,
    options: ServeOptions,
    groups: tuple[WorkerConfig, ...],
    preprocessor: Preprocessor | None,
    stack: contextlib.AsyncExitStack,
    progress: StartProgress,
    forks: ForkServer | None,
) -> tuple[Coordinator, Supervisor]:
    edges: dict[tuple[str, str], ParentEdge] = {}
    cluster = RayCluster.join(options.ray) if options.ray is not None else None
    if cluster is not None:
        stack.push_async_callback(cluster.leave)
    rendezvous = make_rendezvous(plan.deployment, options, groups, cluster)
    address, checkpoint = "", ""
    if rendezvous is not None:
        address, checkpoint = rendezvous.address, await asyncio.to_thread(checkpoint_fingerprint, plan.folder)
    for (source, target), connector in plan.connectors.items():
        edges[source, target] = make_edge(plan.deployment, source, target, connector, address)
        stack.callback(edges[source, target].close)
    arena = None
    if preprocessor is not None:
        mapped = preprocessor.pool.arena
        arena = ArenaDescription(mapped.fd, mapped.name, mapped.size)
    # The closures below are called only once the supervisor runs, when `coordinator` is bound.
    supervisor = Supervisor(
        [_worker_spec(group, plan, groups, edges) for group in groups],
        options,
        arena,
        deliver=lambda messages: coordinator.dispatch(messages),
        on_lost=lambda spec, again: _worker_lost(spec, again, edges, coordinator),
        config=_supervision(plan.deployment),
        rendezvous=rendezvous,
        checkpoint=checkpoint,
        read=no_arena if preprocessor is None else preprocessor.pool.arena.view,
        forks=forks,
    )
    coordinator = _make_coordinator(plan, supervisor.send, progress)
    stack.push_async_callback(supervisor.stop)
    logger.info("starting workers: %s", ", ".join(f"{g.name} ({', '.join(g.stages)})" for g in groups))
    for group in groups:
        awaited = f"the agent of worker {group.name} on {group.host}" if group.host else "its worker process"
        for stage in group.stages:
            progress.begin(stage, f"waiting for {awaited}")
    await supervisor.start()
    if cluster is not None and rendezvous is not None:
        needs = {group.name: _devices_of(group, plan.deployment) for group in groups}
        await cluster.start(rendezvous.endpoint, rendezvous.token, needs)
    return coordinator, supervisor


def make_rendezvous(
    deployment: Deployment,
    options: ServeOptions,
    groups: tuple[WorkerConfig, ...],
    cluster: RayCluster | None,
) -> Rendezvous | None:
    """None when every worker is on this machine."""
    away = [group for group in groups if group.host]
    if not away:
        return None
    names = [group.name for group in away]
    if cluster is not None:
        return Rendezvous(cluster.address, 0, secrets.token_hex(16), names)
    if not options.worker_token:
        raise DeploymentError(
            f"worker {names[0]!r}: host {away[0].host!r} is another machine; set"
            " OMNISTAGE_WORKER_TOKEN to the same secret here and there"
        )
    address, port = deployment.cluster.address, deployment.cluster.port
    try:
        return Rendezvous(address, port, options.worker_token, names)
    except OSError as error:
        field = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "address"
        raise DeploymentError(
            f"cluster.{field}: workers of other machines cannot be waited for at {address}:{port}"
            f" ({error.strerror}); want an address of this machine, and a port that is free"
        ) from error


def _supervision(deployment: Deployment) -> SupervisorConfig:
    server = deployment.server
    return SupervisorConfig(
        heartbeat_s=server.heartbeat_s,
        hang_after_s=server.hang_after_s,
        step_limit_s=server.step_limit_s,
        max_restarts=server.max_restarts,
    )


def _worker_lost(
    spec: WorkerSpec, again: bool, edges: dict[tuple[str, str], ParentEdge], coordinator: Coordinator
) -> None:
    for (source, target), edge in edges.items():
        if source in spec.stages:
            edge.mark_dead("sender")
        if target in spec.stages:
            edge.mark_dead("receiver")
        if again and (source in spec.stages or target in spec.stages):
            edge.reset()
    for stage in spec.stages:
        coordinator.stage_lost(stage, restarts=again)


def _worker_spec(
    group: WorkerConfig,
    plan: Plan,
    groups: tuple[WorkerConfig, ...],
    edges: dict[tuple[str, str], ParentEdge],
) -> WorkerSpec:
    ends: list[EdgeEnd] = []
    fds: list[int] = []
    for (source, target), edge in edges.items():
        description = edge.description()
        if source in group.stages:
            ends.append(EdgeEnd(source, target, "sender", description))
        if target in group.stages:
            ends.append(EdgeEnd(source, target, "receiver", description))
        if source in group.stages or target in group.stages:
            fds += edge.fds
    neighbours = sum(other.host == group.host for other in groups)
    threads = group.threads or (0 if group.host else max(1, num_cores() // neighbours))
    return WorkerSpec(
        group.name,
        group.stages,
        _devices_of(group, plan.deployment),
        tuple(ends),
        threads,
        tuple(fds),
        group.host,
    )


def _devices_of(group: WorkerConfig, deployment: Deployment) -> tuple[str, ...]:
    placed = deployment.placed
    return tuple(dict.fromkeys(device for stage in group.stages for device in placed[stage].device_list))


def _model_card(options: ServeOptions, plan: Plan) -> ModelCard:
    names = options.served_model_name or (plan.folder.name,)
    description = plan.folder / "MODEL_CARD.md"
    speech = plan.family.speech
    return ModelCard(
        names=names,
        family=plan.family.name,
        context_length=plan.context_length,
        input_modalities=("text", *plan.family.media_specs.modalities),
        output_modalities=("text",) if speech is None else ("text", "audio"),
        created=int(time.time()),
        description=description.read_text() if description.is_file() else "",
        voices=() if speech is None else speech.voices,
        sample_rate=None if speech is None else speech.sample_rate,
        samples_per_frame=None if speech is None else speech.samples_per_frame,
        transcribes=plan.family.transcriber is not None or plan.family.writes_down is not None,
        sampling=read_sampling_defaults(plan.folder),
    )
