"""Sparse MLPs of few tokens: routing, the chosen experts' products, and their weighted sum.

A pair is a token and one of the experts that it chose; pair p belongs to token p // CHOSEN.
Shapes: T tokens, E experts, P pairs, M pairs of a tile, N outputs of a tile, K inputs, C experts of a token.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors


@triton.jit
def route(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token a program: its best experts, best first, and their softmax weights."""
    after_predecessors(PDL)
    row = tl.program_id(0)
    experts_E = tl.arange(0, BLOCK_E)
    chosen_C = tl.arange(0, BLOCK_C)
    left_E = tl.load(logits_ptr + row * E + experts_E, mask=experts_E < E, other=-float("inf"))
    best = tl.max(left_E, axis=0)
    total = tl.sum(tl.exp(left_E - best), axis=0)
    expert_C = tl.zeros([BLOCK_C], tl.int32)
    weight_C = tl.zeros([BLOCK_C], tl.float32)
    for choice in tl.static_range(CHOSEN):
        expert = tl.argmax(left_E, axis=0)
        weight = tl.exp(tl.max(left_E, axis=0) - best)
        expert_C = tl.where(chosen_C == choice, expert, expert_C)
        weight_C = tl.where(chosen_C == choice, weight, weight_C)
        left_E = tl.where(experts_E == expert, -float("inf"), left_E)
    if NORMALISE:
        total = tl.sum(weight_C, axis=0)
    # Values that are not finite must not choose an expert that is not there.
    expert_C = tl.minimum(expert_C, E - 1)
    tl.store(experts_ptr + row * CHOSEN + chosen_C, expert_C, mask=chosen_C < CHOSEN)
    tl.store(weights_ptr + row * CHOSEN + chosen_C, weight_C / total, mask=chosen_C < CHOSEN)


@triton.jit(do_not_specialize=["num_pairs"])
def expert_gemm(
    x_ptr,
    weight_ptr,
    experts_ptr,
    out_ptr,
    num_pairs,
    num_outputs,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    BY_PAIR: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (group, tile): BLOCK_N outputs of all pairs of one expert, whose weights are read once for each
    BLOCK_M of them. BY_EXPERT: the group is the expert; else it is a pair, and the first pair of an expert
    does the work of all. BY_PAIR: x has a row for each pair, else one for each token. GATED: the weights are
    [gate; up] and the output silu(gate) · up."""
    group = tl.program_id(0)
    tile = tl.program_id(1)
    pairs_P = tl.arange(0, BLOCK_P)
    rows_M = tl.arange(0, BLOCK_M)
    columns_K = tl.arange(0, BLOCK_K)
    outputs_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    clamped_N = tl.minimum(outputs_N, num_outputs - 1).to(tl.int64)
    after_predecessors(PDL, EARLY=True)
    expert_P = tl.load(experts_ptr + pairs_P, mask=pairs_P < num_pairs, other=-1)
    expert = group
    if not BY_EXPERT:
        expert = tl.load(experts_ptr + group)
        if tl.sum(((expert_P == expert) & (pairs_P < group)).to(tl.int32), axis=0) > 0:
            return
    mine_P = expert_P == expert
    count = tl.sum(mine_P.to(tl.int32), axis=0)
    if count == 0:
        return
    rank_P = tl.cumsum(mine_P.to(tl.int32), axis=0) - 1
    up_offset = num_outputs.to(tl.int64) * K
    expert_ptr = weight_ptr + expert.to(tl.int64) * ((2 if GATED else 1) * up_offset)
    weights_NK = expert_ptr + clamped_N[:, None] * K + columns_K[None, :]
    for first in tl.range(0, count, BLOCK_M):
        is_row_PM = mine_P[:, None] & (rank_P[:, None] == (first + rows_M)[None, :])
        pair_M = tl.sum(tl.where(is_row_PM, pairs_P[:, None], 0), axis=0)
        inside_M = first + rows_M < count
        row_M = pair_M if BY_PAIR else pair_M // CHOSEN
        sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up_sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            at_K = start + columns_K
            inside_K = at_K < K
            x_KM = tl.load(
                x_ptr + row_M[None, :].to(tl.int64) * K + at_K[:, None],
                mask=inside_M[None, :] & inside_K[:, None],
                other=0.0,
            )
            if K % BLOCK_K == 0:
                tile_NK = tl.load(weights_NK + start)
            else:
                tile_NK = tl.load(weights_NK + start, mask=inside_K[None, :], other=0.0)
            sum_NM = tl.dot(tile_NK, x_KM, sum_NM, input_precision=PRECISION)
            if GATED:
                if K % BLOCK_K == 0:
                    up_tile_NK = tl.load(weights_NK + up_offset + start)
                else:
                    up_tile_NK = tl.load(weights_NK + up_offset + start, mask=inside_K[None, :], other=0.0)
                up_sum_NM = tl.dot(up_tile_NK, x_KM, up_sum_NM, input_precision=PRECISION)
        if GATED:
            sum_NM = sum_NM / (1.0 + tl.exp(-sum_NM)) * up_sum_NM
        places_NM = pair_M[None, :].to(tl.int64) * num_outputs + outputs_N[:, None]
        inside_NM = inside_M[None, :] & (outputs_N < num_outputs)[:, None]
        tl.store(out_ptr + places_NM, sum_NM.to(out_ptr.dtype.element_ty), mask=inside_NM)


@triton.jit
def combine_experts(
    y_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    residual_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part of its width): the weighted sum over its experts, in order; the shared expert's
    output as far as its gate lets it through; the residual."""
    after_predecessors(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns_H = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_H = columns_H < WIDTH
    sum_H = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        y_H = tl.load(y_ptr + pair * WIDTH + columns_H, mask=inside_H, other=0.0).to(tl.float32)
        sum_H += tl.load(weights_ptr + pair) * y_H
    if SHARED:
        gate = tl.load(gate_ptr + token)
        shared_H = tl.load(shared_ptr + token * WIDTH + columns_H, mask=inside_H, other=0.0).to(tl.float32)
        sum_H += shared_H / (1.0 + tl.exp(-gate))
    if RESIDUAL:
        sum_H += tl.load(residual_ptr + token * WIDTH + columns_H, mask=inside_H, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns_H, sum_H.to(out_ptr.dtype.element_ty), mask=inside_H)
