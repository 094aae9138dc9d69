"""The decoder's layers for decode steps: five launches a layer for one sequence, seven for more.

Shapes: T tokens of the step, H hidden, P = D/2, X = N + 2G heads of D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lm_engine.attention.triton import TritonAttention
from lm_engine.layers.kernels import DecoderLayer, HeadShape, Linear, Mlp
from lm_engine.layers.mlp import DenseMlp, SparseMlp
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.triton.experts import Shared, TritonExperts
from lm_engine.triton.linear import MAX_SKINNY_ROWS, Norm, TritonLinear
from lm_engine.triton.norm import launch_norm


class DecodePass:
    """The gate and the residual go into the linear before them; rotation, cache write and merge into
    attention; one sequence's norm into the linear after it. Equal to the layers one by one but for fewer
    roundings."""

    def __init__(self, attention: TritonAttention) -> None:
        self._attention = attention

    def takes(self, metadata: AttentionMetadata) -> bool:
        return metadata.max_query_length == 1 and metadata.sequence_lengths.shape[0] <= MAX_SKINNY_ROWS

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
        for index, layer in enumerate(layers, first_layer):
            qkv_TX = _of_norm(layer.qkv, residual_TH, Norm(layer.input_norm_H, eps))
            attended_TH = self._attention.rotate_and_attend(
                qkv_TX, heads, cos_TP, sin_TP, layer.qk_norm, kv, index, metadata
            )
            _ours(layer.output).fused(attended_TH, residual_MO=residual_TH)
            post_norm = Norm(layer.post_norm_H, eps)
            if isinstance(layer.mlp, DenseMlp):
                gated_TI = _of_norm(layer.mlp.gate_up, residual_TH, post_norm, gated=True)
                _ours(layer.mlp.down).fused(gated_TI, residual_MO=residual_TH)
            else:
                _add_sparse(layer.mlp, residual_TH, post_norm)
        return residual_TH


def _add_sparse(mlp: Mlp, residual_TH: Tensor, norm: Norm) -> None:
    normed_TH = _normed(residual_TH, norm)
    if not (isinstance(mlp, SparseMlp) and isinstance(mlp.experts, TritonExperts)):
        residual_TH += mlp(normed_TH)
        return
    shared = None
    if mlp.shared is not None:
        gated_TI = _ours(mlp.shared.mlp.gate_up).fused(normed_TH, gated=True)
        shared = Shared(_ours(mlp.shared.mlp.down).fused(gated_TI), _ours(mlp.shared.gate).fused(normed_TH))
    logits_TE = _ours(mlp.router).fused(normed_TH)
    mlp.experts.add_routed(normed_TH, logits_TE, mlp.num_chosen, mlp.normalise, shared, residual_TH)


def _of_norm(linear: Linear, x_TH: Tensor, norm: Norm, *, gated: bool = False) -> Tensor:
    if x_TH.shape[0] == 1:
        return _ours(linear).fused(x_TH, norm=norm, gated=gated)
    return _ours(linear).fused(_normed(x_TH, norm), gated=gated)


def _normed(x_TH: Tensor, norm: Norm) -> Tensor:
    normed_TH = torch.empty_like(x_TH)
    launch_norm(x_TH, None, norm.weight_I, norm.eps, normed_TH)
    return normed_TH


def _ours(linear: Linear) -> TritonLinear:
    assert isinstance(linear, TritonLinear), "a linear of other kernels"
    return linear
