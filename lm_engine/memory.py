"""Sizes the KV cache from a measured step: weights and the largest step's activations first, KV the rest.

The measure is the device allocator's high-water mark on CUDA, the process's resident set on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from contracts.capture import synchronize
from contracts.errors import EngineError
from contracts.params import SamplingParams
from lm_engine.model import AttentionBackend, DecoderConfig, DecoderModel, KVDtype, PagedKV
from lm_engine.plan import Admission, SequenceStep, StepPlan
from lm_engine.runner import Runner

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = "5"  # proc(5): resets VmHWM to the current resident set


@dataclass(frozen=True)
class StepLimits:
    """What the largest step may hold."""

    max_step_tokens: int
    max_sequences: int
    context_length: int

    def __post_init__(self) -> None:
        assert 0 < self.max_sequences <= self.max_step_tokens
        assert self.context_length > 0

    @property
    def first_chunk(self) -> int:
        """Tokens of one sequence when all the others compute one each."""
        return min(self.context_length, self.max_step_tokens - self.max_sequences + 1)


@dataclass(frozen=True)
class KVCapacity:
    """`str()` is the line that the server logs. `peak_bytes` (weights and activations) is 0 when the size was
    given and not measured. One block of `num_blocks` is the scratch block."""

    num_blocks: int
    block_size: int
    block_bytes: int
    context_length: int
    peak_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of the model's full context that fit at once."""
        return self.num_tokens / self.context_length

    def __str__(self) -> str:
        size = self.num_blocks * self.block_bytes
        measured = f"; weights and activations {_mib(self.peak_bytes)}" if self.peak_bytes else ""
        return (
            f"KV cache: {self.num_blocks - 1:,} blocks of {self.block_size} = {self.num_tokens:,} tokens in "
            f"{_mib(size)}; {self.max_concurrency:.2f}x a full context of {self.context_length:,}{measured}"
        )


def allocate_kv(
    config: DecoderConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KVDtype = "auto",
) -> PagedKV:
    """Zeroed: attention reads whole blocks, and stale memory could hold NaN. `dtype`: the model's."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    heads = (config.num_layers, num_blocks, block_size, config.num_kv_heads)
    stored = dtype if kv_dtype == "auto" else torch.float8_e4m3fn
    keys, values = (zeros(*heads, config.head_dim, dtype=stored) for _ in range(2))
    kv = PagedKV(keys, values, windows=config.windows)
    if kv_dtype == "fp8":
        kv.key_exponents, kv.value_exponents = (zeros(*heads, dtype=torch.int8) for _ in range(2))
    if config.kept_hidden_layer is not None:
        kv.hidden = zeros(num_blocks, block_size, config.hidden_size)
    return kv


def check_kv_dtype(attention: AttentionBackend, kv_dtype: KVDtype, stage: str) -> None:
    """Raises EngineError where the stage's attention cannot read such a cache."""
    if kv_dtype not in attention.kv_dtypes:
        raise EngineError(
            f"stage.{stage}.kv_dtype = '{kv_dtype}': the {attention.name} attention cannot read it;"
            " set kernels = 'triton' on a GPU of compute capability 8.9 or newer, 'reference' elsewhere, or"
            " kv_dtype = 'auto'",
            code="unsupported_kv_dtype",
        )


def capacity_of(
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    kv_bytes: int,
    block_size: int,
    context_length: int,
    peak_bytes: int = 0,
    kv_dtype: KVDtype = "auto",
) -> KVCapacity:
    """Blocks that fit `kv_bytes`. Raises EngineError when one context does not fit."""
    block_bytes = config.kv_bytes_per_token(dtype, kv_dtype) * block_size
    needed = -(-context_length // block_size) + 1
    if kv_bytes < needed * block_bytes:
        raise EngineError(
            f"{_mib(max(kv_bytes, 0))} are left for the KV cache, but one context of {context_length} tokens "
            f"needs {_mib(needed * block_bytes)}; raise the stage's memory or lower the context length",
            code="out_of_memory",
        )
    return KVCapacity(kv_bytes // block_bytes, block_size, block_bytes, context_length, peak_bytes)


def measure_capacity(
    model: DecoderModel,
    attention: AttentionBackend,
    limits: StepLimits,
    *,
    budget_bytes: int,
    block_size: int,
    encoder_step: Callable[[], None] | None = None,
    kv_dtype: KVDtype = "auto",
) -> KVCapacity:
    """Runs the largest step, and the encoder's if it shares the device, and gives KV what the budget
    leaves.

    `budget_bytes` is for everything of this process on the device: weights (already loaded), activations,
    KV. The encoder's memory is measured beside the step's and the larger of both counts: they take turns.
    """
    config, device = model.config, model.device
    # Two blocks more a sequence than its tokens fill: partial ones at both ends.
    num_blocks = limits.max_step_tokens // block_size + 2 * limits.max_sequences + 2
    kv = allocate_kv(config, num_blocks, block_size, model.dtype, device, kv_dtype)
    for cache in kv.layered if kv.hidden is None else (*kv.layered, kv.hidden):
        cache.zero_()  # touches every page, so that all of it is resident and can be subtracted
    runner = Runner(
        model, attention, kv, max_sequences=limits.max_sequences, max_length=limits.context_length
    )
    plan = _largest_step(config, limits, block_size)
    try:
        peak_bytes = measure_peak(device, lambda: _run(runner, plan))
        if encoder_step is not None:
            peak_bytes = max(peak_bytes, measure_peak(device, encoder_step))
    finally:
        runner.close()
    peak_bytes -= num_blocks * config.kv_bytes_per_token(model.dtype, kv_dtype) * block_size
    return capacity_of(
        config,
        model.dtype,
        kv_bytes=budget_bytes - peak_bytes,
        block_size=block_size,
        context_length=limits.context_length,
        peak_bytes=peak_bytes,
        kv_dtype=kv_dtype,
    )


def measure_peak(device: torch.device, step: Callable[[], None]) -> int:
    """Most bytes in use while `step` ran, all of the process's memory on the device counted."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    if _CLEAR_REFS.exists():  # else the mark is the process's lifetime's: too high, never too low
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER)
    step()
    return _high_water_bytes()


def _high_water_bytes() -> int:
    match = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def _largest_step(config: DecoderConfig, limits: StepLimits, block_size: int) -> StepPlan:
    """`max_step_tokens` over as many sequences as may run, all sampled with everything switched on.

    The first takes what the others, one token each, leave: the last chunk of a full context. What it would
    have computed before stands for itself in one block, repeated; the values do not matter.
    """
    sampling = SamplingParams(
        temperature=1.0, top_p=0.9, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=20
    )
    admissions: list[Admission] = []
    sequences: list[SequenceStep] = []
    next_block = 2  # 0 is scratch, 1 the repeated one
    for slot in range(limits.max_sequences):
        length, chunk = (1, 1) if slot else (limits.context_length, limits.first_chunk)
        num_repeated = (length - chunk) // block_size
        num_own = -(-length // block_size) - num_repeated
        blocks = (1,) * num_repeated + tuple(range(next_block, next_block + num_own))
        next_block += num_own
        positions_AL = np.broadcast_to(np.arange(length), (config.num_position_axes, length))
        admission = Admission(
            slot, [0] * length, length, positions_AL, 0, sampling, slot, blocks, gated_from=0
        )
        admissions.append(admission)
        sequences.append(SequenceStep(slot, length - chunk, chunk, (), samples=True))
    return StepPlan(0, (), tuple(admissions), (), tuple(sequences), ())


def _run(runner: Runner, plan: StepPlan) -> None:
    runner.submit(plan).result()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
