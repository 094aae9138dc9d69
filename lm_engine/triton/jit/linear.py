"""Linears of few rows: bound by reading the weights once, with what stands around them fused in.

NORM: x is normalised (RMS) first; its scale is a row's scalar, so it multiplies the sum. GATED: the weight is
[gate; up] and the output silu(gate) · up. RESIDUAL: added to the output, which may be the same memory.
Shapes: M rows, N outputs, K inputs.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors


@triton.jit
def gemv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_outputs,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, held in registers (BLOCK_K covers K); programs stride over tiles of outputs. A tile's weights
    are under way while the one before is summed, the first one's before x is known."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_tiles = tl.cdiv(num_outputs, BLOCK_N)
    columns_K = tl.arange(0, BLOCK_K)
    inside_K = columns_K < K
    outputs_N = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_NK = (outputs_N < num_outputs)[:, None] & inside_K[None, :]
    weights_NK = weight_ptr + outputs_N.to(tl.int64)[:, None] * K + columns_K[None, :]
    tile_NK = tl.load(weights_NK, mask=inside_NK, other=0.0)
    if GATED:
        up_offset = num_outputs.to(tl.int64) * K
        up_tile_NK = tl.load(weights_NK + up_offset, mask=inside_NK, other=0.0)
    if NORM:
        norm_K = tl.load(norm_ptr + columns_K, mask=inside_K, other=0.0).to(tl.float32)
    after_predecessors(PDL, EARLY=True)
    x_K = tl.load(x_ptr + columns_K, mask=inside_K, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x_K * x_K, axis=0) / K + eps)
        x_K *= norm_K
    for tile in tl.range(program, num_tiles, num_programs):
        outputs_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_N = outputs_N < num_outputs
        if BIAS:
            bias_N = tl.load(bias_ptr + outputs_N, mask=inside_N, other=0.0).to(tl.float32)
        if RESIDUAL:
            residual_N = tl.load(residual_ptr + outputs_N, mask=inside_N, other=0.0).to(tl.float32)
        next_N = outputs_N + num_programs * BLOCK_N
        inside_NK = (next_N < num_outputs)[:, None] & inside_K[None, :]
        weights_NK = weight_ptr + next_N.to(tl.int64)[:, None] * K + columns_K[None, :]
        next_NK = tl.load(weights_NK, mask=inside_NK, other=0.0)
        if GATED:
            next_up_NK = tl.load(weights_NK + up_offset, mask=inside_NK, other=0.0)
        y_N = tl.sum(tile_NK.to(tl.float32) * x_K[None, :], axis=1) * scale
        if GATED:
            up_N = tl.sum(up_tile_NK.to(tl.float32) * x_K[None, :], axis=1) * scale
            y_N = y_N / (1.0 + tl.exp(-y_N)) * up_N
            up_tile_NK = next_up_NK
        if BIAS:
            y_N += bias_N
        if RESIDUAL:
            y_N += residual_N
        tl.store(out_ptr + outputs_N, y_N.to(out_ptr.dtype.element_ty), mask=inside_N)
        tile_NK = next_NK


@triton.jit
def _load_weights(
    weights_NK, at_K, K: tl.constexpr, TILE_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Zeros beyond the tile and beyond K: neither is read."""
    if TILE_N < BLOCK_N:
        mask_NK = (tl.arange(0, BLOCK_N) < TILE_N)[:, None] & (at_K < K)[None, :]
        tile_NK = tl.load(weights_NK, mask=mask_NK, other=0.0)
    elif K % BLOCK_K == 0:
        tile_NK = tl.load(weights_NK)
    else:
        tile_NK = tl.load(weights_NK, mask=(at_K < K)[None, :], other=0.0)
    return tile_NK


@triton.jit(do_not_specialize=["num_rows"])
def skinny_gemm(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    num_rows,
    num_outputs,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ADDED_LATER: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, split): TILE_N outputs, in a block of BLOCK_N, of all rows over a part of K. The weights
    are the left operand, which the tensor cores want tall; the split that arrives last adds the parts up in
    order. ADDED_LATER: the output is the splits' own sums, [S, M, N]."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES_PER_SPLIT: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = split * (TILES_PER_SPLIT * BLOCK_K)
    end = tl.minimum(first + TILES_PER_SPLIT * BLOCK_K, K)
    outputs_N = tile * TILE_N + tl.arange(0, BLOCK_N)
    rows_N = tl.minimum(outputs_N, num_outputs - 1).to(tl.int64)
    rows_M = tl.arange(0, BLOCK_M)
    columns_K = tl.arange(0, BLOCK_K)
    weights_NK = weight_ptr + rows_N[:, None] * K + columns_K[None, :]
    if GATED:
        up_offset = num_outputs.to(tl.int64) * K
    after_predecessors(PDL, EARLY=True)
    sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first, end, BLOCK_K):
        at_K = start + columns_K
        x_KM = tl.load(
            x_ptr + rows_M[None, :] * K + at_K[:, None],
            mask=(rows_M < num_rows)[None, :] & (at_K < K)[:, None],
            other=0.0,
        )
        tile_NK = _load_weights(weights_NK + start, at_K, K, TILE_N, BLOCK_N, BLOCK_K)
        sum_NM = tl.dot(tile_NK, x_KM, sum_NM, input_precision=PRECISION)
        if GATED:
            up_tile_NK = _load_weights(weights_NK + up_offset + start, at_K, K, TILE_N, BLOCK_N, BLOCK_K)
            up_sum_NM = tl.dot(up_tile_NK, x_KM, up_sum_NM, input_precision=PRECISION)
    inside_N = (outputs_N < num_outputs) & (tl.arange(0, BLOCK_N) < TILE_N)
    inside_NM = (rows_M < num_rows)[None, :] & inside_N[:, None]
    places_NM = rows_M[None, :].to(tl.int64) * num_outputs + outputs_N[:, None]
    if RESIDUAL:  # on its way while splits wait for one another
        residual_NM = tl.load(residual_ptr + places_NM, mask=inside_NM, other=0.0)
    if ADDED_LATER:
        out_ptr += split.to(tl.int64) * num_rows * num_outputs
    elif SPLITS > 1:
        part_NM = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + rows_M[None, :]
        parts = parts_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + part_NM
        tl.store(parts + split * (BLOCK_N * BLOCK_M), sum_NM)
        tl.debug_barrier()  # all threads' parts are out before one of them says so
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals_ptr + tile, 0)
        sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in tl.static_range(SPLITS):
            sum_NM += tl.load(parts + other * (BLOCK_N * BLOCK_M))
    if GATED:
        sum_NM = sum_NM / (1.0 + tl.exp(-sum_NM)) * up_sum_NM
    if BIAS:
        bias_N = tl.load(bias_ptr + rows_N).to(tl.float32)
        if ADDED_LATER:
            bias_N = tl.where(split == 0, bias_N, 0.0)
        sum_NM += bias_N[:, None]
    if RESIDUAL:
        sum_NM += residual_NM.to(tl.float32)
    tl.store(out_ptr + places_NM, sum_NM.to(out_ptr.dtype.element_ty), mask=inside_NM)
