"""The memory plan: what each stage will take of its device, from shapes alone, before any weight loads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from lm_engine.graph_memory import planned_graph_bytes
from lm_engine.model import DecoderConfig
from lm_engine.parallel import shard_config
from model_families.audio.encoder import GRAPHED_FRAMES
from stages.deployment import (
    Deployment,
    DeploymentError,
    EncoderConfig,
    LMConfig,
    PlacedConfig,
    VocoderConfig,
    parse_bytes,
    stage_of,
    step_bounds,
)

THINKER_KV_SHARE = 0.4
TALKER_KV_SHARE = 0.15
CUDA_SHARE = 0.9  # of a GPU's free memory; contexts and kernels live in the rest
# Of Qwen3-Omni's decoder, by its tensors' lives: 1,920 samples a frame, of ~100 channels; of a stream the
# attention
# window and the convolutions' tails. A smaller decoder takes about as much less as it has weights.
VOCODER_VALUES_PER_FRAME = 1_150_000
VOCODER_VALUES_PER_FORWARD = 30_000_000
VOCODER_VALUES_PER_STREAM = 1_303_712
VOCODER_WEIGHTS = 216_000_000
GIB = 1 << 30
MIB = 1 << 20
# A tower's forward at its widest: that of Qwen2-VL's 665 million weights holds four tensors of its MLP's
# inner width there, and the residual stream. A narrower one holds about as much less as the root of its
# weights.
ENCODER_VALUES_PER_PATCH = 24_000
AUDIO_VALUES_PER_FRAME = 16_000
ENCODER_WEIGHTS = 665_000_000
# At most: larger batches are launched, which the GPU's work hides.
ENCODER_GRAPH_BYTES = 512 * MIB
AUDIO_GRAPH_BYTES = 256 * MIB
ENCODER_LIBRARY_BYTES = 32 * MIB  # of products, in the memory that graphs share
ENCODER_LAYOUT_BYTES = 32 * MIB  # of graphs themselves, and of what they read beside pixels and weights


@dataclass(frozen=True)
class StagePlan:
    """Bytes by purpose; `limit` is what the stage may use in all, None = unbounded by the file."""

    stage: str
    device: str
    dtype: torch.dtype
    weights: int
    cache: int  # KV blocks or embedding cache
    activations: int
    limit: int | None
    rank: int = 0  # of a tensor-parallel stage
    kv_share: float = 0.0  # weight of its claim on what a GPU has left; 0: the cache is as large as it says
    num_kv_blocks: int = 0  # as an earlier start of the stage has measured; 0: none has
    starts_again: bool = False  # in a worker that replaces one that was ready: requests may wait for it
    graphs: int = 0  # memory of CUDA graphs
    edges: int = 0  # device pools of the edges that it sends over

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.graphs + self.edges

    @property
    def claim(self) -> int:
        """Of a GPU, that nobody else may have: what it needs, or what it was told it may use. The host is
        shared with everything else, and a bound there is only a bound."""
        return max(self.total, self.limit or 0) if self.device.startswith("cuda") else self.total


def check_devices(deployment: Deployment) -> None:
    """Refuses a GPU that this machine has not, before anything asks it for its memory."""
    num_gpus = torch.cuda.device_count()
    for name, stage in deployment.placed.items():
        for device in stage.device_list:
            kind, _, index = device.partition(":")
            if kind == "cuda" and int(index or 0) >= num_gpus:
                there = f"cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "no CUDA device"
                raise DeploymentError(
                    f"stage.{name}.devices: no {device} on this machine; it has {there}"
                    " (`omnistage plan --gpu-memory 140GiB` plans for a machine that has it)"
                )


class DeviceMemory:
    """Bytes that the stages may share out: of a GPU what was free before any of them loaded (so that a worker
    that starts again plans as the first one did), of the host what is available now."""

    def __init__(self, free_at_start: Mapping[str, int]) -> None:
        self.free_at_start = dict(free_at_start)  # by GPU

    @classmethod
    def ask(cls, devices: Iterable[str]) -> DeviceMemory:
        return cls({gpu: int(torch.cuda.mem_get_info(torch.device(gpu))[0]) for gpu in _gpus(devices)})

    @classmethod
    def assume(cls, devices: Iterable[str], num_bytes: int) -> DeviceMemory:
        """Of a machine that is not this one, with so much free on every GPU."""
        return cls(dict.fromkeys(_gpus(devices), num_bytes))

    def of(self, device: str) -> int:
        return self.free_at_start[device] if device.startswith("cuda") else host_bytes()


def _gpus(devices: Iterable[str]) -> list[str]:
    return sorted({device for device in devices if device.startswith("cuda")})


def host_bytes() -> int:
    """Available memory of the host."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def stage_limit(name: str, config: PlacedConfig, device: str, memory: DeviceMemory) -> int | None:
    wanted, where = config.memory, f"stage.{name}.memory"
    if wanted is None:
        return None
    if isinstance(wanted, float) and wanted < MIB:
        if not 0 < wanted <= 1:
            raise DeploymentError(
                f"{where}: a fraction of the device is above 0 and at most 1, is {wanted};"
                ' bytes are written like "48GiB"'
            )
        return int(memory.of(device) * wanted)
    num_bytes = parse_bytes(int(wanted) if isinstance(wanted, float) else wanted, where)
    if num_bytes <= 0:
        raise DeploymentError(f"{where}: must be positive")
    return num_bytes


def plan_ranks(
    name: str,
    config: LMConfig,
    decoder: DecoderConfig,
    weight_elements: int,
    dtype: torch.dtype,
    context: int,
    kv_share: float,
    memory: DeviceMemory,
    edges: int = 0,
) -> list[StagePlan]:
    """One plan a rank, the first of which sends. Each holds the embeddings and the head, and its share of
    everything else."""
    size = config.tensor_parallel
    if size == 1:
        return [plan_lm(name, config, decoder, weight_elements, dtype, context, kv_share, memory, 0, edges)]
    share = shard_config(decoder, size)
    replicated = decoder.vocab_size * decoder.hidden_size * (1 if decoder.tie_embeddings else 2)
    elements = replicated + (weight_elements - replicated) // size
    if len(set(config.rank_devices)) == 1:  # of the CPU's memory, which they have in common
        kv_share /= size
    return [
        plan_lm(name, config, share, elements, dtype, context, kv_share, memory, rank, 0 if rank else edges)
        for rank in range(size)
    ]


def plan_lm(
    name: str,
    config: LMConfig,
    decoder: DecoderConfig,
    weight_elements: int,
    dtype: torch.dtype,
    context: int,
    share: float,
    memory: DeviceMemory,
    rank: int = 0,
    edges: int = 0,
) -> StagePlan:
    """KV for one request of full length is the least a stage must hold; more is used when memory allows it.
    `share`: of the free memory, for the KV of a stage without a limit (`share_out` divides that of a GPU)."""
    device = config.rank_devices[rank]
    limit = stage_limit(name, config, device, memory)
    free_share = 0.0
    weights = weight_elements * dtype.itemsize
    bounds = step_bounds(config)
    logits = bounds.max_sequences * decoder.vocab_size * 4
    hidden = bounds.max_step_tokens * max(decoder.intermediate_size * 2, decoder.hidden_size * 4) * 4
    graphs = 0
    if device.startswith("cuda") and config.cuda_graphs and config.kernels in ("auto", "triton"):
        graphs = planned_graph_bytes(decoder, dtype, max_sequences=bounds.max_sequences)
    if config.kv_memory is not None:
        cache = parse_bytes(config.kv_memory, f"stage.{name}.kv_memory")
        _check_kv(name, cache, decoder.kv_bytes_per_token(dtype, config.kv_dtype), config.block_size, context)
    elif limit is None and device.startswith("cuda"):
        cache, free_share = decoder.kv_bytes_per_token(dtype, config.kv_dtype) * context, share
    else:
        free = int(memory.of(device) * share)
        room = free if limit is None else limit - weights - logits - hidden - graphs - edges
        cache = default_kv_bytes(config, decoder, dtype, context, room)
    return StagePlan(
        name,
        device,
        dtype,
        weights,
        cache,
        logits + hidden,
        limit,
        rank,
        free_share,
        graphs=graphs,
        edges=edges,
    )


def _check_kv(name: str, cache: int, per_token: int, block_size: int, context: int) -> None:
    num_blocks = -(-context // block_size) + 1  # one more is the scratch block
    needed = num_blocks * block_size * per_token
    if cache < needed:
        raise DeploymentError(
            f"stage.{name}.kv_memory: {_size(cache)} hold no context of {context} tokens, which needs"
            f" {_size(needed)}; raise it, or lower stage.{name}.max_context"
        )


def default_kv_bytes(
    config: LMConfig, decoder: DecoderConfig, dtype: torch.dtype, context: int, room: int
) -> int:
    """What `max_sequences` requests of a quarter context want, at most `room`."""
    per_token = decoder.kv_bytes_per_token(dtype, config.kv_dtype)
    wanted = per_token * max(context, step_bounds(config).max_sequences * context // 4)
    return max(min(wanted, room), 0)


def share_out(plans: list[StagePlan], memory: DeviceMemory) -> list[StagePlan]:
    """Gives KV caches without a size of their own what their GPU has left, by their shares."""
    shared = []
    for plan in plans:
        if plan.kv_share:
            on_device = [other for other in plans if other.device == plan.device]
            left = int(memory.of(plan.device) * CUDA_SHARE) - sum(other.claim for other in on_device)
            claim = plan.kv_share / sum(other.kv_share for other in on_device)
            plan = replace(plan, cache=plan.cache + max(0, int(left * claim)))
        shared.append(plan)
    return shared


def plan_encoder(
    name: str,
    config: EncoderConfig,
    weight_elements: int,
    dtype: torch.dtype,
    width: int,
    memory: DeviceMemory,
    edges: int = 0,
) -> StagePlan:
    device = config.device_list[0]
    cache = parse_bytes(config.embedding_cache, f"stage.{name}.embedding_cache")
    activations = config.max_batch_tokens * width * dtype.itemsize * 8
    limit = stage_limit(name, config, device, memory)
    weights = weight_elements * dtype.itemsize
    graphs = 0
    if device.startswith("cuda") and config.cuda_graphs:
        graphs = _encoder_graphs(stage_of(name), config, weight_elements, dtype)
        if limit is not None:  # they save time, and are no reason to refuse a stage
            graphs = min(graphs, max(0, limit - weights - cache - activations - edges))
    return StagePlan(name, device, dtype, weights, cache, activations, limit, graphs=graphs, edges=edges)


def _encoder_graphs(stage: str, config: EncoderConfig, weight_elements: int, dtype: torch.dtype) -> int:
    """Of the largest batch, but not more than is worth it."""
    if stage == "vision":
        values, most = config.batch_patches * ENCODER_VALUES_PER_PATCH, ENCODER_GRAPH_BYTES
    else:
        values, most = GRAPHED_FRAMES * AUDIO_VALUES_PER_FRAME, AUDIO_GRAPH_BYTES
    narrower = min(1.0, weight_elements / ENCODER_WEIGHTS) ** 0.5
    shared = min(int(values * narrower) * dtype.itemsize, most) + ENCODER_LIBRARY_BYTES
    return shared + ENCODER_LAYOUT_BYTES


def tower_graph_bytes(plan: StagePlan) -> int:
    """Of an encoder's, what all graphs share."""
    return max(0, plan.graphs - ENCODER_LAYOUT_BYTES)


def plan_vocoder(
    name: str, config: VocoderConfig, weight_elements: int, dtype: torch.dtype, memory: DeviceMemory
) -> StagePlan:
    """What a forward needs besides its weights goes with the PCM it makes. On a GPU the largest one's twice:
    for graphs, and for forwards that none holds."""
    device = config.device_list[0]
    value_bytes = dtype.itemsize * min(1.0, weight_elements / VOCODER_WEIGHTS)
    values = VOCODER_VALUES_PER_FORWARD + config.max_batch_frames * VOCODER_VALUES_PER_FRAME
    activations = int(values * value_bytes)
    states = int(config.max_streams * VOCODER_VALUES_PER_STREAM * value_bytes)
    limit = stage_limit(name, config, device, memory)
    graphs = activations if device.startswith("cuda") else 0
    weights = weight_elements * dtype.itemsize
    return StagePlan(name, device, dtype, weights, states, activations, limit, graphs=graphs)


def check_plan(plans: list[StagePlan], memory: DeviceMemory) -> None:
    """Refuses an over-commit, naming the stages. Raises DeploymentError."""
    for plan in plans:
        if plan.limit is not None and plan.total > plan.limit:
            raise DeploymentError(
                f"stage.{plan.stage}.memory: needs {_size(plan.total)} (weights {_size(plan.weights)}, cache"
                f" {_size(plan.cache)}, activations {_size(plan.activations)}, graphs {_size(plan.graphs)},"
                f" edges {_size(plan.edges)}), may use {_size(plan.limit)}"
            )
    for device in {plan.device for plan in plans}:
        on_device = [plan for plan in plans if plan.device == device]
        total, free = sum(plan.claim for plan in on_device), memory.of(device)
        if total > free:
            parts = ", ".join(
                f"{plan.stage} {_size(plan.claim)}{' by its `memory`' if plan.claim > plan.total else ''}"
                for plan in on_device
            )
            raise DeploymentError(f"device {device}: {_size(total)} wanted ({parts}), {_size(free)} free")


def render_plan(plans: list[StagePlan]) -> str:
    rows: list[tuple[str, ...]] = [
        ("stage", "device", "dtype", "weights", "cache", "activations", "graphs", "edges", "total", "limit")
    ]
    for p in plans:
        dtype = str(p.dtype).removeprefix("torch.")
        limit = "-" if p.limit is None else _size(p.limit)
        sizes = tuple(_size(n) for n in (p.weights, p.cache, p.activations, p.graphs, p.edges, p.total))
        name = f"{p.stage}/{p.rank}" if p.rank else p.stage
        rows.append((name, p.device, dtype, *sizes, limit))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
