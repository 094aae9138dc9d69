"""The seam between a decoder and the code that computes its layers.

Shapes: T tokens, I inputs and O outputs of a linear, N query heads, G KV heads, D head size, P = D/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lm_engine.layers.rope import RotaryEmbedding
from lm_engine.model import AttentionBackend, AttentionMetadata, PagedKV


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


class Mlp(Protocol):
    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H] → [T, H], a tensor of its own."""
        ...


@dataclass(frozen=True)
class ExpertWeights:
    """One expert of a sparse MLP: gate and up stacked, then down."""

    gate_up_2IH: Tensor
    down_HI: Tensor


class Experts(Protocol):
    """All experts of one layer, in the layout that their kernels like best."""

    def __call__(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Sum over each token's K experts of weight · expert(x), added in float32: [T, H] in x's dtype."""
        ...


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a linear's output: B(A x), for gated tokens."""

    down: Linear  # A
    up: Linear  # B

    def __call__(self, x_TI: Tensor, gate_T1: Tensor) -> Tensor:
        return self.up(self.down(x_TI) * gate_T1)


@dataclass(frozen=True)
class LayerAdapter:
    """Beside the linears of a dense layer; None: nothing is added."""

    qkv: LowRank | None
    output: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer, fused where one input feeds several projections. `adapter` acts only in steps
    with a gate, by `layers.gated`."""

    input_norm_H: Tensor
    qkv: Linear
    qk_norm: QKNorm | None
    output: Linear
    post_norm_H: Tensor
    mlp: Mlp
    adapter: LayerAdapter | None = None


class FusedPass(Protocol):
    """All layers of some steps at once, where kernels have something better than one call after another."""

    def takes(self, metadata: AttentionMetadata) -> bool: ...

    def run(
        self,
        layers: Sequence[DecoderLayer],
        residual_TH: Tensor,
        heads: HeadShape,
        cos_TP: Tensor,
        sin_TP: Tensor,
        eps: float,
        kv: PagedKV,
        metadata: AttentionMetadata,
        first_layer: int = 0,
    ) -> Tensor:
        """Through `layers`, the first of which is the cache's `first_layer`: from the residual stream before
        them to that after them, no norm at its end, adapters added where `metadata` has a gate. Spends
        `residual_TH`; attends with the kernels' own attention."""
        ...


class Kernels(Protocol):
    """Stateless apart from scratch memory. Norms and rotations are computed in float32 and rounded once to
    the input's dtype; reductions may run in any order."""

    name: str
    attention: AttentionBackend
    fused_pass: FusedPass | None

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """What the residual stream and everything between the layers is kept in."""
        ...

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, float32_output: bool = False
    ) -> Linear:
        """May keep `weight_OI` itself or a copy in its own layout; the caller drops its reference."""
        ...

    def pack_experts(self, weights: Sequence[ExpertWeights]) -> Experts:
        """As `pack_linear`, for the experts of one layer."""
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

    def turns(self, rotary: RotaryEmbedding, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines as `rotary` gives them, within a rounding or two."""
        ...

    def split_rope(
        self, qkv_TX: Tensor, heads: HeadShape, cos_TP: Tensor, sin_TP: Tensor, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits into q [T, N, D], k and v [T, G, D]; normalises q and k heads if asked; rotates q and k.

        Rotation pairs dimension p with p + D/2: (a·cos - b·sin, b·cos + a·sin). `cos`, `sin` are float32 and
        already scaled. The results may be views of `qkv_TX`, which is spent.
        """
        ...

    def attend(
        self,
        qkv_TX: Tensor,
        heads: HeadShape,
        cos_TP: Tensor,
        sin_TP: Tensor,
        norm: QKNorm | None,
        attention: AttentionBackend,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`split_rope`, then `attention.attend`, as [T, N·D]. Spends `qkv_TX`."""
        ...


def split_and_attend(
    kernels: Kernels,
    qkv_TX: Tensor,
    heads: HeadShape,
    cos_TP: Tensor,
    sin_TP: Tensor,
    norm: QKNorm | None,
    attention: AttentionBackend,
    kv: PagedKV,
    layer: int,
    metadata: AttentionMetadata,
) -> Tensor:
    """`Kernels.attend` for kernels that do not fuse the two."""
    q_TND, k_TGD, v_TGD = kernels.split_rope(qkv_TX, heads, cos_TP, sin_TP, norm)
    return attention.attend(q_TND, k_TGD, v_TGD, kv, layer, metadata).flatten(1)
