"""Planning: everything decided before a weight loads. Opens the checkpoint, reads the deployment, plans
memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from connectors.cuda_ipc import device_pool_bytes
from contracts.errors import OmnistageError
from contracts.pipeline import Pipeline
from lm_engine.gpu_target import target_of
from lm_engine.model import DecoderConfig
from model_families.census import WeightCensus, take_census
from model_families.default_model.shipped import shipped_name
from model_families.family import Family
from model_families.registry import open_family
from stages.deployment import (
    Connector,
    Deployment,
    EncoderConfig,
    VocoderConfig,
    parse_bytes,
    stage_of,
)
from stages.deployment_bounds import check_machine
from stages.deployment_file import load_deployment
from stages.memory_plan import (
    TALKER_KV_SHARE,
    THINKER_KV_SHARE,
    DeviceMemory,
    StagePlan,
    check_devices,
    check_plan,
    plan_encoder,
    plan_ranks,
    plan_vocoder,
    render_plan,
    share_out,
)
from stages.options import ServeOptions
from stages.placement import choose_connectors, group_stages, hosts_elsewhere
from stages.replicas import spread

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = ROOT / ".models" / shipped_name()


@dataclass(frozen=True)
class Plan:
    """Everything decided before a weight loads."""

    folder: Path
    family: Family
    deployment: Deployment
    contexts: dict[str, int]  # LM stage → tokens a sequence may have
    stages: tuple[StagePlan, ...]  # of this machine; one a rank of a tensor-parallel stage
    elsewhere: dict[str, str]  # stages of other machines, and their hosts, which plan their memory themselves
    options: ServeOptions
    pipeline: Pipeline  # of what runs: the family's, with every replica a stage of its own
    connectors: Mapping[tuple[str, str], Connector]  # of the edges that carry chunks
    replicas: dict[str, tuple[str, ...]]  # the family's stages that run several times

    @property
    def context_length(self) -> int:
        """What a client may use."""
        return self.contexts[self.pipeline.entry]

    @property
    def chunk_edges(self) -> tuple[tuple[str, str], ...]:
        """(source, target) of the edges that carry chunks."""
        return tuple(self.connectors)

    def with_kv_blocks(self, num_blocks: Mapping[str, int]) -> Plan:
        """By stage, as measured before: such a stage need not measure again."""
        stages = tuple(replace(s, num_kv_blocks=num_blocks.get(s.stage, 0)) for s in self.stages)
        return replace(self, stages=stages)

    def starting_again(self) -> Plan:
        """For a worker that replaces one that was ready."""
        return replace(self, stages=tuple(replace(s, starts_again=True) for s in self.stages))

    def stage(self, name: str, rank: int = 0) -> StagePlan:
        return next(plan for plan in self.stages if (plan.stage, plan.rank) == (name, rank))


def make_plan(options: ServeOptions, *, check_memory: bool = True, check_weights: bool = True) -> Plan:
    """Raises BadRequest or DeploymentError, each naming what to change."""
    folder = model_folder(options)
    family = open_family(folder)
    family.pipeline.validate()
    loaded = load_deployment(
        family.pipeline, options.deployment, _overrides(options, family), options.deployment_text
    )
    running = spread(family.pipeline, loaded)
    deployment = running.deployment
    elsewhere = hosts_elsewhere(deployment, options)
    here = deployment.without(elsewhere)
    assumed = options.assumed_gpu_memory
    if check_memory and assumed is None:
        check_devices(here)
    census = take_census(folder)
    if check_weights:
        family.check_weights()
    contexts = {
        name: min(
            _decoder_of(family, name).max_position, family.context_length, lm.max_context or sys.maxsize
        )
        for name, lm in deployment.lms.items()
    }
    devices = [device for placed in here.placed.values() for device in placed.device_list]
    if assumed is not None:
        memory = DeviceMemory.assume(devices, parse_bytes(assumed, "--gpu-memory"))
    elif options.gpu_memory:
        memory = DeviceMemory(dict(options.gpu_memory))
    else:
        memory = DeviceMemory.ask(devices)
        targets = tuple((gpu, target_of(torch.device(gpu))) for gpu in memory.free_at_start)
        options = replace(options, gpu_targets=targets)
    connectors = {(source, target): chosen for source, target, chosen in options.connectors}
    if not connectors:
        groups = group_stages(deployment, options)
        connectors = choose_connectors(deployment, _chunk_edges(running.pipeline), groups)
    chosen_by_edge = tuple((source, target, chosen) for (source, target), chosen in connectors.items())
    if check_memory and assumed is None:
        check_machine(here, connectors)
    pools = _device_pools(deployment, connectors)
    plans = [
        *_plan_encoders(family, here, census, memory, pools),
        *_plan_lms(family, here, census, contexts, memory, pools),
        *(_plan_vocoder(name, config, census, memory) for name, config in here.vocoders.items()),
    ]
    plans = share_out(plans, memory)
    if check_memory:
        check_plan(plans, memory)
    return Plan(
        folder=folder,
        family=family,
        deployment=deployment,
        contexts=contexts,
        stages=tuple(plans),
        elsewhere=elsewhere,
        options=replace(options, gpu_memory=tuple(memory.free_at_start.items()), connectors=chosen_by_edge),
        pipeline=running.pipeline,
        connectors=connectors,
        replicas=running.replicas,
    )


def _chunk_edges(pipeline: Pipeline) -> list[tuple[str, str]]:
    """Features travel through the preprocessing arena."""
    return [(edge.source, edge.target) for edge in pipeline.edges if edge.payload != "features"]


def _device_pools(
    deployment: Deployment, connectors: Mapping[tuple[str, str], Connector]
) -> Mapping[str, int]:
    """By stage: bytes of its device that hold what it sends."""
    pools: Counter[str] = Counter()
    for (source, target), connector in connectors.items():
        if connector == "cuda_ipc":
            wanted = deployment.edge(source, target).capacity_bytes
            capacity = parse_bytes(wanted, f"edge {source}->{target}.capacity_bytes")
            pools[source] += device_pool_bytes(capacity)
    return pools


def _decoder_of(family: Family, stage: str) -> DecoderConfig:
    """Of the LM stage: the entry's or the talker's."""
    if stage_of(stage) == family.pipeline.entry:
        return family.decoder_config
    assert family.talker_config is not None, f"stage {stage} of a model without a talker"
    return family.talker_config


def _plan_encoders(
    family: Family,
    deployment: Deployment,
    census: WeightCensus,
    memory: DeviceMemory,
    pools: Mapping[str, int],
) -> list[StagePlan]:
    plans = []
    for name, config in deployment.encoders.items():
        dtype = _arithmetic_dtype(config, census)
        width = family.decoder_config.hidden_size
        elements = census.of(stage_of(name))
        plans.append(plan_encoder(name, config, elements, dtype, width, memory, pools.get(name, 0)))
    return plans


def _plan_lms(
    family: Family,
    deployment: Deployment,
    census: WeightCensus,
    contexts: dict[str, int],
    memory: DeviceMemory,
    pools: Mapping[str, int],
) -> list[StagePlan]:
    plans = []
    for name, config in deployment.lms.items():
        dtype = resolve_dtype(config.dtype, config.device_list[0], census)
        share = THINKER_KV_SHARE if stage_of(name) == family.pipeline.entry else TALKER_KV_SHARE
        decoder = _decoder_of(family, name)
        elements = census.of(stage_of(name))
        context, edges = contexts[name], pools.get(name, 0)
        plans += plan_ranks(name, config, decoder, elements, dtype, context, share, memory, edges)
    return plans


def _plan_vocoder(name: str, config: VocoderConfig, census: WeightCensus, memory: DeviceMemory) -> StagePlan:
    """The part that makes sound is small and all arithmetic: float32 unless the file says otherwise."""
    dtype = (
        torch.float32
        if config.dtype == "auto"
        else resolve_dtype(config.dtype, config.device_list[0], census)
    )
    return plan_vocoder(name, config, census.of(stage_of(name)), dtype, memory)


def _arithmetic_dtype(config: EncoderConfig, census: WeightCensus) -> torch.dtype:
    """auto: a tower is all arithmetic, and torch's half precision on a CPU is slow."""
    device = config.device_list[0]
    if config.dtype == "auto" and device == "cpu":
        return torch.float32
    return resolve_dtype(config.dtype, device, census)


def model_folder(options: ServeOptions) -> Path:
    folder = options.model if options.model is not None else DEFAULT_MODEL
    if not (folder / "config.json").is_file():
        hint = "run `make setup` to build the default model" if options.model is None else "want a folder"
        raise OmnistageError(f"no config.json in {folder}: {hint}")
    return folder


def _overrides(options: ServeOptions, family: Family) -> tuple[str, ...]:
    """The few flags that stand for deployment fields, before the explicit ones."""
    pipeline = family.pipeline
    stages = [s for s in pipeline.stages if s.kind not in ("preprocess", "vocoder")]
    flags: list[str] = []
    if options.dtype != "auto":
        flags += [f'{stage.name}.dtype="{options.dtype}"' for stage in stages]
    if options.kv_memory is not None:
        flags.append(f'{pipeline.entry}.kv_memory="{options.kv_memory}"')
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
    _ = plan.family.tokenizer  # refused here rather than after the weights
    pipeline = plan.pipeline
    lines = [
        f"model     {plan.folder.name} ({plan.family.name}), context {plan.context_length} tokens",
        "edges",
    ]
    for edge in pipeline.edges:
        config = plan.deployment.edge(edge.source, edge.target)
        connector = plan.connectors.get((edge.source, edge.target), "shared memory")
        lines.append(
            f"  {edge.source} -> {edge.target}  {edge.payload} over {connector}, capacity {config.capacity}"
        )
    lines += [f"entry     {pipeline.entry}", f"terminals {', '.join(pipeline.terminals)}"]
    lines += ["processes", *_processes(plan), "memory"]
    lines += ["  " + line for line in render_plan(list(plan.stages)).splitlines()]
    lines += [f"  {stage}  on host {host}, which plans it" for stage, host in plan.elsewhere.items()]
    return "\n".join(lines)


def _processes(plan: Plan) -> list[str]:
    """Which stages share a process, a line each."""
    groups = group_stages(plan.deployment, plan.options)
    if not groups:
        stages = [stage.name for stage in plan.pipeline.stages if stage.kind != "preprocess"]
        return [f"  the front process  {', '.join(stages)}"]
    width = max(len(group.name) for group in groups)
    hosts = {group.name: f"  on host {group.host}" if group.host else "" for group in groups}
    return [
        f"  worker {group.name.ljust(width)}  {', '.join(group.stages)}{hosts[group.name]}"
        for group in groups
    ]
