"""The decoder's kernels in Triton, behind the kernels' seam.

Shapes: T tokens, H hidden, I intermediate, N query heads, G KV heads, D head size, P = D/2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from lm_engine.attention.triton import TritonAttention
from lm_engine.layers.kernels import Experts, ExpertWeights, FusedPass, HeadShape, QKNorm, split_and_attend
from lm_engine.layers.mlp import has_grouped_product, sliced_experts, stack_experts, stacked_experts
from lm_engine.layers.rope import RotaryEmbedding
from lm_engine.model import AttentionBackend, AttentionMetadata, PagedKV
from lm_engine.triton.decode import DecodePass
from lm_engine.triton.experts import TritonExperts
from lm_engine.triton.jit import elementwise
from lm_engine.triton.launch import launch, launch_options, next_power
from lm_engine.triton.linear import TritonLinear, make_arrivals
from lm_engine.triton.norm import launch_norm

_GATE_BLOCK = 1024
_TURN_WARPS = 2  # for 64 pairs


class TritonKernels:
    """Every launch can be captured in a CUDA graph. One step at a time: the attention's scratch is shared."""

    name = "triton"

    def __init__(self, device: torch.device, attention: TritonAttention | None = None) -> None:
        self._device = device
        self._attention = attention or TritonAttention(device)
        self._arrivals = make_arrivals(device)
        self.attention: AttentionBackend = self._attention
        self.fused_pass: FusedPass | None = DecodePass(self._attention)

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return weight_dtype

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, float32_output: bool = False
    ) -> TritonLinear:
        return TritonLinear(weight_OI.contiguous(), bias_O, float32_output, self._arrivals)

    def pack_experts(self, weights: Sequence[ExpertWeights]) -> Experts:
        first = weights[0].gate_up_2IH
        if has_grouped_product(first.device, first.dtype):
            gate_up_E2IH, down_EHI = stack_experts(weights)
            return TritonExperts(gate_up_E2IH, down_EHI, stacked_experts(self, gate_up_E2IH, down_EHI))
        return sliced_experts(self, weights)

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        launch_norm(x_TH.contiguous(), None, weight_H, eps, out_TH)
        return out_TH

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert x_TH.shape == residual_TH.shape
        assert residual_TH.is_contiguous()
        x_TH = x_TH.contiguous()
        launch_norm(x_TH, residual_TH, weight_H, eps, x_TH)
        return x_TH, residual_TH

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_up_T2I = gate_up_T2I.contiguous()
        width = gate_up_T2I.shape[-1] // 2
        assert gate_up_T2I.shape[-1] == 2 * width
        out_TI = gate_up_T2I.new_empty(*gate_up_T2I.shape[:-1], width)
        block = min(next_power(width), _GATE_BLOCK)
        grid = (out_TI.numel() // width, triton.cdiv(width, block))
        launch(
            elementwise.silu_mul,
            grid,
            gate_up_T2I,
            out_TI,
            WIDTH=width,
            BLOCK=block,
            **launch_options(self._device),
        )
        return out_TI

    def turns(self, rotary: RotaryEmbedding, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        (num_axes, num_tokens), (num_pairs,) = positions_AT.shape, rotary.inv_freq_P.shape
        assert num_axes == rotary.num_axes
        cos_TP, sin_TP = (rotary.inv_freq_P.new_empty(num_tokens, num_pairs) for _ in range(2))
        launch(
            elementwise.rotary_turns,
            (num_tokens,),
            positions_AT,
            rotary.inv_freq_P,
            rotary.axis_P,
            cos_TP,
            sin_TP,
            rotary.scaling,
            *positions_AT.stride(),
            P=num_pairs,
            BLOCK_P=next_power(num_pairs),
            num_warps=_TURN_WARPS,
            **launch_options(self._device),
        )
        return cos_TP, sin_TP

    def split_rope(
        self, qkv_TX: Tensor, heads: HeadShape, cos_TP: Tensor, sin_TP: Tensor, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_TX = qkv_TX.contiguous()
        self._attention.rotate(qkv_TX, heads, cos_TP.contiguous(), sin_TP.contiguous(), norm)
        first_v = heads.num_heads + heads.num_kv_heads
        heads_TXD = qkv_TX.view(qkv_TX.shape[0], -1, heads.head_dim)
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
        if attention is not self._attention:
            return split_and_attend(self, qkv_TX, heads, cos_TP, sin_TP, norm, attention, kv, layer, metadata)
        return self._attention.rotate_and_attend(
            qkv_TX.contiguous(), heads, cos_TP, sin_TP, norm, kv, layer, metadata
        )
