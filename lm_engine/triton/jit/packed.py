"""Attention inside packed segments: every row sees all rows of its own segment.

A head size that is no power of two is cut in two that are (80 = 64 + 16): nothing is computed for padding.
Shapes: M query rows of a tile, L keys of a tile, A and B dimensions of the two parts of a head. Softmax in
base 2; `scale` holds log2(e).
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors


@triton.jit
def _load_halves(ptr, rows_X, inside_X, stride, D: tl.constexpr, DIM_A: tl.constexpr, DIM_B: tl.constexpr):
    dims_A = tl.arange(0, DIM_A)
    dims_B = DIM_A + tl.arange(0, DIM_B)
    places_X1 = rows_X.to(tl.int64)[:, None] * stride
    a_XA = tl.load(ptr + places_X1 + dims_A[None, :], mask=inside_X[:, None], other=0.0)
    inside_XB = inside_X[:, None] & (dims_B < D)[None, :]
    b_XB = tl.load(ptr + places_X1 + dims_B[None, :], mask=inside_XB, other=0.0)
    return a_XA, b_XB


@triton.jit(do_not_specialize=["num_tiles"])
def packed_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    out_ptr,
    num_tiles,
    q_stride,
    k_stride,
    v_stride,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DIM_A: tl.constexpr,
    DIM_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (segment and tile of its rows, head); `num_tiles` are those of the longest segment."""
    after_predecessors(PDL)
    segment = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(1)
    first = tl.load(starts_ptr + segment)
    end = tl.load(starts_ptr + segment + 1)
    rows_M = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if first + tile * BLOCK_M >= end:
        return
    inside_M = rows_M < end
    q_MA, q_MB = _load_halves(q_ptr + head * D, rows_M, inside_M, q_stride, D, DIM_A, DIM_B)
    best_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass_M = tl.zeros([BLOCK_M], tl.float32)
    sum_MA = tl.zeros([BLOCK_M, DIM_A], tl.float32)
    sum_MB = tl.zeros([BLOCK_M, DIM_B], tl.float32)
    for start in tl.range(first, end, BLOCK_L):
        rows_L = start + tl.arange(0, BLOCK_L)
        inside_L = rows_L < end
        k_LA, k_LB = _load_halves(k_ptr + head * D, rows_L, inside_L, k_stride, D, DIM_A, DIM_B)
        v_LA, v_LB = _load_halves(v_ptr + head * D, rows_L, inside_L, v_stride, D, DIM_A, DIM_B)
        scores_ML = tl.dot(q_MA, tl.trans(k_LA), input_precision=PRECISION)
        scores_ML = tl.dot(q_MB, tl.trans(k_LB), scores_ML, input_precision=PRECISION) * scale
        scores_ML = tl.where(inside_L[None, :], scores_ML, -float("inf"))
        new_best_M = tl.maximum(best_M, tl.max(scores_ML, axis=1))
        weights_ML = tl.exp2(scores_ML - new_best_M[:, None])
        shrink_M = tl.exp2(best_M - new_best_M)
        mass_M = mass_M * shrink_M + tl.sum(weights_ML, axis=1)
        weights_ML = weights_ML.to(q_MA.dtype)
        sum_MA = tl.dot(weights_ML, v_LA, sum_MA * shrink_M[:, None], input_precision=PRECISION)
        sum_MB = tl.dot(weights_ML, v_LB, sum_MB * shrink_M[:, None], input_precision=PRECISION)
        best_M = new_best_M
    dims_A = tl.arange(0, DIM_A)
    dims_B = DIM_A + tl.arange(0, DIM_B)
    out_M1 = out_ptr + (rows_M.to(tl.int64) * (H * D) + head * D)[:, None]
    out_MA = (sum_MA / mass_M[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_M1 + dims_A[None, :], out_MA, mask=inside_M[:, None])
    out_MB = (sum_MB / mass_M[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_M1 + dims_B[None, :], out_MB, mask=inside_M[:, None] & (dims_B < D)[None, :])
