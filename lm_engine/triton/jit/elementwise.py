"""Norms, gate, turns, rotation. Computed in float32, rounded once.

Shapes: T tokens, H hidden, I intermediate, X = N + 2G heads of a fused projection, D head size, P = D/2.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors
from lm_engine.triton.jit.quantised import head_exponent, quantise


@triton.jit
def rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row a program; x is the sum of PARTS. ADD: x + residual goes to `residual_ptr` and its norm to
    `out_ptr`."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    stride = tl.num_programs(0).to(tl.int64) * WIDTH
    columns_H = tl.arange(0, BLOCK)
    inside_H = columns_H < WIDTH
    weight_H = tl.load(weight_ptr + columns_H, mask=inside_H, other=0.0).to(tl.float32)
    after_predecessors(PDL)
    x_H = tl.load(x_ptr + row + columns_H, mask=inside_H, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x_H += tl.load(x_ptr + part * stride + row + columns_H, mask=inside_H, other=0.0)
    if ADD:
        x_H += tl.load(residual_ptr + row + columns_H, mask=inside_H, other=0.0).to(tl.float32)
        rounded_H = x_H.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + columns_H, rounded_H, mask=inside_H)
        x_H = rounded_H.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x_H * x_H, axis=0) / WIDTH + eps)
    y_H = (x_H * scale * weight_H).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + columns_H, y_H, mask=inside_H)


@triton.jit
def silu_mul(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_I = columns_I < WIDTH
    gates = gate_up_ptr + row * 2 * WIDTH + columns_I
    gate_I = tl.load(gates, mask=inside_I, other=0.0).to(tl.float32)
    up_I = tl.load(gates + WIDTH, mask=inside_I, other=0.0).to(tl.float32)
    y_I = gate_I / (1.0 + tl.exp(-gate_I)) * up_I
    tl.store(out_ptr + row * WIDTH + columns_I, y_I.to(out_ptr.dtype.element_ty), mask=inside_I)


@triton.jit(do_not_specialize=["axis_stride", "token_stride"])
def rotary_turns(
    positions_ptr,
    inv_freq_ptr,
    axis_ptr,
    cos_ptr,
    sin_ptr,
    scaling,
    axis_stride,
    token_stride,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token a program. Without `axis_ptr` there is one axis. Angles go up to the longest context: these are
    not the approximations of the hardware."""
    token = tl.program_id(0).to(tl.int64)
    pairs_P = tl.arange(0, BLOCK_P)
    inside_P = pairs_P < P
    inv_freq_P = tl.load(inv_freq_ptr + pairs_P, mask=inside_P, other=0.0)
    position_ptrs_P = positions_ptr + token * token_stride + tl.zeros([BLOCK_P], tl.int64)
    if axis_ptr is not None:
        position_ptrs_P += tl.load(axis_ptr + pairs_P, mask=inside_P, other=0) * axis_stride
    after_predecessors(PDL)
    angle_P = tl.load(position_ptrs_P, mask=inside_P, other=0).to(tl.float32) * inv_freq_P
    tl.store(cos_ptr + token * P + pairs_P, tl.cos(angle_P) * scaling, mask=inside_P)
    tl.store(sin_ptr + token * P + pairs_P, tl.sin(angle_P) * scaling, mask=inside_P)


@triton.jit
def rope_heads(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    slot_mapping_ptr,
    eps,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NORM: tl.constexpr,
    WRITE: tl.constexpr,
    QUANTISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token a program, in place. WRITE: keys and values go to their places in the cache as well, in e4m3 if
    QUANTISED."""
    P: tl.constexpr = D // 2
    after_predecessors(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads_X1 = tl.arange(0, BLOCK_X)[:, None]
    pairs_1P = tl.arange(0, BLOCK_P)[None, :]
    inside_XP = (heads_X1 < N + 2 * G) & (pairs_1P < P)
    places_XP = qkv_ptr + token * ((N + 2 * G) * D) + heads_X1 * D + pairs_1P
    a_XP = tl.load(places_XP, mask=inside_XP, other=0.0).to(tl.float32)
    b_XP = tl.load(places_XP + P, mask=inside_XP, other=0.0).to(tl.float32)
    rotates_X1 = heads_X1 < N + G
    if NORM:
        squares_X = tl.sum(a_XP * a_XP + b_XP * b_XP, axis=1)
        scale_X1 = tl.where(rotates_X1, (1.0 / tl.sqrt_rn(squares_X / D + eps))[:, None], 1.0)
        query_a_1P = tl.load(query_norm_ptr + pairs_1P, mask=pairs_1P < P, other=0.0).to(tl.float32)
        query_b_1P = tl.load(query_norm_ptr + P + pairs_1P, mask=pairs_1P < P, other=0.0).to(tl.float32)
        key_a_1P = tl.load(key_norm_ptr + pairs_1P, mask=pairs_1P < P, other=0.0).to(tl.float32)
        key_b_1P = tl.load(key_norm_ptr + P + pairs_1P, mask=pairs_1P < P, other=0.0).to(tl.float32)
        is_query_X1 = heads_X1 < N
        a_XP *= scale_X1 * tl.where(rotates_X1, tl.where(is_query_X1, query_a_1P, key_a_1P), 1.0)
        b_XP *= scale_X1 * tl.where(rotates_X1, tl.where(is_query_X1, query_b_1P, key_b_1P), 1.0)
        # The plain kernels round between norm and rotation.
        a_XP = a_XP.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        b_XP = b_XP.to(qkv_ptr.dtype.element_ty).to(tl.float32)
    cos_1P = tl.load(cos_ptr + token * P + pairs_1P, mask=pairs_1P < P, other=0.0)
    sin_1P = tl.load(sin_ptr + token * P + pairs_1P, mask=pairs_1P < P, other=0.0)
    turned_a_XP = tl.where(rotates_X1, a_XP * cos_1P - b_XP * sin_1P, a_XP)
    turned_b_XP = tl.where(rotates_X1, b_XP * cos_1P + a_XP * sin_1P, b_XP)
    turned_a_XP = turned_a_XP.to(qkv_ptr.dtype.element_ty)
    turned_b_XP = turned_b_XP.to(qkv_ptr.dtype.element_ty)
    if WRITE:
        head = tl.load(slot_mapping_ptr + token) * G
        is_key_X1 = (heads_X1 >= N) & rotates_X1
        is_value_X1 = (heads_X1 >= N + G) & (heads_X1 < N + 2 * G)
        stored_a_XP = turned_a_XP
        stored_b_XP = turned_b_XP
        if QUANTISED:
            most_XP = tl.maximum(tl.abs(turned_a_XP.to(tl.float32)), tl.abs(turned_b_XP.to(tl.float32)))
            exponent_X1 = head_exponent(tl.max(most_XP, axis=1))[:, None]
            tl.store(key_exponents_ptr + head + heads_X1 - N, exponent_X1.to(tl.int8), mask=is_key_X1)
            tl.store(value_exponents_ptr + head + heads_X1 - N - G, exponent_X1.to(tl.int8), mask=is_value_X1)
            _, stored_a_XP = quantise(turned_a_XP, exponent_X1)
            _, stored_b_XP = quantise(turned_b_XP, exponent_X1)
        key_XP = inside_XP & is_key_X1
        keys_XP = keys_ptr + (head + heads_X1 - N) * D + pairs_1P
        tl.store(keys_XP, stored_a_XP, mask=key_XP)
        tl.store(keys_XP + P, stored_b_XP, mask=key_XP)
        value_XP = inside_XP & is_value_X1
        values_XP = values_ptr + (head + heads_X1 - N - G) * D + pairs_1P
        tl.store(values_XP, stored_a_XP, mask=value_XP)
        tl.store(values_XP + P, stored_b_XP, mask=value_XP)
    rotated_XP = inside_XP & rotates_X1
    tl.store(places_XP, turned_a_XP, mask=rotated_XP)
    tl.store(places_XP + P, turned_b_XP, mask=rotated_XP)
