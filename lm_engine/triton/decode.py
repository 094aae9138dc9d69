"""The decoder's layers for decode steps: five launches a layer for one sequence, seven for more.

Shapes: T tokens of the step, H hidden, P = D/2, X = N + 2G heads of D, E parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lm_engine.attention.triton import TritonAttention
from lm_engine.layers.kernels import DecoderLayer, HeadShape, LayerAdapter, Linear, LowRank, Mlp
from lm_engine.layers.mlp import DenseMlp, SparseMlp
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.triton.experts import Shared, TritonExperts
from lm_engine.triton.linear import MAX_SKINNY_ROWS, Norm, TritonLinear
from lm_engine.triton.norm import launch_norm

_NO_ADAPTER = LayerAdapter(qkv=None, output=None, gate_up=None, down=None)


class DecodePass:
    """The gate goes into the linear before it; rotation, cache write and merge into attention. One sequence's
    norm goes into the linear after it, the residual into the one before; those of several are one launch,
    which adds up what a linear's splits have left. Equal to the layers one by one but for fewer roundings."""

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
        gate_T1 = None if metadata.gate_T1 is None else metadata.gate_T1.to(residual_TH.dtype)
        in_parts = residual_TH.shape[0] > 1 and gate_T1 is None
        normed_TH: Tensor | None = None  # of this layer's input, by the layer before
        for index, layer in enumerate(layers, first_layer):
            adapter = _NO_ADAPTER if gate_T1 is None or layer.adapter is None else layer.adapter
            input_norm, post_norm = Norm(layer.input_norm_H, eps), Norm(layer.post_norm_H, eps)
            qkv_ETX = _qkv(layer.qkv, adapter.qkv, residual_TH, normed_TH, input_norm, gate_T1)
            attended_TH = self._attention.attend_decodes(
                qkv_ETX, residual_TH.dtype, heads, cos_TP, sin_TP, layer.qk_norm, kv, index, metadata
            )
            normed_TH = None
            if in_parts and isinstance(layer.mlp, DenseMlp):
                # After the last layer for nothing: so all layers launch the same.
                following = layers[min(index - first_layer + 1, len(layers) - 1)]
                next_norm = Norm(following.input_norm_H, eps)
                normed_TH = _rest_in_parts(
                    layer.output, layer.mlp, attended_TH, residual_TH, post_norm, next_norm
                )
                continue
            _ours(layer.output).fused(attended_TH, residual_MO=residual_TH)
            _add_low_rank(adapter.output, attended_TH, gate_T1, residual_TH)
            if isinstance(layer.mlp, DenseMlp):
                gated_TI = _gated(layer.mlp, adapter.gate_up, residual_TH, post_norm, gate_T1)
                _ours(layer.mlp.down).fused(gated_TI, residual_MO=residual_TH)
                _add_low_rank(adapter.down, gated_TI, gate_T1, residual_TH)
            else:
                _add_sparse(layer.mlp, residual_TH, post_norm)
        return residual_TH


def _qkv(
    linear: Linear,
    low_rank: LowRank | None,
    residual_TH: Tensor,
    normed_TH: Tensor | None,
    norm: Norm,
    gate_T1: Tensor | None,
) -> Tensor:
    """Of the normed residual stream, in parts where attention may add them up."""
    if low_rank is None and residual_TH.shape[0] > 1:
        return _ours(linear).parts(_normed(residual_TH, norm) if normed_TH is None else normed_TH)
    qkv_TX = _of_norm(linear, residual_TH, norm)
    if low_rank is not None:
        _add_low_rank(low_rank, _normed(residual_TH, norm), gate_T1, qkv_TX)
    return qkv_TX[None]


def _rest_in_parts(
    output: Linear, mlp: DenseMlp, attended_TH: Tensor, residual_TH: Tensor, norm: Norm, next_norm: Norm
) -> Tensor:
    """What follows attention, whose sums the norms after them complete: none of a linear's splits waits for
    the others. Returns the next norm's output."""
    normed_TH = _added(_ours(output).parts(attended_TH), residual_TH, norm)
    gated_TI = _ours(mlp.gate_up).fused(normed_TH, gated=True)
    return _added(_ours(mlp.down).parts(gated_TI), residual_TH, next_norm)


def _gated(
    mlp: DenseMlp, low_rank: LowRank | None, residual_TH: Tensor, norm: Norm, gate_T1: Tensor | None
) -> Tensor:
    """silu(gate) · up of the normed residual stream."""
    if low_rank is None:
        return _of_norm(mlp.gate_up, residual_TH, norm, gated=True)
    normed_TH = _normed(residual_TH, norm)
    gate_up_T2I = _ours(mlp.gate_up).fused(normed_TH)
    _add_low_rank(low_rank, normed_TH, gate_T1, gate_up_T2I)
    return mlp.kernels.silu_mul(gate_up_T2I)


def _add_low_rank(low_rank: LowRank | None, x_TI: Tensor, gate_T1: Tensor | None, out_TO: Tensor) -> None:
    if low_rank is not None:
        assert gate_T1 is not None
        low_TR = _ours(low_rank.down).fused(x_TI).mul_(gate_T1)
        _ours(low_rank.up).fused(low_TR, residual_MO=out_TO)


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


def _added(x_ETH: Tensor, residual_TH: Tensor, norm: Norm) -> Tensor:
    """Adds the parts to the residual stream, and norms it."""
    normed_TH = torch.empty_like(residual_TH)
    launch_norm(x_ETH, residual_TH, norm.weight_I, norm.eps, normed_TH)
    return normed_TH


def _ours(linear: Linear) -> TritonLinear:
    assert isinstance(linear, TritonLinear), "a linear of other kernels"
    return linear
