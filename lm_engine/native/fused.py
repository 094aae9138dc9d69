"""All layers of a step in one call of the C library, so that the interpreter and its lock are not asked
between
kernels.

Shapes: T tokens, H hidden, P = D/2, X = N + 2G heads of D.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lm_engine.layers.kernels import DecoderLayer, HeadShape, Kernels, Linear
from lm_engine.layers.mlp import DenseMlp
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.native.attention import describe_attention, layer_bytes
from lm_engine.native.library import DTYPE_CODES, CAttention, CLayer, CPass, CRope, check, dtype_code
from lm_engine.native.linear import NativeLinear


@dataclass(frozen=True)
class _Step:
    residual_TH: Tensor
    heads: HeadShape
    cos_TP: Tensor
    sin_TP: Tensor
    eps: float
    kv: PagedKV
    metadata: AttentionMetadata


class NativePass:
    """Runs of dense layers in C; a sparse one by the kernels, as the decoder would. Equal to the layers one
    by one
    to the bit."""

    def __init__(self, library: ctypes.CDLL, kernels: Kernels) -> None:
        self._pass = library.decoder_pass
        self._kernels = kernels
        # By the first layer's id. The layers are kept alive: what is described points into them.
        self._described: dict[int, tuple[list[DecoderLayer], ctypes.Array[CLayer]]] = {}

    def takes(self, metadata: AttentionMetadata) -> bool:
        return not metadata.padded

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
        assert residual_TH.dtype == cos_TP.dtype == sin_TP.dtype == torch.float32
        step = _Step(residual_TH.contiguous(), heads, cos_TP, sin_TP, eps, kv, metadata)
        first = first_layer
        for is_dense, group in groupby(layers, lambda layer: isinstance(layer.mlp, DenseMlp)):
            members = list(group)
            if is_dense:
                self._run_dense(members, first, step)
            else:
                for index, layer in enumerate(members, first):
                    self._run_sparse(layer, index, step)
            first += len(members)
        return step.residual_TH

    def _run_sparse(self, layer: DecoderLayer, index: int, step: _Step) -> None:
        kernels, residual_TH = self._kernels, step.residual_TH
        qkv_TX = layer.qkv(kernels.rms_norm(residual_TH, layer.input_norm_H, step.eps))
        attended_TX = kernels.attend(
            qkv_TX,
            step.heads,
            step.cos_TP,
            step.sin_TP,
            layer.qk_norm,
            kernels.attention,
            step.kv,
            index,
            step.metadata,
        )
        normed_TH, _ = kernels.add_rms_norm(
            layer.output(attended_TX), residual_TH, layer.post_norm_H, step.eps
        )
        residual_TH += layer.mlp(normed_TH)

    def _run_dense(self, layers: list[DecoderLayer], first: int, step: _Step) -> None:
        residual_TH, heads, kv = step.residual_TH, step.heads, step.kv
        num_tokens, hidden = residual_TH.shape
        mlp = layers[0].mlp
        assert isinstance(mlp, DenseMlp)
        assert step.cos_TP.shape == step.sin_TP.shape == (num_tokens, heads.head_dim // 2)
        widths = {
            "normed": hidden,
            "qkv": heads.width,
            "attended": heads.num_heads * heads.head_dim,
            "gate_up": mlp.gate_up.out_features,
            "gated": mlp.down.in_features,
            "mixed": hidden,
        }
        workspace = torch.empty(num_tokens * sum(widths.values()), dtype=torch.float32)
        parts = torch.split(workspace, [num_tokens * width for width in widths.values()])
        call = CPass(
            layers=ctypes.addressof(self._describe(layers)),
            residual=residual_TH.data_ptr(),
            **{name: part.data_ptr() for name, part in zip(widths, parts, strict=True)},
            num_layers=len(layers),
            rows=num_tokens,
            hidden=hidden,
            intermediate=mlp.down.in_features,
            layer_bytes=layer_bytes(kv),
            rope=_describe_rope(step, layers[0]),
            attention=_attention_from(first, step),
            norm_dtype=dtype_code(layers[0].input_norm_H),
            eps=step.eps,
        )
        check(self._pass(ctypes.addressof(call), torch.get_num_threads()))

    def _describe(self, layers: list[DecoderLayer]) -> ctypes.Array[CLayer]:
        known = self._described.get(id(layers[0]))
        if known is None or len(known[0]) != len(layers):
            known = layers, (CLayer * len(layers))(*map(_describe_layer, layers))
            self._described[id(layers[0])] = known
        return known[1]


def _describe_layer(layer: DecoderLayer) -> CLayer:
    assert isinstance(layer.mlp, DenseMlp)
    norm = layer.qk_norm
    linears = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    norms = (layer.input_norm_H, layer.post_norm_H)
    assert all(norm_H.is_contiguous() for norm_H in norms)
    return CLayer(
        *map(_address, linears),
        *(norm_H.data_ptr() for norm_H in norms),
        None if norm is None else norm.query_weight_D.data_ptr(),
        None if norm is None else norm.key_weight_D.data_ptr(),
    )


def _address(linear: Linear) -> int:
    assert isinstance(linear, NativeLinear), "a linear of other kernels"
    return linear.address


def _describe_rope(step: _Step, layer: DecoderLayer) -> CRope:
    norm, heads = layer.qk_norm, step.heads
    return CRope(
        cos=step.cos_TP.data_ptr(),
        sin=step.sin_TP.data_ptr(),
        query_heads=heads.num_heads,
        key_heads=heads.num_kv_heads,
        half=heads.head_dim // 2,
        weight_dtype=0 if norm is None else dtype_code(norm.query_weight_D),
        eps=0.0 if norm is None else norm.eps,
    )


def _attention_from(layer: int, step: _Step) -> CAttention:
    heads = step.heads
    assert step.kv.keys.shape[3] == heads.num_kv_heads
    num_tokens, dtype = len(step.residual_TH), DTYPE_CODES[torch.float32]
    call = describe_attention(num_tokens, heads.num_heads, heads.head_dim, dtype, step.kv, step.metadata)
    call.keys += layer * layer_bytes(step.kv)
    call.values += layer * layer_bytes(step.kv)
    return call
