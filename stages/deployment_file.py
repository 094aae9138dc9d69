"""Reads a deployment: TOML in, `--set` on top, and every field checked by its name."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from contracts.pipeline import Pipeline
from contracts.specs import MediaLimits
from stages.deployment import (
    ClusterConfig,
    Deployment,
    DeploymentError,
    EdgeConfig,
    EncoderConfig,
    LMConfig,
    PlacedConfig,
    PreprocessConfig,
    RoutingConfig,
    ServerConfig,
    VocoderConfig,
    WorkerConfig,
    running_names,
    step_bounds,
)
from stages.deployment_bounds import check_counts, check_number
from vocoder.ramp import RampConfig

T = TypeVar("T", bound=msgspec.Struct)
MIN_BATCH_FRAMES = RampConfig().max_chunk_frames
STEP_FIELDS = (
    "block_size",
    "max_sequences",
    "max_step_tokens",
    "mixed_step_tokens",
    "max_step_visual_tokens",
    "long_prefill_cap",
    "max_resident_embedding_tokens",
    "max_waiting_requests",
    "max_context",
)
SERVER_FIELDS = (
    "max_requests",
    "request_timeout_s",
    "threads",
    "heartbeat_s",
    "hang_after_s",
    "step_limit_s",
    "audio_window_s",
    "max_speech_s",
)
SECTIONS = ("preprocess", "limits", "server", "routing", "cluster")


def load_deployment(
    pipeline: Pipeline,
    file: Path | None = None,
    overrides: tuple[str, ...] = (),
    text: str | None = None,
) -> Deployment:
    """Reads `text`, or `file` (or defaults for one machine), applies `PATH=VALUE` overrides, checks it
    against
    the pipeline.

    TOML: `[stage.NAME]`, `[[worker]]`, `[[edge]]`, `[preprocess]`, `[limits]`, `[server]`, `[routing]`,
    `[cluster]`. A path in an override is `NAME.field` of a stage or section.
    """
    data: dict[str, Any] = {}
    if file is not None and text is None:
        try:
            text = file.read_text()
        except OSError as error:
            raise DeploymentError(f"deployment {file}: {(error.strerror or str(error)).lower()}") from error
        except UnicodeDecodeError:
            raise DeploymentError(f"deployment {file}: not UTF-8") from None
    if text is not None:
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers and lists beyond Python's bounds
            raise DeploymentError(f"deployment {file}: {error}") from error
    _require_tables(data)
    for override in overrides:
        _apply_override(data, override, pipeline)
    deployment = _convert(data, pipeline)
    _validate(deployment, pipeline)
    return deployment


def _apply_override(data: dict[str, Any], override: str, pipeline: Pipeline) -> None:
    path, equals, text = override.partition("=")
    section, dot, field = path.strip().partition(".")
    if not equals or not dot or not field or "." in field:
        raise DeploymentError(f"--set {override!r}: want NAME.field=value")
    if section in SECTIONS:
        table = data.setdefault(section, {})
    elif section in {spec.name for spec in pipeline.stages}:
        table = data.setdefault("stage", {}).setdefault(section, {})
    else:
        known = [*SECTIONS, *(s.name for s in pipeline.stages if s.kind != "preprocess")]
        raise DeploymentError(
            f"--set {override!r}: no stage or section {section!r}; there are {', '.join(known)}"
        )
    table[field] = _literal(text.strip())


def _literal(text: str) -> Any:
    """A TOML value, or the bare text where it is none (`cuda:1`)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _require_tables(data: dict[str, Any]) -> None:
    """What must be a table is one, and what must be an array of tables."""
    tables = {name: data[name] for name in ("stage", *SECTIONS) if name in data}
    if isinstance(tables.get("stage"), dict):
        tables |= {f"stage.{name}": table for name, table in tables["stage"].items()}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise DeploymentError(f"{name}: must be a table, is {table!r}")
    for name in ("worker", "edge"):
        array = data.get(name, [])
        if not isinstance(array, list) or not all(isinstance(entry, dict) for entry in array):
            raise DeploymentError(f"{name}: must be an array of tables, [[{name}]]")


def _convert(data: dict[str, Any], pipeline: Pipeline) -> Deployment:
    unknown = set(data) - {"stage", "worker", "edge", *SECTIONS}
    if unknown:
        raise DeploymentError(f"deployment: unknown section {sorted(unknown)[0]!r}")
    stages: dict[str, Any] = data.get("stage", {})
    names = {spec.name for spec in pipeline.stages if spec.kind != "preprocess"}
    for name in stages:
        if name not in names:
            raise DeploymentError(
                f"stage.{name}: the pipeline has no such stage; it has {', '.join(sorted(names))}"
            )
    encoders = {
        s.name: _section(stages.get(s.name, {}), EncoderConfig, f"stage.{s.name}")
        for s in pipeline.of_kind("encoder")
    }
    lms = {
        s.name: _section(stages.get(s.name, {}), LMConfig, f"stage.{s.name}") for s in pipeline.of_kind("lm")
    }
    vocoders = {
        s.name: _section(stages.get(s.name, {}), VocoderConfig, f"stage.{s.name}")
        for s in pipeline.of_kind("vocoder")
    }
    return Deployment(
        preprocess=_section(data.get("preprocess", {}), PreprocessConfig, "preprocess"),
        encoders=encoders,
        lms=lms,
        vocoders=vocoders,
        workers=tuple(
            _section(w, WorkerConfig, f"worker[{i}]") for i, w in enumerate(data.get("worker", []))
        ),
        edges=tuple(_section(e, EdgeConfig, f"edge[{i}]") for i, e in enumerate(data.get("edge", []))),
        limits=_section(data.get("limits", {}), MediaLimits, "limits"),
        server=_section(data.get("server", {}), ServerConfig, "server"),
        routing=_section(data.get("routing", {}), RoutingConfig, "routing"),
        cluster=_section(data.get("cluster", {}), ClusterConfig, "cluster"),
    )


def _section(data: Any, cls: type[T], where: str) -> T:
    fields = {f.name for f in msgspec.structs.fields(cls)}
    if isinstance(data, dict) and (unknown := sorted(set(data) - fields)):
        raise DeploymentError(f"{where}.{unknown[0]}: unknown field; there are {', '.join(sorted(fields))}")
    for field, value in data.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DeploymentError(f"{where}.{field}: must be a finite number, is {value}")
        check_number(f"{where}.{field}", value)
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise DeploymentError(f"{where}: {error}") from error


def _validate(deployment: Deployment, pipeline: Pipeline) -> None:
    check_counts(deployment)  # first: the checks below make lists of some of them
    for name, stage in deployment.placed.items():
        _validate_placed(name, stage)
    for name, lm in deployment.lms.items():
        _positive(f"stage.{name}", lm, STEP_FIELDS)
        _not_negative(f"stage.{name}", lm, ("encoder_step_tokens",))
        bounds = step_bounds(lm)
        sizes = {
            "max_step_tokens": bounds.max_step_tokens,
            "mixed_step_tokens": bounds.mixed_step_tokens,
        }
        for field, tokens in sizes.items():
            if tokens < bounds.max_sequences:
                raise DeploymentError(
                    f"stage.{name}.{field}: {tokens} is below max_sequences, {bounds.max_sequences}"
                )
        _validate_ranks(name, lm, pipeline)
    for name, encoder in deployment.encoders.items():
        _positive(f"stage.{name}", encoder, ("max_batch_tokens", "max_batch_patches", "max_batch_items"))
        if (encoder.max_tokens_ahead or 0) < 0:
            raise DeploymentError(f"stage.{name}.max_tokens_ahead: at least 0, is {encoder.max_tokens_ahead}")
    for name, vocoder in deployment.vocoders.items():
        _positive(f"stage.{name}", vocoder, ("max_streams", "max_batch_rows"))
        if vocoder.max_batch_frames < MIN_BATCH_FRAMES:
            raise DeploymentError(
                f"stage.{name}.max_batch_frames: at least {MIN_BATCH_FRAMES}, is {vocoder.max_batch_frames}"
            )
    for edge in deployment.edges:
        if (edge.source, edge.target) not in {(e.source, e.target) for e in pipeline.edges}:
            raise DeploymentError(f"edge {edge.source}->{edge.target}: the pipeline has no such edge")
        _positive(f"edge {edge.source}->{edge.target}", edge, ("capacity",))
        if edge.connector not in ("auto", "shm") and edge.source not in deployment.placed:
            raise DeploymentError(
                f"edge {edge.source}->{edge.target}.connector: features travel by shared memory, not by"
                f" {edge.connector!r}"
            )
    _positive("server", deployment.server, SERVER_FIELDS)
    _not_negative("server", deployment.server, ("max_restarts", "max_replays"))
    _positive("preprocess", deployment.preprocess, ("max_queued_jobs", "index_items", "auto_max_pixels"))
    _not_negative("preprocess", deployment.preprocess, ("workers",))
    numbers = [name for name, value in msgspec.structs.asdict(deployment.limits).items() if _is_number(value)]
    _positive("limits", deployment.limits, [name for name in numbers if name != "max_redirects"])
    _not_negative("limits", deployment.limits, ("max_redirects",))
    _validate_workers(deployment)
    _positive("routing", deployment.routing, ("expected_output",))
    _not_negative("routing", deployment.routing, ("margin_tokens",))


def _validate_ranks(name: str, lm: LMConfig, pipeline: Pipeline) -> None:
    size = lm.tensor_parallel
    _positive(f"stage.{name}", lm, ("tensor_parallel",))
    if lm.replicas > 1:
        return  # each replica's devices are checked when they are shared out
    if size > 1 and name != pipeline.entry:
        raise DeploymentError(f"stage.{name}.tensor_parallel: only {pipeline.entry} can be divided, not this")
    if len(set(lm.rank_devices)) != size and set(lm.rank_devices) != {"cpu"}:
        raise DeploymentError(
            f"stage.{name}.devices: tensor_parallel = {size} wants {size} different devices, there are"
            f" {', '.join(lm.rank_devices)}"
        )


def _validate_placed(name: str, stage: PlacedConfig) -> None:
    if not stage.device_list:
        raise DeploymentError(f"stage.{name}.devices: at least one device")
    devices = (stage.devices,) if isinstance(stage.devices, str) else stage.devices
    for device in devices:
        kind, _, index = device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not (index.isascii() and index.isdigit())):
            raise DeploymentError(
                f"stage.{name}.devices: {device!r} is no device; want auto, cpu, cuda or cuda:N"
            )
    _positive(f"stage.{name}", stage, ("replicas",))


def _validate_workers(deployment: Deployment) -> None:
    placed: dict[str, str] = {}
    names = {name for stage, config in deployment.placed.items() for name in running_names(stage, config)}
    for worker in deployment.workers:
        for stage in worker.stages:
            if stage not in names:
                known = ", ".join(sorted(names))
                raise DeploymentError(f"worker {worker.name!r}: there is no stage {stage!r}, only {known}")
            if stage in placed:
                raise DeploymentError(f"worker {worker.name!r}: stage {stage!r} is also in {placed[stage]!r}")
            placed[stage] = worker.name
    names_given = [worker.name for worker in deployment.workers]
    for name in names_given:
        if names_given.count(name) > 1:
            raise DeploymentError(f"worker {name!r}: the name is given twice")
    away = [worker for worker in deployment.workers if worker.host]
    if away and deployment.cluster.address in ("", "0.0.0.0", "::"):
        raise DeploymentError(
            f"cluster.address: worker {away[0].name!r} is on host {away[0].host!r}, which wants"
            " the address of this machine as it is reached from there"
        )
    if not 0 <= deployment.cluster.port < 1 << 16:
        raise DeploymentError(f"cluster.port: want 0 to 65535, is {deployment.cluster.port}")
    if deployment.workers and (missing := sorted(names - set(placed))):
        raise DeploymentError(f"worker: stage {missing[0]!r} is in no worker")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_negative(where: str, config: msgspec.Struct, fields: Sequence[str]) -> None:
    for field in fields:
        value = msgspec.structs.asdict(config)[field]
        if value is not None and value < 0:
            raise DeploymentError(f"{where}.{field}: must not be negative, is {value}")


def _positive(where: str, config: msgspec.Struct, fields: Sequence[str]) -> None:
    for field in fields:
        value = msgspec.structs.asdict(config)[field]
        if value is not None and value <= 0:
            raise DeploymentError(f"{where}.{field}: must be positive, is {value}")
