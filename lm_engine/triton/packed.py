"""Attention inside packed segments, as vision towers have it, for head sizes that are no power of two.

Shapes: N packed rows, H heads, D head size, S segments.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from lm_engine.triton.jit.packed import packed_attention
from lm_engine.triton.launch import dot_precision, interpreted, launch, launch_options, next_power

_LOG2_E = math.log2(math.e)


def attend_packed(
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    starts_S: Tensor,
    max_length: int,
    *,
    rows: int = 64,
    keys: int = 64,
    num_warps: int = 8,
    num_stages: int = 3,
) -> Tensor:
    """[N, H, D] contiguous; scale is D**-0.5. `starts_S` int32 [S + 1]: the first row of each segment, none
    longer than `max_length`, and N. A row's heads lie side by side. Head sizes from 17 on."""
    num_rows, num_heads, head_dim = q_NHD.shape
    for x_NHD in (q_NHD, k_NHD, v_NHD):
        assert x_NHD.stride()[1:] == (head_dim, 1)
    dim_a = next_power(head_dim) // 2 if head_dim & (head_dim - 1) else head_dim // 2
    out_NHD = torch.empty(num_rows, num_heads, head_dim, dtype=q_NHD.dtype, device=q_NHD.device)
    block_m = 16 if interpreted() else min(rows, max(64, next_power(max_length)))
    num_tiles = triton.cdiv(max_length, block_m)
    launch(
        packed_attention,
        ((starts_S.shape[0] - 1) * num_tiles, num_heads),
        q_NHD,
        k_NHD,
        v_NHD,
        starts_S,
        out_NHD,
        num_tiles,
        q_NHD.stride(0),
        k_NHD.stride(0),
        v_NHD.stride(0),
        head_dim**-0.5 * _LOG2_E,
        H=num_heads,
        D=head_dim,
        DIM_A=dim_a,
        DIM_B=max(next_power(head_dim - dim_a), 16),
        BLOCK_M=block_m,
        BLOCK_L=16 if interpreted() else keys,
        PRECISION=dot_precision(q_NHD.dtype),
        num_warps=num_warps if block_m >= 128 else 4,
        num_stages=num_stages,
        **launch_options(q_NHD.device),
    )
    return out_NHD
