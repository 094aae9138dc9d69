"""KV sizing: the arithmetic, and that the measured peak sees what a step really takes."""

from __future__ import annotations

import mmap

import pytest
import torch

from contracts.errors import EngineError
from lm_engine.memory import (
    StepLimits,
    _largest_step,
    allocate_kv,
    capacity_of,
    measure_capacity,
    measure_peak,
)
from tests.lm_engine.random_decoder import tiny_config, tiny_decoder

CPU = torch.device("cpu")
LIMITS = StepLimits(max_step_tokens=64, max_sequences=4, context_length=100)
MIB = 2**20


def test_blocks_fill_the_bytes_exactly():
    config = tiny_config()
    block_bytes = 2 * 2 * 2 * 8 * 4 * 16  # k and v, layers, kv heads, head size, float32, block
    capacity = capacity_of(
        config, torch.float32, kv_bytes=9 * block_bytes + 5, block_size=16, context_length=100
    )
    assert capacity.num_blocks == 9
    assert capacity.num_tokens == 128
    assert capacity.max_concurrency == 1.28
    kv = allocate_kv(config, capacity.num_blocks, 16, torch.float32, CPU)
    assert kv.keys.nbytes + kv.values.nbytes == 9 * capacity.block_bytes
    assert not kv.keys.any()


def test_the_logged_line():
    capacity = capacity_of(
        tiny_config(), torch.float32, kv_bytes=3 * MIB, block_size=16, context_length=100, peak_bytes=7 * MIB
    )
    line = str(capacity)
    assert line == (
        "KV cache: 767 blocks of 16 = 12,272 tokens in 3 MiB; 122.72x a full context of 100; "
        "weights and activations 7 MiB"
    )


@pytest.mark.parametrize("kv_bytes", [-5, 0, 8 * 2048 - 1])
def test_too_little_memory_is_refused_with_figures(kv_bytes):
    with pytest.raises(EngineError, match="one context of 100 tokens needs"):
        capacity_of(tiny_config(), torch.float32, kv_bytes=kv_bytes, block_size=16, context_length=100)


@pytest.mark.parametrize("context_length", [100, 7, 64])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_largest_step_is_the_largest(context_length, block_size):
    limits = StepLimits(max_step_tokens=64, max_sequences=4, context_length=context_length)
    plan = _largest_step(tiny_config(), limits, block_size)
    assert plan.num_tokens == min(64, context_length + 3)
    assert len(plan.sequences) == 4
    assert max(s.start + s.num_tokens for s in plan.sequences) == context_length
    own = [block for a in plan.admissions for block in a.block_ids if block != 1]
    assert len(own) == len(set(own))
    assert max(own) < 64 // block_size + 2 * 4 + 2


def hold_for_a_moment(num_bytes: int) -> None:
    """In pages of its own: the heap may have that much to spare, resident already."""
    with mmap.mmap(-1, num_bytes) as pages:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            pages[offset] = 1


def test_a_measured_peak_sees_a_passing_allocation():
    size = 96 * MIB
    before = measure_peak(CPU, lambda: None)
    passing = measure_peak(CPU, lambda: hold_for_a_moment(size))
    after = measure_peak(CPU, lambda: None)
    assert passing - before > 0.8 * size
    assert after - before < 0.5 * size


def test_measured_capacity_is_the_budget_less_the_peak():
    decoder = tiny_decoder()
    budget = 2**34
    encoder_bytes = 160 * MIB
    plain = measure_capacity(decoder, decoder.attention, LIMITS, budget_bytes=budget, block_size=16)
    assert plain.num_blocks * plain.block_bytes <= budget - plain.peak_bytes
    assert (plain.num_blocks + 1) * plain.block_bytes > budget - plain.peak_bytes
    heavy = measure_capacity(
        decoder,
        decoder.attention,
        LIMITS,
        budget_bytes=budget,
        block_size=16,
        encoder_step=lambda: hold_for_a_moment(encoder_bytes),
    )
    assert heavy.peak_bytes - plain.peak_bytes > 0.8 * encoder_bytes
    assert heavy.num_blocks < plain.num_blocks


def test_a_step_that_raises_ends_the_measurement_cleanly():
    decoder = tiny_decoder()

    def broken():
        raise RuntimeError("no encoder")

    with pytest.raises(RuntimeError, match="no encoder"):
        measure_capacity(
            decoder, decoder.attention, LIMITS, budget_bytes=2**34, block_size=16, encoder_step=broken
        )
