"""Planning: everything decided before a weight loads. Opens the checkpoint, reads the deployment, plans
memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from contracts.errors import OmnistageError
from model_families.census import WeightCensus, take_census
from model_families.family import Family
from model_families.registry import open_family
from stages.deployment import Deployment, load_deployment
from stages.memory_plan import StagePlan, check_plan, plan_encoder, plan_lm, render_plan
from stages.options import ServeOptions

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

    @property
    def chunk_edges(self) -> tuple[tuple[str, str], ...]:
        """(source, target) of the edges that carry chunks; features travel through the preprocessing
        arena."""
        return tuple((e.source, e.target) for e in self.family.pipeline.edges if e.payload != "features")

    def stage(self, name: str) -> StagePlan:
        return next(plan for plan in self.stages if plan.stage == name)


def make_plan(options: ServeOptions, *, check_memory: bool = True) -> Plan:
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
        elements = census.of(name)
        plans.append(plan_lm(name, lm, family.decoder_config, elements, dtype, context_length))
    for name, encoder in deployment.encoders.items():
        dtype = resolve_dtype(encoder.dtype, encoder.device_list[0], census)
        if encoder.dtype == "auto" and encoder.device_list[0] == "cpu":
            dtype = torch.float32  # a tower is all arithmetic, and torch's half precision on a CPU is slow
        width = family.decoder_config.hidden_size
        plans.append(plan_encoder(name, encoder, census.of(name), dtype, width))
    if check_memory:
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
