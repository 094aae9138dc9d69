"""Deployment: where each stage runs and how much it may use, as frozen structs."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Literal

import msgspec
import torch

from contracts.specs import MediaLimits
from lm_engine.model import KVDtype, MixedAttention
from stages.options import Connector as Connector
from stages.options import DeploymentError as DeploymentError


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
    """`max_batch_patches` None: on a GPU what fills it, about two pictures of 1024x1024. Eight at once take
    only a tenth less than one after another, and each would wait for all of them.

    `max_tokens_ahead`: with more tokens handed over whose prompts are still to be computed no batch begins,
    where the language model has the same device in the same worker. None: 0 on a GPU, any number on a CPU.

    `cuda_graphs`: on a GPU a batch whose pictures have the sizes of an earlier one costs one launch.
    """

    max_batch_tokens: int = 16384
    max_batch_patches: int | None = None
    max_batch_items: int = 64
    max_tokens_ahead: int | None = None
    embedding_cache: int | str = "256MiB"
    embedding_cache_host: int | str = "256MiB"
    cuda_graphs: bool = True  # else launched kernel by kernel

    @property
    def batch_patches(self) -> int:
        on_gpu = self.device_list[0].startswith("cuda")
        return self.max_batch_patches or (12288 if on_gpu else 65536)


class LMConfig(PlacedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_memory` None = measured: what the memory limit leaves after weights and the largest step.
    `kv_dtype` "fp8": half the bytes a token. `mixed_attention` "walks": the multiprocessors of a Hopper GPU
    share steps with chunks equally, for 16-bit values and heads of 64 or 128; "auto": where they can, else
    "tiles".

    Step bounds that are None follow the device. On a GPU a step is no larger than the largest that is
    captured: it costs one launch, and takes some 20 ms of a model of 3B; larger ones are hardly more
    efficient. Half as much where sequences decode, since that is what their next tokens wait for, and nothing
    but decodes (0) beside an encoder, which has most of the GPU then.
    """

    tensor_parallel: int = 1
    kv_memory: int | str | None = None
    kv_dtype: KVDtype = "auto"
    mixed_attention: MixedAttention = "auto"
    block_size: int = 16
    max_sequences: int | None = None
    max_step_tokens: int | None = None
    mixed_step_tokens: int | None = None  # of a step in which sequences decode
    encoder_step_tokens: int | None = None  # ... while an encoder computes on the same device, in this worker
    max_step_visual_tokens: int | None = None
    long_prefill_cap: int | None = None
    max_resident_embedding_tokens: int = 65536
    max_waiting_requests: int = 1024
    max_context: int | None = None  # below the model's own
    policy: Literal["fcfs", "priority", "fair", "cache_aware"] = "fcfs"
    prefix_cache: bool = True
    overlap: bool = True
    cuda_graphs: bool = True  # steps are captured where the kernels allow; else launched kernel by kernel
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
    mixed_step_tokens: int
    encoder_step_tokens: int
    max_step_visual_tokens: int
    long_prefill_cap: int


def step_bounds(config: LMConfig) -> StepBounds:
    on_gpu = config.device_list[0].startswith("cuda")
    sequences = config.max_sequences or (256 if on_gpu else 32)
    tokens = config.max_step_tokens or max(2048 if on_gpu else 512, sequences)
    mixed = config.mixed_step_tokens or (max(1024, 2 * sequences) if on_gpu else tokens)
    beside_encoder = config.encoder_step_tokens
    if beside_encoder is None:
        beside_encoder = 0 if on_gpu else mixed
    return StepBounds(
        max_sequences=sequences,
        max_step_tokens=tokens,
        mixed_step_tokens=min(mixed, tokens),
        encoder_step_tokens=min(beside_encoder, mixed, tokens),
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


class EdgeConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    target: str
    connector: Literal["auto"] | Connector = "auto"  # see `stages.placement`
    capacity: int = 256  # credits: chunks under way; a step sends one a sequence
    capacity_bytes: int | str = "64MiB"  # of tensors under way


class ServerConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the front process. A request past `max_requests` gets 429.

    A worker whose heartbeat is later than `hang_after_s`, or whose step runs longer than `step_limit_s`, is
    killed and started again, at most `max_restarts` times in five minutes. A request goes on after at most
    `max_replays` deaths of a stage that had it. Speech is made at most `audio_window_s` ahead of what the
    client has taken, and never longer than `max_speech_s`, for which the talker reserves KV until the text
    has ended and says how much it may take.
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


SEPARATOR = "."  # between a stage and the number of its replica


def stage_of(name: str) -> str:
    """The pipeline's stage of something that runs."""
    return name.partition(SEPARATOR)[0]


def running_names(stage: str, config: PlacedConfig) -> tuple[str, ...]:
    """Under which names a stage runs: its own, or `thinker.0`, `thinker.1` for replicas."""
    if config.replicas == 1:
        return (stage,)
    return tuple(f"{stage}{SEPARATOR}{index}" for index in range(config.replicas))


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


MAX_BYTES = 1 << 60  # an exbibyte: what is larger, infinite or no number is a slip


def parse_bytes(value: int | str, where: str) -> int:
    """`256MiB` → bytes. Raises DeploymentError naming `where`."""
    if isinstance(value, int):
        number, unit = float(min(value, MAX_BYTES)), ""
    else:
        text = value.strip()
        digits = text.rstrip("KMGIBkmgib ")
        unit = text[len(digits) :].strip().upper()
        try:
            number = float(digits)
        except ValueError:
            raise DeploymentError(f"{where}: {value!r} is no size; want bytes or e.g. 256MiB") from None
    if unit not in _UNITS or not 0 <= number * _UNITS[unit] < MAX_BYTES:
        raise DeploymentError(f"{where}: {value!r} is no size; want bytes or e.g. 256MiB")
    return int(number * _UNITS[unit])


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
