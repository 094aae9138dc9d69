"""Builds what a stage runs: loads weights on its device, sizes its memory, returns it with its capacity
line. Called by the thread that runs the stage, which stays on the device."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from contracts.capture import graph_bytes, release_unused, synchronize
from contracts.specs import ImageSpec
from encoder_pool.batcher import BatchLimits
from encoder_pool.cache import CacheConfig
from encoder_pool.model import EncoderInput, EncoderModel, GraphBounds
from encoder_pool.pool import EncoderPool, EncoderPoolConfig
from lm_engine.attention.choice import choose_mixed
from lm_engine.config import EngineConfig
from lm_engine.devices import enter_device
from lm_engine.engine import LMEngine
from lm_engine.memory import (
    KVCapacity,
    StepLimits,
    allocate_kv,
    capacity_of,
    check_kv_dtype,
    measure_capacity,
)
from lm_engine.model import AttentionBackend, DecoderConfig, DecoderModel, PagedKV
from lm_engine.parallel import TensorParallel
from lm_engine.ranks import FollowingRunner, LeadingRunner
from lm_engine.runner import Runner
from lm_engine.talker.engine import TalkerEngine
from lm_engine.talker.runner import TalkerRunner
from lm_engine.transfer import stream_entry
from model_families.family import Family
from stages.deployment import EncoderConfig, LMConfig, VocoderConfig, parse_bytes, stage_of, step_bounds
from stages.memory_plan import MIB, StagePlan, host_bytes, tower_graph_bytes
from stages.start_steps import Tell, start_step, untold
from stages.vocoder_stage import BuiltPool
from vocoder.pool import VocoderPool, VocoderPoolConfig

if TYPE_CHECKING:
    from stages.rank_processes import RankProcesses


logger = logging.getLogger(__name__)
REHEARSED_TOKENS = 8  # of a side
Compiled = Callable[[], bool]  # blocks while kernels are compiled ahead; whether all of them were
# A step is measured by what its process holds of the GPU, so no other stage may load meanwhile.
_gpu_memory = threading.Lock()


def _alone_on(plan: StagePlan) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if plan.device == "cpu" else _gpu_memory


def _wait_for(compiled: Compiled | None, plan: StagePlan, tell: Tell) -> None:
    if compiled is not None:
        with start_step(plan, "waiting for kernels to be compiled", tell):
            compiled()


def _loading(plan: StagePlan, tell: Tell) -> contextlib.AbstractContextManager[None]:
    return start_step(plan, f"loading weights ({plan.weights / MIB:,.0f} MiB)", tell)


@contextlib.contextmanager
def _capturing(plan: StagePlan, graphs: str, tell: Tell) -> Iterator[None]:
    """Only GPUs have graphs. Logs what those of all stages of this process take, which capture side by
    side."""
    if not plan.device.startswith("cuda"):
        yield
        return
    with start_step(plan, f"capturing {graphs} graphs", tell):
        yield
    held = graph_bytes(torch.device(plan.device)) / MIB
    planned = plan.graphs / MIB
    logger.info("stage %s: graphs planned %.0f MiB; the process's hold %.0f MiB", plan.stage, planned, held)


def _capture(
    runner: Runner | TalkerRunner,
    kind: str,
    plan: StagePlan,
    tell: Tell,
    compiled: Compiled | None,
    *,
    alone: bool = True,
) -> str:
    """What there is to say of its graphs. `alone`: not with other ranks, which capture the same in the same
    order, see `build_following_runner`."""
    with _capturing(plan, kind, tell):
        if plan.starts_again and alone:
            return f", {kind} graphs captured between steps" if runner.capture_between_steps() else ""
        num_graphs = runner.capture_graphs(compiled=compiled is not None and compiled())
    return f", {num_graphs} {kind} graphs" if num_graphs else ""


def build_encoder_pool(
    family: Family, config: EncoderConfig, plan: StagePlan, tell: Tell = untold
) -> tuple[EncoderPool, str]:
    device = torch.device(plan.device)
    enter_device(device)
    with _alone_on(plan), _loading(plan, tell):
        model = family.load_encoder(stage_of(plan.stage), device, plan.dtype)
    stream_entry(
        device, priority=0
    )()  # of this thread, which runs the stage: steps of others do not wait for it
    if stage_of(plan.stage) == "vision" and plan.device.startswith("cuda"):
        with start_step(plan, "rehearsing a picture", tell):
            rehearse(model, family.media_specs.image)
    _allow_graphs(model, config, plan, tell)
    cache = CacheConfig(
        device_bytes=plan.cache,
        host_bytes=parse_bytes(config.embedding_cache_host, f"stage.{plan.stage}.embedding_cache_host"),
    )
    limits = BatchLimits(
        max_tokens=config.max_batch_tokens,
        max_patches=config.batch_patches,
        max_items=config.max_batch_items,
    )
    pool = EncoderPool(model, EncoderPoolConfig(limits=limits, cache=cache), plan.stage)
    dtype = str(plan.dtype).removeprefix("torch.")
    return pool, f"{plan.device}, {dtype}; embedding cache {cache.device_bytes / MIB:,.0f} MiB"


def _allow_graphs(model: EncoderModel, config: EncoderConfig, plan: StagePlan, tell: Tell) -> None:
    """A worker that replaces another one captures later: requests wait for it."""
    bounds = GraphBounds(tower_graph_bytes(plan), config.max_batch_tokens, config.batch_patches)
    if not bounds.num_bytes:
        return
    if plan.starts_again:
        model.allow_graphs(bounds, ahead=False)
        return
    with _alone_on(plan), _capturing(plan, "tower", tell):
        model.allow_graphs(bounds, ahead=True)
        release_unused()


def rehearse(model: EncoderModel, spec: ImageSpec | None) -> None:
    """Encodes a small grey picture: libraries are loaded and kernels compiled in the first forward, for which
    somebody's picture would wait more than a second."""
    if spec is None:
        return
    side = REHEARSED_TOKENS * spec.merge_size
    pixels = torch.full((side * spec.patch_size, side * spec.patch_size, 3), 128, dtype=torch.uint8)
    model.encode([EncoderInput("image", pixels, (1, side, side), REHEARSED_TOKENS**2)])
    if model.device.type == "cuda":
        synchronize(model.device)


def build_lm_engine(
    family: Family,
    config: LMConfig,
    plan: StagePlan,
    context_length: int,
    ranks: RankProcesses | None = None,
    tell: Tell = untold,
    compiled: Compiled | None = None,
) -> tuple[LMEngine, str]:
    """`ranks`: the other ranks of a tensor-parallel stage, started; this is rank 0. `compiled`: waits for
    kernels that are being compiled meanwhile."""
    device = torch.device(plan.device)
    enter_device(device)
    parallel = None if ranks is None else ranks.join(device)
    model, kv, capacity = _load(family, config, plan, context_length, parallel, tell, compiled)
    rows, rule = step_bounds(config).max_sequences, family.logits_rule(device)
    runner: Runner
    if ranks is None or parallel is None:
        runner = Runner(
            model,
            model.attention,
            kv,
            max_sequences=rows,
            max_length=context_length,
            cuda_graphs=config.cuda_graphs,
            rule=rule,
            own_stream=kv.hidden is None,
        )
    else:
        runner = LeadingRunner(
            model,
            kv,
            parallel,
            ranks.followers,
            max_sequences=rows,
            max_length=context_length,
            cuda_graphs=config.cuda_graphs,
            rule=rule,
        )
    graphs = _capture(runner, "decode", plan, tell, compiled, alone=parallel is None)
    engine = LMEngine(
        _engine_config(family, config, plan, capacity, context_length), runner, family.positions
    )
    where = _placement(plan) if parallel is None else f"{parallel.size} ranks, {_placement(plan)}"
    return engine, f"{where}, {model.attention.name} attention{graphs}; {capacity}"


def build_following_runner(
    family: Family,
    config: LMConfig,
    plan: StagePlan,
    context_length: int,
    parallel: TensorParallel,
    channel: socket.socket,
) -> FollowingRunner:
    enter_device(torch.device(plan.device))
    model, kv, _ = _load(family, config, plan, context_length, parallel, untold)
    runner = FollowingRunner(
        model,
        kv,
        parallel,
        channel,
        max_sequences=step_bounds(config).max_sequences,
        max_length=context_length,
        cuda_graphs=config.cuda_graphs,
        rule=family.logits_rule(torch.device(plan.device)),
    )
    with _capturing(plan, "decode", untold):
        runner.capture_graphs()
    return runner


def _load(
    family: Family,
    config: LMConfig,
    plan: StagePlan,
    context_length: int,
    parallel: TensorParallel | None,
    tell: Tell,
    compiled: Compiled | None = None,
) -> tuple[DecoderModel, PagedKV, KVCapacity]:
    """All ranks measure together, and take what the smallest of them has room for."""
    device = torch.device(plan.device)
    with _alone_on(plan), _loading(plan, tell):
        model = family.load_decoder(device, plan.dtype, config.kernels, parallel)
    _choose_attention(model.attention, model.config, config, plan)
    _wait_for(compiled, plan, tell)  # others may load meanwhile
    with _alone_on(plan):
        capacity = _kv_capacity(model, config, plan, context_length, tell)
        if parallel is not None:
            capacity = replace(capacity, num_blocks=parallel.smallest(capacity.num_blocks))
        kv = allocate_kv(
            model.config, capacity.num_blocks, config.block_size, plan.dtype, device, config.kv_dtype
        )
    return model, kv, capacity


def build_talker(
    family: Family,
    config: LMConfig,
    plan: StagePlan,
    context_length: int,
    tell: Tell = untold,
    compiled: Compiled | None = None,
) -> tuple[TalkerEngine, str]:
    """The KV cache takes what the plan gives it: a talker's steps are small beside it."""
    device = torch.device(plan.device)
    enter_device(device)
    with _alone_on(plan), _loading(plan, tell):
        model = family.load_talker(device, plan.dtype, config.kernels)
        decoder = model.config.decoder
        _choose_attention(model.attention, decoder, config, plan)
        capacity = capacity_of(
            decoder,
            plan.dtype,
            kv_bytes=max(plan.cache, MIB),
            block_size=config.block_size,
            context_length=context_length,
            kv_dtype=config.kv_dtype,
        )
        kv = allocate_kv(decoder, capacity.num_blocks, config.block_size, plan.dtype, device, config.kv_dtype)
    max_sequences = step_bounds(config).max_sequences
    runner = TalkerRunner(
        model, kv, max_sequences=max_sequences, max_length=context_length, cuda_graphs=config.cuda_graphs
    )
    _wait_for(compiled, plan, tell)
    graphs = _capture(runner, "frame", plan, tell, compiled)
    engine = TalkerEngine(_bounds_of(config, plan, capacity, context_length, ()), model, runner)
    return engine, f"{_placement(plan)}, {model.attention.name} attention{graphs}; {capacity}"


def build_vocoder(family: Family, config: VocoderConfig, plan: StagePlan, tell: Tell = untold) -> BuiltPool:
    enter_device(torch.device(plan.device))
    with _alone_on(plan), _loading(plan, tell):
        model = family.load_vocoder(torch.device(plan.device), plan.dtype)
    pool_config = VocoderPoolConfig(
        max_streams=2 * config.max_streams,  # a replay may begin before what it replaces has been forgotten
        max_batch_rows=config.max_batch_rows,
        max_batch_frames=config.max_batch_frames,
    )
    with _capturing(plan, "decoder", tell):
        num_graphs = model.capture_graphs()
        if num_graphs:
            release_unused()
    pool = VocoderPool(model, pool_config, plan.stage)
    graphs = f", {num_graphs} graphs" if num_graphs else ""
    detail = f"{_placement(plan)}{graphs}; {model.sample_rate} Hz, {model.samples_per_frame} samples a frame"
    return BuiltPool(pool, model.sample_rate, detail)


def _choose_attention(
    attention: AttentionBackend, decoder: DecoderConfig, config: LMConfig, plan: StagePlan
) -> None:
    """Raises EngineError where the stage's cannot do what its settings say."""
    check_kv_dtype(attention, config.kv_dtype, plan.stage)
    choose_mixed(
        config.mixed_attention,
        attention,
        decoder,
        dtype=plan.dtype,
        device=torch.device(plan.device),
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        stage=plan.stage,
    )


def _placement(plan: StagePlan) -> str:
    return f"{plan.device}, {str(plan.dtype).removeprefix('torch.')}"


def _kv_capacity(
    model: DecoderModel, config: LMConfig, plan: StagePlan, context_length: int, tell: Tell
) -> KVCapacity:
    """`kv_memory` as given; else what the limit (or the device) leaves beside a measured step, which is
    measured once in the life of the server."""
    if config.kv_memory is not None:
        return capacity_of(
            model.config,
            plan.dtype,
            kv_bytes=plan.cache,
            block_size=config.block_size,
            context_length=context_length,
            kv_dtype=config.kv_dtype,
        )
    if plan.num_kv_blocks:
        block_bytes = model.config.kv_bytes_per_token(plan.dtype, config.kv_dtype) * config.block_size
        return KVCapacity(plan.num_kv_blocks, config.block_size, block_bytes, context_length)
    bounds = step_bounds(config)
    with start_step(plan, "measuring the largest step", tell):
        measured = measure_capacity(
            model,
            model.attention,
            StepLimits(bounds.max_step_tokens, bounds.max_sequences, context_length),
            budget_bytes=_budget(plan),
            block_size=config.block_size,
            kv_dtype=config.kv_dtype,
        )
    if plan.device != "cpu":
        release_unused()  # what the step has left is of the default stream, and steps run on another
    if plan.limit is not None or plan.device != "cpu":
        return measured
    # A host without a stated limit is shared with everything else: no more than requests are likely to use.
    return capacity_of(
        model.config,
        plan.dtype,
        kv_bytes=min(measured.num_blocks * measured.block_bytes, max(plan.cache, MIB)),
        block_size=config.block_size,
        context_length=context_length,
        peak_bytes=measured.peak_bytes,
        kv_dtype=config.kv_dtype,
    )


def _budget(plan: StagePlan) -> int:
    """For everything of this process on the device but graphs, once the weights of the stage are there."""
    if plan.device == "cpu":
        return plan.limit if plan.limit is not None else plan.weights + host_bytes()
    others = max(0, torch.cuda.memory_allocated(torch.device(plan.device)) - plan.weights)
    return others + (plan.limit if plan.limit is not None else plan.total) - plan.graphs


def _engine_config(
    family: Family, config: LMConfig, plan: StagePlan, capacity: KVCapacity, context_length: int
) -> EngineConfig:
    decoder = family.decoder_config
    takes_media = bool(family.media_specs.modalities)
    bounded = _bounds_of(config, plan, capacity, context_length, family.eos_token_ids)
    return replace(
        bounded,
        embedding_width=decoder.hidden_size * (1 + decoder.num_deepstack_levels) if takes_media else 0,
        plain_embedding_width=decoder.hidden_size if takes_media else 0,
        spoken_hidden=None if decoder.kept_hidden_layer is None else decoder.kept_hidden_of,
    )


def _bounds_of(
    config: LMConfig,
    plan: StagePlan,
    capacity: KVCapacity,
    context_length: int,
    eos_token_ids: tuple[int, ...],
) -> EngineConfig:
    bounds = step_bounds(config)
    return EngineConfig(
        num_blocks=capacity.num_blocks,
        context_length=context_length,
        eos_token_ids=eos_token_ids,
        block_size=config.block_size,
        max_step_tokens=bounds.max_step_tokens,
        max_sequences=bounds.max_sequences,
        mixed_step_tokens=bounds.mixed_step_tokens,
        encoder_step_tokens=bounds.encoder_step_tokens,
        max_step_visual_tokens=bounds.max_step_visual_tokens,
        long_prefill_cap=bounds.long_prefill_cap,
        max_resident_embedding_tokens=config.max_resident_embedding_tokens,
        max_waiting_requests=config.max_waiting_requests,
        policy=config.policy,
        prefix_cache=config.prefix_cache,
        overlap=config.overlap,
        stage=plan.stage,
    )
