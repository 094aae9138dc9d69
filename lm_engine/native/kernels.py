"""The decoder's kernels in C, behind the kernels' seam.

Shapes: T tokens, H hidden, I intermediate, N query heads, G KV heads, D head size, P = D/2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lm_engine.layers.kernels import Experts, ExpertWeights, FusedPass, HeadShape, QKNorm, split_and_attend
from lm_engine.layers.mlp import sliced_experts
from lm_engine.layers.rope import RotaryEmbedding
from lm_engine.model import AttentionBackend, AttentionMetadata, PagedKV
from lm_engine.native.attention import NativeAttention
from lm_engine.native.fused import NativePass
from lm_engine.native.library import CRope, dtype_code
from lm_engine.native.linear import NativeLinear, PanelMemory


class NativeKernels:
    """For inference on CPU tensors in float32 or bfloat16; activations and weights may differ in dtype. Uses
    `torch.get_num_threads()` threads of torch's own pool."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._memory = PanelMemory(library)
        self.attention: AttentionBackend = NativeAttention(library)
        self.fused_pass: FusedPass | None = NativePass(library, self)

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """float32 whatever the weights: without bfloat16 arithmetic it costs nothing, and rounds six times
        less
        (mean logit error of a 135M model against float64: 0.019 instead of 0.127)."""
        return torch.float32

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, float32_output: bool = False
    ) -> NativeLinear:
        return NativeLinear(self.library, self._memory, weight_OI, bias_O, float32_output)

    def pack_experts(self, weights: Sequence[ExpertWeights]) -> Experts:
        return sliced_experts(self, weights)

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_TH = x_TH.contiguous()
        y_TH = torch.empty_like(x_TH)
        self._norm(x_TH, None, weight_H, eps, y_TH)
        return y_TH

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert x_TH.shape == residual_TH.shape
        assert x_TH.dtype == residual_TH.dtype
        x_TH, residual_TH = x_TH.contiguous(), residual_TH.contiguous()
        self._norm(x_TH, residual_TH, weight_H, eps, x_TH)
        return x_TH, residual_TH

    def _norm(
        self, x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, y_TH: Tensor
    ) -> None:
        width = x_TH.shape[-1]
        assert weight_H.shape == (width,)
        assert weight_H.is_contiguous()
        self.library.rms_norm(
            x_TH.data_ptr(),
            width,
            None if residual_TH is None else residual_TH.data_ptr(),
            weight_H.data_ptr(),
            dtype_code(weight_H),
            eps,
            y_TH.data_ptr(),
            width,
            dtype_code(x_TH),
            x_TH.numel() // width,
            width,
            torch.get_num_threads(),
        )

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_up_T2I = gate_up_T2I.contiguous()
        double = gate_up_T2I.shape[-1]
        assert double % 2 == 0
        y_TI = torch.empty(*gate_up_T2I.shape[:-1], double // 2, dtype=gate_up_T2I.dtype)
        self.library.silu_mul(
            gate_up_T2I.data_ptr(),
            double,
            y_TI.data_ptr(),
            double // 2,
            dtype_code(gate_up_T2I),
            gate_up_T2I.numel() // double,
            double // 2,
            torch.get_num_threads(),
        )
        return y_TI

    def turns(self, rotary: RotaryEmbedding, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions_AT)

    def split_rope(
        self, qkv_TX: Tensor, heads: HeadShape, cos_TP: Tensor, sin_TP: Tensor, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, half = qkv_TX.shape[0], heads.head_dim // 2
        assert qkv_TX.shape == (num_tokens, heads.width)
        assert cos_TP.shape == sin_TP.shape == (num_tokens, half)
        assert cos_TP.dtype == sin_TP.dtype == torch.float32
        qkv_TX, cos_TP, sin_TP = qkv_TX.contiguous(), cos_TP.contiguous(), sin_TP.contiguous()
        rope = CRope(
            cos_TP.data_ptr(),
            sin_TP.data_ptr(),
            None if norm is None else norm.query_weight_D.data_ptr(),
            None if norm is None else norm.key_weight_D.data_ptr(),
            heads.num_heads,
            heads.num_kv_heads,
            half,
            0 if norm is None else _norm_dtype(norm, heads.head_dim),
            0.0 if norm is None else norm.eps,
        )
        self.library.rope_heads(
            ctypes.addressof(rope),
            qkv_TX.data_ptr(),
            heads.width,
            dtype_code(qkv_TX),
            num_tokens,
            torch.get_num_threads(),
        )
        heads_TXD = qkv_TX.view(num_tokens, -1, heads.head_dim)
        first_v = heads.num_heads + heads.num_kv_heads
        return (
            heads_TXD[:, : heads.num_heads],
            heads_TXD[:, heads.num_heads : first_v],
            heads_TXD[:, first_v:],
        )

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


def _norm_dtype(norm: QKNorm, head_dim: int) -> int:
    for weight_D in (norm.query_weight_D, norm.key_weight_D):
        assert weight_D.shape == (head_dim,)
        assert weight_D.is_contiguous()
    assert norm.query_weight_D.dtype == norm.key_weight_D.dtype
    return dtype_code(norm.query_weight_D)
