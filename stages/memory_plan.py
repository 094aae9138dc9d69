"""The memory plan: what each stage will take of its device, from shapes alone, before any weight loads."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace

import torch

from lm_engine.model import DecoderConfig
from lm_engine.parallel import shard_config
from stages.deployment import (
    Deployment,
    DeploymentError,
    EncoderConfig,
    LMConfig,
    PlacedConfig,
    VocoderConfig,
    parse_bytes,
    step_bounds,
)

THINKER_KV_SHARE = 0.4
TALKER_KV_SHARE = 0.15
VOCODER_BYTES_PER_FRAME = 1 << 20  # 1920 samples of ~100 channels in float32
VOCODER_BYTES_PER_STREAM = 1 << 20  # attention window and convolution tails
GIB = 1 << 30
MIB = 1 << 20


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
    neighbours: int = 0  # bytes that the other stages of the device will take
    num_kv_blocks: int = 0  # as an earlier start of the stage has measured; 0: none has

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


def check_devices(deployment: Deployment) -> None:
    """Refuses a GPU that this machine has not, before anything asks it for its memory."""
    num_gpus = torch.cuda.device_count()
    for name, stage in deployment.placed.items():
        for device in stage.device_list:
            kind, _, index = device.partition(":")
            if kind == "cuda" and int(index or 0) >= num_gpus:
                there = f"cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "no CUDA device"
                raise DeploymentError(f"stage.{name}.devices: no {device} on this machine; it has {there}")


def device_bytes(device: str) -> int:
    """What a stage could use now: free memory of a GPU, available memory of the host."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def stage_limit(name: str, config: PlacedConfig, device: str) -> int | None:
    memory = config.memory
    if memory is None:
        return None
    if isinstance(memory, float) and memory <= 1.0:
        return int(device_bytes(device) * memory)
    return parse_bytes(int(memory) if isinstance(memory, float) else memory, f"stage.{name}.memory")


def plan_ranks(
    name: str,
    config: LMConfig,
    decoder: DecoderConfig,
    weight_elements: int,
    dtype: torch.dtype,
    context: int,
    kv_share: float,
) -> list[StagePlan]:
    """One plan a rank. Each holds the embeddings and the head, and its share of everything else."""
    size = config.tensor_parallel
    if size == 1:
        return [plan_lm(name, config, decoder, weight_elements, dtype, context, kv_share)]
    share = shard_config(decoder, size)
    replicated = decoder.vocab_size * decoder.hidden_size * (1 if decoder.tie_embeddings else 2)
    elements = replicated + (weight_elements - replicated) // size
    if len(set(config.rank_devices)) == 1:  # of the CPU's memory, which they have in common
        kv_share /= size
    return [plan_lm(name, config, share, elements, dtype, context, kv_share, rank) for rank in range(size)]


def plan_lm(
    name: str,
    config: LMConfig,
    decoder: DecoderConfig,
    weight_elements: int,
    dtype: torch.dtype,
    context: int,
    share: float,
    rank: int = 0,
) -> StagePlan:
    """KV for one request of full length is the least a stage must hold; more is used when memory allows it.
    `share`: of the free memory, for the KV of a stage without a limit."""
    device = config.rank_devices[rank]
    weights = weight_elements * dtype.itemsize
    bounds = step_bounds(config)
    logits = bounds.max_sequences * decoder.vocab_size * 4
    hidden = bounds.max_step_tokens * max(decoder.intermediate_size * 2, decoder.hidden_size * 4) * 4
    if config.kv_memory is not None:
        cache = parse_bytes(config.kv_memory, f"stage.{name}.kv_memory")
        _check_kv(name, cache, decoder.kv_bytes_per_token(dtype), config.block_size, context)
    else:
        cache = default_kv_bytes(name, config, decoder, dtype, context, weights + logits + hidden, share)
    limit = stage_limit(name, config, device)
    return StagePlan(name, device, dtype, weights, cache, logits + hidden, limit, rank)


def _check_kv(name: str, cache: int, per_token: int, block_size: int, context: int) -> None:
    num_blocks = -(-context // block_size) + 1  # one more is the scratch block
    needed = num_blocks * block_size * per_token
    if cache < needed:
        raise DeploymentError(
            f"stage.{name}.kv_memory: {_size(cache)} hold no context of {context} tokens, which needs"
            f" {_size(needed)}; raise it, or lower stage.{name}.max_context"
        )


def default_kv_bytes(
    name: str,
    config: LMConfig,
    decoder: DecoderConfig,
    dtype: torch.dtype,
    context: int,
    other: int,
    share: float,
) -> int:
    """Without a limit: what `max_sequences` requests of a quarter context want, at most `share` of what is
    free."""
    device = config.device_list[0]
    per_token = decoder.kv_bytes_per_token(dtype)
    wanted = per_token * max(context, step_bounds(config).max_sequences * context // 4)
    limit = stage_limit(name, config, device)
    room = limit - other if limit is not None else int(device_bytes(device) * share)
    return max(min(wanted, room), 0)


def plan_encoder(
    name: str, config: EncoderConfig, weight_elements: int, dtype: torch.dtype, width: int
) -> StagePlan:
    device = config.device_list[0]
    cache = parse_bytes(config.embedding_cache, f"stage.{name}.embedding_cache")
    activations = config.max_batch_tokens * width * dtype.itemsize * 8
    limit = stage_limit(name, config, device)
    return StagePlan(name, device, dtype, weight_elements * dtype.itemsize, cache, activations, limit)


def plan_vocoder(name: str, config: VocoderConfig, weight_elements: int, dtype: torch.dtype) -> StagePlan:
    """What a forward needs besides its weights goes with the PCM it makes; measured at 24 kHz."""
    device = config.device_list[0]
    activations = config.max_batch_frames * VOCODER_BYTES_PER_FRAME
    states = config.max_streams * VOCODER_BYTES_PER_STREAM
    limit = stage_limit(name, config, device)
    return StagePlan(name, device, dtype, weight_elements * dtype.itemsize, states, activations, limit)


def with_neighbours(plans: list[StagePlan]) -> tuple[StagePlan, ...]:
    """Each with what the others on its device will take."""
    totals: Counter[str] = Counter()
    for plan in plans:
        totals[plan.device] += plan.total
    return tuple(replace(plan, neighbours=totals[plan.device] - plan.total) for plan in plans)


def check_plan(plans: list[StagePlan]) -> None:
    """Refuses an over-commit, naming the stages. Raises DeploymentError."""
    for plan in plans:
        if plan.limit is not None and plan.total > plan.limit:
            raise DeploymentError(
                f"stage.{plan.stage}.memory: needs {_size(plan.total)} (weights {_size(plan.weights)}, cache"
                f" {_size(plan.cache)}, activations {_size(plan.activations)}), may use {_size(plan.limit)}"
            )
    for device in {plan.device for plan in plans}:
        on_device = [plan for plan in plans if plan.device == device]
        total, free = sum(plan.total for plan in on_device), device_bytes(device)
        if total > free:
            parts = ", ".join(f"{plan.stage} {_size(plan.total)}" for plan in on_device)
            raise DeploymentError(f"device {device}: {_size(total)} wanted ({parts}), {_size(free)} free")


def render_plan(plans: list[StagePlan]) -> str:
    rows = [("stage", "device", "dtype", "weights", "cache", "activations", "total", "limit")]
    for p in plans:
        dtype = str(p.dtype).removeprefix("torch.")
        limit = "-" if p.limit is None else _size(p.limit)
        sizes = (_size(p.weights), _size(p.cache), _size(p.activations), _size(p.total))
        name = f"{p.stage}/{p.rank}" if p.rank else p.stage
        rows.append((name, p.device, dtype, *sizes, limit))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
