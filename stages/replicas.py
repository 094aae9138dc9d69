"""Replicas: a stage that runs several times becomes as many stages of the graph that runs, `thinker.0`,
`thinker.1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from contracts.pipeline import Edge, Pipeline
from stages.deployment import Deployment, DeploymentError, LMConfig, PlacedConfig, running_names

T = TypeVar("T", bound=PlacedConfig)
Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class RunningGraph:
    """`pipeline` of what runs; `replicas`: the family's stages that run more than once, and their names."""

    pipeline: Pipeline
    deployment: Deployment
    replicas: dict[str, tuple[str, ...]]


def spread(pipeline: Pipeline, deployment: Deployment) -> RunningGraph:
    """Raises DeploymentError for replicas of a stage that can have none, and for workers that name a stage
    whole that runs several times."""
    replicas: dict[str, tuple[str, ...]] = {}
    for name, config in deployment.placed.items():
        if config.replicas == 1:
            continue
        if pipeline.stage(name).kind != "encoder" and name != pipeline.entry:
            raise DeploymentError(
                f"stage.{name}.replicas: only encoders and {pipeline.entry} can have several"
            )
        replicas[name] = running_names(name, config)
    if not replicas:
        return RunningGraph(pipeline, deployment, {})
    return RunningGraph(
        _spread_pipeline(pipeline, replicas), _spread_deployment(deployment, replicas), replicas
    )


def _spread_pipeline(pipeline: Pipeline, replicas: Names) -> Pipeline:
    def names(stage: str) -> tuple[str, ...]:
        return replicas.get(stage, (stage,))

    stages = tuple(replace(spec, name=name) for spec in pipeline.stages for name in names(spec.name))
    edges = tuple(
        Edge(source, target, edge.payload)
        for edge in pipeline.edges
        for source in names(edge.source)
        for target in names(edge.target)
    )
    terminals = tuple(name for stage in pipeline.terminals for name in names(stage))
    return replace(pipeline, stages=stages, edges=edges, entry=names(pipeline.entry)[0], terminals=terminals)


def _spread_deployment(deployment: Deployment, replicas: Names) -> Deployment:
    return msgspec.structs.replace(
        deployment,
        encoders=_spread_configs(deployment.encoders, replicas),
        lms=_spread_configs(deployment.lms, replicas),
    )


def _spread_configs(configs: dict[str, T], replicas: Names) -> dict[str, T]:
    spread_out: dict[str, T] = {}
    for stage, config in configs.items():
        names = replicas.get(stage)
        if names is None:
            spread_out[stage] = config
            continue
        for name, devices in zip(names, _devices_of(stage, config), strict=True):
            spread_out[name] = msgspec.structs.replace(config, replicas=1, devices=devices)
    return spread_out


def _devices_of(stage: str, config: PlacedConfig) -> list[tuple[str, ...] | str]:
    """Of each replica: the listed ones in turns, or all on the only one there is."""
    size = config.tensor_parallel if isinstance(config, LMConfig) else 1
    devices, count = config.device_list, config.replicas
    if isinstance(config.devices, str) or len(devices) == 1:
        return [config.devices] * count
    if len(devices) != count * size:
        raise DeploymentError(
            f"stage.{stage}.devices: {count} replicas of {size} want one device or {count * size}, there are"
            f" {len(devices)}"
        )
    return [devices[i * size : (i + 1) * size] for i in range(count)]
