"""Snake as one kernel each way: in plain torch its many passes over memory are most of a training step.

Shapes: N rows (crop and channel), C channels, T time steps, P pieces of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocoder.layers import Snake

PIECE = 2048  # time steps of a program


@triton.jit  # type: ignore[untyped-decorator]
def _forward(x_ptr, f_ptr, g_ptr, y_ptr, channels, steps, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = at < steps
    f = tl.load(f_ptr + row % channels)
    g = tl.load(g_ptr + row % channels)
    base = row.to(tl.int64) * steps
    x = tl.load(x_ptr + base + at, mask=inside, other=0.0)
    s = tl.sin(f * x)
    tl.store(y_ptr + base + at, x + g * s * s, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(x_ptr, f_ptr, g_ptr, d_ptr, dx_ptr, df_ptr, dg_ptr, channels, steps, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, piece = tl.program_id(0), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = at < steps
    f = tl.load(f_ptr + row % channels)
    g = tl.load(g_ptr + row % channels)
    base = row.to(tl.int64) * steps
    x = tl.load(x_ptr + base + at, mask=inside, other=0.0)
    d = tl.load(d_ptr + base + at, mask=inside, other=0.0)
    s, c = tl.sin(f * x), tl.cos(f * x)
    both = 2.0 * s * c
    tl.store(dx_ptr + base + at, d * (1.0 + g * f * both), mask=inside)
    place = row * tl.num_programs(1) + piece
    tl.store(df_ptr + place, tl.sum(d * g * x * both, axis=0))
    tl.store(dg_ptr + place, tl.sum(d * s * s, axis=0))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, f_C1: Tensor, g_C1: Tensor) -> Tensor:
        x_BCT = x_BCT.contiguous()
        ctx.save_for_backward(x_BCT, f_C1, g_C1)
        y_BCT = torch.empty_like(x_BCT)
        rows, steps = x_BCT.shape[0] * x_BCT.shape[1], x_BCT.shape[2]
        grid = (rows, triton.cdiv(steps, PIECE))
        _forward[grid](x_BCT, f_C1, g_C1, y_BCT, x_BCT.shape[1], steps, PIECE=PIECE)
        return y_BCT

    @staticmethod
    def backward(ctx: Any, d_BCT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_BCT, f_C1, g_C1 = ctx.saved_tensors
        d_BCT = d_BCT.contiguous()
        dx_BCT = torch.empty_like(x_BCT)
        batch, channels, steps = x_BCT.shape
        pieces = triton.cdiv(steps, PIECE)
        sums = torch.empty(2, batch, channels, pieces, device=x_BCT.device, dtype=torch.float32)
        _backward[(batch * channels, pieces)](
            x_BCT, f_C1, g_C1, d_BCT, dx_BCT, sums[0], sums[1], channels, steps, PIECE=PIECE
        )
        df_C, dg_C = sums.sum(dim=(1, 3))
        return dx_BCT, df_C[:, None], dg_C[:, None]


class FusedSnake(Snake):
    def forward(self, x_BCT: Tensor) -> Tensor:
        out: Tensor = _Fused.apply(x_BCT, self.frequency, self.gain)  # type: ignore[no-untyped-call]
        return out
