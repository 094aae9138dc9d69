"""Draws codes of small vocabularies with every filter and penalty: a row a program, nothing asked of the
host.

Filters are thresholds on the logit, found bit by bit: no sorting. Shapes: V codes, L history.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors
from lm_engine.triton.jit.step import _gumbel


@triton.jit
def _ordered(values_V):
    """float32 as unsigned integers of the same order."""
    bits_V = values_V.to(tl.uint32, bitcast=True)
    return tl.where((bits_V >> 31) != 0, bits_V ^ 0xFFFFFFFF, bits_V | 0x80000000)


@triton.jit
def _threshold(keys_V, mass_V, needed, BITS: tl.constexpr = 32):
    """The largest key of that many high bits such that the mass at and above it is at least `needed`; 0 if
    there is none."""
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in tl.range(0, BITS):
        candidate = threshold | bit
        bit = bit >> 1
        reached = tl.sum(tl.where(keys_V >= candidate, mass_V, 0), axis=0) >= needed
        threshold = tl.where(reached, candidate, threshold)
    return threshold


@triton.jit
def _penalised(
    logits_V,
    codes_V,
    history_ptr,
    num_known,
    num_prompt,
    counts_ptr,
    presence,
    frequency,
    repetition,
    V: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """As `sampler.penalise`. `counts` is this row's scratch of int64: 1 for each occurrence, 2³² for each of
    the output."""
    tl.store(counts_ptr + codes_V, tl.zeros_like(codes_V).to(tl.int64), mask=codes_V < V)
    tl.debug_barrier()
    for start in tl.range(0, num_known, BLOCK_L):
        index_L = start + tl.arange(0, BLOCK_L)
        inside_L = index_L < num_known
        code_L = tl.load(history_ptr + index_L, mask=inside_L, other=0)
        one_L = tl.where(index_L >= num_prompt, (1 << 32) + 1, 1).to(tl.int64)
        tl.atomic_add(counts_ptr + code_L, one_L, mask=inside_L, sem="relaxed", scope="cta")
    tl.debug_barrier()
    count_V = tl.load(counts_ptr + codes_V, mask=codes_V < V, other=0, cache_modifier=".cg")
    output_V = (count_V >> 32).to(tl.float32)
    repeated_V = tl.where(logits_V > 0, tl.div_rn(logits_V, repetition), logits_V * repetition)
    logits_V = tl.where(count_V > 0, repeated_V, logits_V)
    return logits_V - frequency * output_V - tl.where(output_V > 0, presence, 0.0)


@triton.jit(do_not_specialize=["num_rows", "group_seed"])
def draw_codes(
    logits_ptr,
    suppressed_ptr,
    packed_ptr,
    floats_ptr,
    top_k_ptr,
    seeds_ptr,
    num_prompt_ptr,
    token_table_ptr,
    counts_ptr,
    codes_ptr,
    valid_ptr,
    num_rows,
    float_stride,
    token_stride,
    fixed_temperature,
    fixed_top_p,
    fixed_min_p,
    fixed_top_k,
    group_seed,
    min_temperature,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """FIRST: the request's own sampling, and the code goes to the table; else the fixed one, for requests
    that
    draw at all. `packed` as for `decode_inputs`; a padding row draws and writes `codes` only."""
    after_predecessors(PDL)
    row = tl.program_id(0)
    slot = tl.load(packed_ptr + row).to(tl.int64)
    index = tl.load(packed_ptr + num_rows + row).to(tl.int64) + 1
    pads = slot < 0
    slot = tl.where(pads, 0, slot)
    temperature = tl.load(floats_ptr + slot * float_stride)
    is_greedy = temperature == 0
    codes_V = tl.arange(0, BLOCK_V)
    logits_V = tl.load(logits_ptr + row.to(tl.int64) * V + codes_V, mask=codes_V < V, other=-float("inf"))
    if FIRST:
        logits_V += tl.load(suppressed_ptr + codes_V, mask=codes_V < V, other=0.0)
        top_p = tl.load(floats_ptr + slot * float_stride + 1)
        min_p = tl.load(floats_ptr + slot * float_stride + 2)
        presence = tl.load(floats_ptr + slot * float_stride + 3)
        frequency = tl.load(floats_ptr + slot * float_stride + 4)
        repetition = tl.load(floats_ptr + slot * float_stride + 5)
        top_k = tl.load(top_k_ptr + slot).to(tl.float32)
        if (presence != 0) | (frequency != 0) | (repetition != 1):
            logits_V = _penalised(
                logits_V,
                codes_V,
                token_table_ptr + slot * token_stride,
                tl.where(pads, 0, index),
                tl.load(num_prompt_ptr + slot),
                counts_ptr + row * BLOCK_V,
                presence,
                frequency,
                repetition,
                V,
                BLOCK_L,
            )
    else:
        temperature = fixed_temperature
        top_p = fixed_top_p
        min_p = fixed_min_p
        top_k = fixed_top_k
    is_nan = tl.max((logits_V != logits_V).to(tl.int32), axis=0) > 0
    logits_V = tl.where(logits_V == logits_V, logits_V, -float("inf"))
    best = tl.max(logits_V, axis=0)
    valid = (best < float("inf")) & (best > -float("inf")) & (is_nan == 0)
    code = tl.argmax(logits_V, axis=0)
    if (is_greedy == 0) & valid:
        heat = tl.maximum(temperature, min_temperature)
        scaled_V = tl.div_rn(logits_V, heat)
        best = tl.div_rn(best, heat)
        keeps_V = codes_V < V
        if min_p > 0:
            keeps_V = keeps_V & (scaled_V >= best + tl.log(min_p))
        keys_V = _ordered(scaled_V)
        if top_k > 0:
            ones_V = tl.full([BLOCK_V], 1.0, tl.float32)
            keeps_V = keeps_V & (keys_V >= _threshold(keys_V, ones_V, top_k))
        if top_p < 1:
            mass_V = tl.where(keeps_V, tl.exp(scaled_V - best), 0.0)
            keeps_V = keeps_V & (keys_V >= _threshold(keys_V, mass_V, tl.sum(mass_V, axis=0) * top_p))
        seed = tl.load(seeds_ptr + slot) + group_seed
        scores_V = scaled_V + _gumbel(seed, index, codes_V)
        code = tl.argmax(tl.where(keeps_V, scores_V, -float("inf")), axis=0)
    code = tl.where(valid, code, 0)
    tl.store(codes_ptr + row, code.to(tl.int64))
    if FIRST:
        tl.store(valid_ptr + row, valid.to(tl.int32))
        if pads == 0:
            tl.store(token_table_ptr + slot * token_stride + index, code)
    else:
        tl.store(valid_ptr + row, tl.load(valid_ptr + row) & valid.to(tl.int32))
