"""Launch: from options to a running graph. Opens the checkpoint, plans memory, starts pool, stages and
service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from connectors.inproc import inproc_pair
from connectors.interface import Receiver, Sender
from contracts.digests import Digester
from contracts.errors import OmnistageError
from contracts.messages import FromStage
from encoder_pool.pool import EncoderPool
from lm_engine.engine import LMEngine
from model_families.census import WeightCensus, take_census
from model_families.family import Family
from model_families.registry import open_family
from preprocess.pool import PoolConfig
from preprocess.service import Preprocessor, PreprocessorConfig
from stages.build import build_encoder_pool, build_lm_engine
from stages.coordinator import Coordinator
from stages.deployment import Deployment, load_deployment, num_cores, parse_bytes
from stages.encoder_stage import EncoderStage, FeatureReader
from stages.lm_stage import LMStage
from stages.local_worker import LocalWorker
from stages.mailbox import Mailbox
from stages.memory_plan import StagePlan, check_plan, plan_encoder, plan_lm, render_plan
from stages.omni_service import OmniService
from stages.options import ServeOptions
from stages.service import ModelCard
from stages.shell import StageShell

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = ROOT / ".models" / "omnistage-default"


@dataclass(frozen=True)
class Plan:
    """Everything decided before a weight loads."""

    folder: Path
    family: Family
    deployment: Deployment
    context_length: int
    stages: tuple[StagePlan, ...]

    def stage(self, name: str) -> StagePlan:
        return next(plan for plan in self.stages if plan.stage == name)


def make_plan(options: ServeOptions) -> Plan:
    """Raises BadRequest or DeploymentError, each naming what to change."""
    folder = model_folder(options)
    family = open_family(folder)
    family.pipeline.validate()
    deployment = load_deployment(family.pipeline, options.deployment, _overrides(options, family))
    census = take_census(folder)
    context_length = family.context_length
    plans = []
    for name, lm in deployment.lms.items():
        context_length = min(context_length, lm.max_context or context_length)
        dtype = resolve_dtype(lm.dtype, lm.device_list[0], census)
        elements = census.decoder_elements
        plans.append(plan_lm(name, lm, family.decoder_config, elements, dtype, context_length))
    for name, encoder in deployment.encoders.items():
        dtype = resolve_dtype(encoder.dtype, encoder.device_list[0], census)
        width = family.decoder_config.hidden_size
        plans.append(plan_encoder(name, encoder, census.encoder_elements, dtype, width))
    check_plan(plans)
    return Plan(folder, family, deployment, context_length, tuple(plans))


def model_folder(options: ServeOptions) -> Path:
    folder = options.model if options.model is not None else DEFAULT_MODEL
    if not (folder / "config.json").is_file():
        hint = "run `make setup` to build the default model" if options.model is None else "want a folder"
        raise OmnistageError(f"no config.json in {folder}: {hint}")
    return folder


def _overrides(options: ServeOptions, family: Family) -> tuple[str, ...]:
    """The few flags that stand for deployment fields, before the explicit ones."""
    stages = [s for s in family.pipeline.stages if s.kind != "preprocess"]
    flags: list[str] = []
    if options.dtype != "auto":
        flags += [f'{stage.name}.dtype="{options.dtype}"' for stage in stages]
    if options.kv_memory is not None:
        flags += [f'{stage.name}.kv_memory="{options.kv_memory}"' for stage in stages if stage.kind == "lm"]
    if options.media_root is not None:
        flags.append(f'limits.media_root="{options.media_root}"')
    if options.allow_private_addresses:
        flags.append("limits.allow_private_addresses=true")
    return (*flags, *options.overrides)


def resolve_dtype(choice: str, device: str, census: WeightCensus) -> torch.dtype:
    """auto: the checkpoint's own dtype, but never float16 on a CPU."""
    if choice != "auto":
        dtype: torch.dtype = getattr(torch, choice)
        return dtype
    if device == "cpu" and census.dtype == torch.float16:
        return torch.float32
    return census.dtype


def plan_text(options: ServeOptions) -> str:
    """Stages, edges, placement and memory, as `omnistage plan` prints them."""
    plan = make_plan(options)
    pipeline = plan.family.pipeline
    lines = [
        f"model     {plan.folder.name} ({plan.family.name}), context {plan.context_length} tokens",
        "edges",
    ]
    for edge in pipeline.edges:
        config = plan.deployment.edge(edge.source, edge.target)
        connector = "shared memory" if edge.payload == "features" else "inproc"
        lines.append(
            f"  {edge.source} -> {edge.target}  {edge.payload} over {connector}, capacity {config.capacity}"
        )
    lines += [f"entry     {pipeline.entry}", f"terminals {', '.join(pipeline.terminals)}", "memory"]
    lines += ["  " + line for line in render_plan(list(plan.stages)).splitlines()]
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def serve_service(options: ServeOptions) -> AsyncIterator[OmniService]:
    """A running graph; on leaving, stages and preprocessing workers are stopped and their memory is gone."""
    plan = make_plan(options)
    _share_threads(plan.deployment)
    async with contextlib.AsyncExitStack() as stack:
        preprocessor = None
        if plan.family.image_spec is not None:
            preprocessor = _make_preprocessor(plan.deployment)
            stack.push_async_callback(preprocessor.close)
            await preprocessor.start()
        inbox: Mailbox[FromStage] = Mailbox()
        inbox.bind()
        worker = LocalWorker(_make_shells(plan, inbox, preprocessor))
        coordinator = Coordinator(plan.family.pipeline, worker.send)
        dispatching = stack.enter_context(_background(_dispatch(inbox, coordinator)))
        worker.start()
        stack.push_async_callback(worker.stop)
        await coordinator.wait_started()
        for name, (_, detail) in coordinator.states.items():
            logger.info("stage %s ready: %s", name, detail)
        assert not dispatching.done()
        card = _model_card(options, plan)
        yield OmniService(card, plan.family, plan.deployment, coordinator, preprocessor, plan.context_length)


def _share_threads(deployment: Deployment) -> None:
    """torch's share of the cores. Preprocessing is bursty and runs at lower priority beside it."""
    threads = deployment.workers[0].threads if deployment.workers else None
    torch.set_num_threads(threads or num_cores())


def _make_preprocessor(deployment: Deployment) -> Preprocessor:
    config = deployment.preprocess
    pool = PoolConfig(
        num_workers=config.workers or max(1, num_cores() - 1),
        digester=Digester.random(config.digest),
        limits=deployment.limits,
        max_queued_jobs=config.max_queued_jobs,
        arena_bytes=parse_bytes(config.arena_bytes, "preprocess.arena_bytes"),
    )
    return Preprocessor(PreprocessorConfig(pool=pool, index_capacity=config.index_items))


def _make_shells(
    plan: Plan, inbox: Mailbox[FromStage], preprocessor: Preprocessor | None
) -> list[StageShell]:
    senders: dict[str, dict[str, Sender]] = {}
    receivers: dict[str, list[Receiver]] = {}
    for edge in plan.family.pipeline.edges:
        if edge.payload == "features":
            continue  # the preprocessing arena is this edge
        capacity = plan.deployment.edge(edge.source, edge.target).capacity
        sender, receiver = inproc_pair(f"{edge.source}->{edge.target}", capacity)
        senders.setdefault(edge.source, {})[edge.target] = sender
        receivers.setdefault(edge.target, []).append(receiver)

    def emit(messages: Sequence[FromStage]) -> None:
        inbox.put(*messages)

    shells = []
    for name in plan.deployment.encoders:
        assert preprocessor is not None
        logic = _encoder_logic(plan, name, preprocessor.pool.arena.view)
        shells.append(StageShell(name, logic, emit, senders.get(name), receivers.get(name, ())))
    for name in plan.deployment.lms:
        shells.append(
            StageShell(name, _lm_logic(plan, name), emit, senders.get(name), receivers.get(name, ()))
        )
    return shells


def _encoder_logic(plan: Plan, name: str, read: FeatureReader) -> EncoderStage:
    def build() -> tuple[EncoderPool, str]:
        return build_encoder_pool(plan.family, plan.deployment.encoders[name], plan.stage(name))

    return EncoderStage(name, build, read)


def _lm_logic(plan: Plan, name: str) -> LMStage:
    def build() -> tuple[LMEngine, str]:
        return build_lm_engine(plan.family, plan.deployment.lms[name], plan.stage(name), plan.context_length)

    return LMStage(name, build)


async def _dispatch(inbox: Mailbox[FromStage], coordinator: Coordinator) -> None:
    while True:
        coordinator.dispatch(await inbox.drain())


@contextlib.contextmanager
def _background(coroutine: Coroutine[Any, Any, None]) -> Iterator[asyncio.Task[None]]:
    """A task that lives as long as the block. Its own error ends the block at the next await of it."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()


def _model_card(options: ServeOptions, plan: Plan) -> ModelCard:
    names = options.served_model_name or (plan.folder.name,)
    inputs = ("text", "image") if plan.family.image_spec is not None else ("text",)
    description = plan.folder / "MODEL_CARD.md"
    return ModelCard(
        names=names,
        family=plan.family.name,
        context_length=plan.context_length,
        input_modalities=inputs,
        output_modalities=("text",),
        created=int(time.time()),
        description=description.read_text() if description.is_file() else "",
    )
