"""Deployment: where each stage runs and how much it may use. TOML in, frozen structs out, `--set` on top."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch

from contracts.pipeline import Pipeline
from contracts.specs import MediaLimits
from vocoder.ramp import RampConfig

T = TypeVar("T", bound=msgspec.Struct)


class DeploymentError(ValueError):
    """The deployment is wrong; the message names the stage or section and the field."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PreprocessConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPU pool. `workers` 0 = one per core but one, at least one."""

    workers: int = 0
    max_queued_jobs: int = 256
    arena_bytes: int | str = "512MiB"
    index_items: int = 65536
    digest: Literal["xxh3", "sha256"] = "xxh3"
    resize: Literal["auto", "pillow"] = "auto"  # auto: in C where there is a compiler, to the same bits
    auto_max_pixels: int | None = None  # resolution of detail:auto under load


class PlacedConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every GPU-able stage shares. `devices` auto = the first GPU, else the CPU. `dtype` auto = the
    checkpoint's."""

    devices: tuple[str, ...] | str = "auto"
    replicas: int = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory: int | str | float | None = None  # bytes, "2GiB", or a fraction of the device

    @property
    def device_list(self) -> tuple[str, ...]:
        devices = (self.devices,) if isinstance(self.devices, str) else self.devices
        best = "cuda:0" if torch.cuda.is_available() else "cpu"
        return tuple(best if device == "auto" else device for device in devices)


class EncoderConfig(PlacedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_batch_tokens: int = 16384
    max_batch_items: int = 64
    embedding_cache: int | str = "256MiB"
    embedding_cache_host: int | str = "256MiB"


class LMConfig(PlacedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_memory` None = measured: what the memory limit leaves after weights and the largest step.

    Step bounds that are None follow the device: a GPU takes large steps, a CPU small ones.
    """

    tensor_parallel: int = 1
    kv_memory: int | str | None = None
    block_size: int = 16
    max_sequences: int | None = None
    max_step_tokens: int | None = None
    max_step_visual_tokens: int | None = None
    long_prefill_cap: int | None = None
    max_resident_embedding_tokens: int = 65536
    max_waiting_requests: int = 1024
    max_context: int | None = None  # below the model's own
    policy: Literal["fcfs", "priority", "fair", "cache_aware"] = "fcfs"
    prefix_cache: bool = True
    overlap: bool = True
    kernels: Literal["auto", "reference", "native", "triton"] = "auto"

    @property
    def rank_devices(self) -> tuple[str, ...]:
        """A device for each rank: as listed; the first GPUs for "auto"; or all on the CPU."""
        devices, size = self.device_list, self.tensor_parallel
        if size == 1:
            return devices[:1]
        if self.devices == "auto" and devices == ("cuda:0",):
            return tuple(f"cuda:{index}" for index in range(size))
        return devices * size if devices == ("cpu",) else devices


class StepBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a step, resolved."""

    max_sequences: int
    max_step_tokens: int
    max_step_visual_tokens: int
    long_prefill_cap: int


def step_bounds(config: LMConfig) -> StepBounds:
    on_gpu = config.device_list[0].startswith("cuda")
    sequences = config.max_sequences or (256 if on_gpu else 32)
    tokens = config.max_step_tokens or max(8192 if on_gpu else 512, sequences)
    return StepBounds(
        max_sequences=sequences,
        max_step_tokens=tokens,
        max_step_visual_tokens=config.max_step_visual_tokens or tokens,
        long_prefill_cap=config.long_prefill_cap or tokens,
    )


class VocoderConfig(PlacedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_streams`: answers spoken at once. A forward takes at most `max_batch_rows` of them and
    `max_batch_frames` frames in all."""

    max_streams: int = 256
    max_batch_rows: int = 32
    max_batch_frames: int = 256


class WorkerConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`host`: a name for the machine it runs on, "" for the front process's own. On another one it is started
    there by `omnistage worker`."""

    name: str
    stages: tuple[str, ...]
    threads: int | None = None
    host: str = ""


class ClusterConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`address`: of the front process's machine, as the workers' machines reach it. `port` 0: any free
    one."""

    address: str = ""
    port: int = 0


Connector = Literal["inproc", "shm", "cuda_ipc", "nixl"]


class EdgeConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    target: str
    connector: Literal["auto"] | Connector = "auto"  # see `stages.placement`
    capacity: int = 64  # credits: chunks under way
    capacity_bytes: int | str = "64MiB"  # of tensors under way


class ServerConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the front process. A request past `max_requests` gets 429.

    A worker whose heartbeat is later than `hang_after_s`, or whose step runs longer than `step_limit_s`, is
    killed and started again, at most `max_restarts` times in five minutes. A request goes on after at most
    `max_replays` deaths of a stage that had it. Speech is made at most `audio_window_s` ahead of what the
    client has taken, and never longer than `max_speech_s`, for which the talker reserves KV.
    """

    max_requests: int = 1024
    request_timeout_s: float | None = None
    threads: int | None = None
    heartbeat_s: float = 1.0
    hang_after_s: float = 10.0
    step_limit_s: float = 120.0
    max_restarts: int = 20
    max_replays: int = 6
    audio_window_s: float = 20.0
    max_speech_s: float = 300.0


class RoutingConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests find a replica. One whose cache covers more of a prompt is taken although another has less
    to do, unless it has more than `margin_tokens` more to do. `expected_output`: tokens that a sample is
    taken to need, if its limit is not lower. `by_prefix` false: whoever has least to do."""

    margin_tokens: int = 4096
    expected_output: int = 256
    by_prefix: bool = True


class Deployment(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    preprocess: PreprocessConfig = PreprocessConfig()
    encoders: dict[str, EncoderConfig] = {}
    lms: dict[str, LMConfig] = {}
    vocoders: dict[str, VocoderConfig] = {}
    workers: tuple[WorkerConfig, ...] = ()
    cluster: ClusterConfig = ClusterConfig()
    edges: tuple[EdgeConfig, ...] = ()
    limits: MediaLimits = MediaLimits()
    server: ServerConfig = ServerConfig()
    routing: RoutingConfig = RoutingConfig()

    @property
    def placed(self) -> dict[str, PlacedConfig]:
        """Every stage but preprocessing, in the order of their loading."""
        return {**self.encoders, **self.lms, **self.vocoders}

    def without(self, stages: Collection[str]) -> Deployment:
        """Of the other stages alone."""
        return msgspec.structs.replace(
            self,
            encoders={name: config for name, config in self.encoders.items() if name not in stages},
            lms={name: config for name, config in self.lms.items() if name not in stages},
            vocoders={name: config for name, config in self.vocoders.items() if name not in stages},
        )

    def edge(self, source: str, target: str) -> EdgeConfig:
        """Of a pipeline's edge, or of one between replicas."""
        source, target = stage_of(source), stage_of(target)
        for edge in self.edges:
            if (edge.source, edge.target) == (source, target):
                return edge
        return EdgeConfig(source=source, target=target)


MIN_BATCH_FRAMES = RampConfig().max_chunk_frames
STEP_FIELDS = (
    "block_size",
    "max_sequences",
    "max_step_tokens",
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
SEPARATOR = "."  # between a stage and the number of its replica
SECTIONS = ("preprocess", "limits", "server", "routing", "cluster")


def load_deployment(
    pipeline: Pipeline,
    file: Path | None = None,
    overrides: tuple[str, ...] = (),
    text: str | None = None,
) -> Deployment:
    """Reads `text`, or `file` (or defaults for one machine), applies `PATH=VALUE` overrides, checks it
    against the
    pipeline.

    TOML: `[stage.NAME]`, `[[worker]]`, `[[edge]]`, `[preprocess]`, `[limits]`, `[server]`, `[routing]`,
    `[cluster]`. A
    path in an
    override
    is `NAME.field` of a stage or section.
    """
    data: dict[str, Any] = {}
    if file is not None and text is None:
        try:
            text = file.read_text()
        except OSError as error:
            raise DeploymentError(f"deployment {file}: {error}") from error
    if text is not None:
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise DeploymentError(f"deployment {file}: {error}") from error
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
    except tomllib.TOMLDecodeError:
        return text


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
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise DeploymentError(f"{where}: {error}") from error


def _validate(deployment: Deployment, pipeline: Pipeline) -> None:
    for name, stage in deployment.placed.items():
        _validate_placed(name, stage)
    for name, lm in deployment.lms.items():
        _positive(f"stage.{name}", lm, STEP_FIELDS)
        bounds = step_bounds(lm)
        if bounds.max_step_tokens < bounds.max_sequences:
            raise DeploymentError(
                f"stage.{name}.max_step_tokens: {bounds.max_step_tokens} is below max_sequences,"
                f" {bounds.max_sequences}"
            )
        _validate_ranks(name, lm, pipeline)
    for name, encoder in deployment.encoders.items():
        _positive(f"stage.{name}", encoder, ("max_batch_tokens", "max_batch_items"))
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
        if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()):
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
    if deployment.workers and (missing := sorted(names - set(placed))):
        raise DeploymentError(f"worker: stage {missing[0]!r} is in no worker")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_negative(where: str, config: msgspec.Struct, fields: Sequence[str]) -> None:
    for field in fields:
        value = msgspec.structs.asdict(config)[field]
        if value is not None and value < 0:
            raise DeploymentError(f"{where}.{field}: must not be negative, is {value}")


def stage_of(name: str) -> str:
    """The pipeline's stage of something that runs."""
    return name.partition(SEPARATOR)[0]


def running_names(stage: str, config: PlacedConfig) -> tuple[str, ...]:
    """Under which names a stage runs: its own, or `thinker.0`, `thinker.1` for replicas."""
    if config.replicas == 1:
        return (stage,)
    return tuple(f"{stage}{SEPARATOR}{index}" for index in range(config.replicas))


def _positive(where: str, config: msgspec.Struct, fields: Sequence[str]) -> None:
    for field in fields:
        value = msgspec.structs.asdict(config)[field]
        if value is not None and value <= 0:
            raise DeploymentError(f"{where}.{field}: must be positive, is {value}")


_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def parse_bytes(value: int | str, where: str) -> int:
    """`256MiB` → bytes. Raises DeploymentError naming `where`."""
    if isinstance(value, int):
        number, unit = float(value), ""
    else:
        text = value.strip()
        digits = text.rstrip("KMGIBkmgib ")
        unit = text[len(digits) :].strip().upper()
        try:
            number = float(digits)
        except ValueError:
            raise DeploymentError(f"{where}: {value!r} is no size; want bytes or e.g. 256MiB") from None
    if unit not in _UNITS or number < 0:
        raise DeploymentError(f"{where}: {value!r} is no size; want bytes or e.g. 256MiB")
    return int(number * _UNITS[unit])


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
