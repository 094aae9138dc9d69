"""The seam between a decoder and the code that computes its layers.

Shapes: T tokens, I inputs and O outputs of a linear, N query heads, G KV heads, D head size, P = D/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lm_engine.model import AttentionBackend


@dataclass(frozen=True)
class HeadShape:
    """How the fused projection's output row of (N + 2G)·D values splits into q, k, v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class QKNorm:
    """RMS norms over each query and key head (Qwen3), applied before the rotation."""

    query_weight_D: Tensor
    key_weight_D: Tensor
    eps: float


class Linear(Protocol):
    """A weight in the layout its kernels like best. Made once at load, read-only afterwards."""

    in_features: int
    out_features: int

    def __call__(self, x_TI: Tensor) -> Tensor:
        """x·Wᵀ + b as [T, O], in x's dtype unless packed with `float32_output`. Any leading shape for
        T."""
        ...


class Kernels(Protocol):
    """Stateless apart from scratch memory. Norms and rotations are computed in float32 and rounded once to
    the input's dtype; reductions may run in any order."""

    name: str
    attention: AttentionBackend

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """What the residual stream and everything between the layers is kept in."""
        ...

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, float32_output: bool = False
    ) -> Linear:
        """May keep `weight_OI` itself or a copy in its own layout; the caller drops its reference."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Over the last dimension."""
        ...

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). May write the sum into `residual_TH`; `x_TH` is spent too."""
        ...

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """silu(first half of the last dimension) · second half: [T, 2I] → [T, I]."""
        ...

    def split_rope(
        self, qkv_TX: Tensor, heads: HeadShape, cos_TP: Tensor, sin_TP: Tensor, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits into q [T, N, D], k and v [T, G, D]; normalises q and k heads if asked; rotates q and k.

        Rotation pairs dimension p with p + D/2: (a·cos - b·sin, b·cos + a·sin). `cos`, `sin` are float32 and
        already scaled. The results may be views of `qkv_TX`, which is spent.
        """
        ...
