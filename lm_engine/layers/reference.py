"""The plain kernels: every layer in torch operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.attention.reference import BatchedAttention
from lm_engine.layers.kernels import Experts, ExpertWeights, FusedPass, HeadShape, QKNorm, split_and_attend
from lm_engine.layers.mlp import LoopedExperts
from lm_engine.layers.rope import RotaryEmbedding
from lm_engine.model import AttentionBackend, AttentionMetadata, PagedKV


class ReferenceLinear:
    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, float32_output: bool) -> None:
        assert weight_OI.dim() == 2
        assert bias_O is None or bias_O.shape == weight_OI.shape[:1]
        self.out_features, self.in_features = weight_OI.shape
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self.float32_output = float32_output

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = functional.linear(x_TI, self.weight_OI, self.bias_O)
        return y_TO.float() if self.float32_output else y_TO


class ReferenceKernels:
    name = "reference"

    def __init__(self) -> None:
        self.attention: AttentionBackend = BatchedAttention()
        self.fused_pass: FusedPass | None = None

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return weight_dtype

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, float32_output: bool = False
    ) -> ReferenceLinear:
        return ReferenceLinear(weight_OI, bias_O, float32_output)

    def pack_experts(self, weights: Sequence[ExpertWeights]) -> Experts:
        return LoopedExperts(self, weights)

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x_TH.float(), weight_H.shape, weight_H.float(), eps).to(x_TH.dtype)

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TH = residual_TH.add_(x_TH)
        return self.rms_norm(sum_TH, weight_H, eps), sum_TH

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return functional.silu(gate_TI).mul_(up_TI)

    def turns(self, rotary: RotaryEmbedding, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions_AT)

    def split_rope(
        self, qkv_TX: Tensor, heads: HeadShape, cos_TP: Tensor, sin_TP: Tensor, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert qkv_TX.shape[-1] == heads.width
        heads_TXD = qkv_TX.view(qkv_TX.shape[0], -1, heads.head_dim)
        counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        q_TND, k_TGD, v_TGD = torch.split(heads_TXD, counts, dim=1)
        if norm is not None:
            q_TND = self.rms_norm(q_TND, norm.query_weight_D, norm.eps)
            k_TGD = self.rms_norm(k_TGD, norm.key_weight_D, norm.eps)
        return _rotate(q_TND, cos_TP, sin_TP), _rotate(k_TGD, cos_TP, sin_TP), v_TGD

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
        return split_and_attend(self, qkv_TX, heads, cos_TP, sin_TP, norm, attention, kv, layer, metadata)


def _rotate(x_TND: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    a_TNP, b_TNP = x_TND.float().chunk(2, dim=-1)
    cos_T1P, sin_T1P = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    rotated = (a_TNP * cos_T1P - b_TNP * sin_T1P, b_TNP * cos_T1P + a_TNP * sin_T1P)
    return torch.cat(rotated, dim=-1).to(x_TND.dtype)
