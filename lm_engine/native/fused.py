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

from lm_engine.layers.kernels import DecoderLayer, HeadShape, Kernels, Linear, LowRank
from lm_engine.layers.mlp import DenseMlp
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.native.attention import describe_cache, describe_step, layer_bytes
from lm_engine.native.library import DTYPE_CODES, CLayer, CLowRank, CPass, CRope, check, dtype_code
from lm_engine.native.linear import NativeLinear


def runs_in_one_call(layers: Sequence[DecoderLayer]) -> bool:
    """Whether all of them are dense, and their linears these kernels' own."""
    for layer in layers:
        if not isinstance(layer.mlp, DenseMlp):
            return False
        linears = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        if not all(isinstance(linear, NativeLinear) for linear in linears):
            return False
    return True


class PassDescriber:
    """What C knows of dense layers. Keeps them alive: what is described points into them, and into `kv`."""

    def __init__(self, layers: Sequence[DecoderLayer], heads: HeadShape, eps: float) -> None:
        mlp = layers[0].mlp
        assert isinstance(mlp, DenseMlp)
        self.layers = tuple(layers)
        self._heads, self._eps = heads, eps
        self._layers = (CLayer * len(layers))(*map(_describe_layer, layers))
        self._hidden, self._intermediate = mlp.down.out_features, mlp.down.in_features
        self._widths = {
            "normed": self._hidden,
            "qkv": heads.width,
            "attended": heads.num_heads * heads.head_dim,
            "gate_up": mlp.gate_up.out_features,
            "gated": self._intermediate,
            "mixed": self._hidden,
            **_adapter_widths(layers),
        }

    def workspace(self, num_tokens: int) -> Tensor:
        """Working memory of a pass over so many tokens, or fewer."""
        return torch.empty(num_tokens * sum(self._widths.values()), dtype=torch.float32)

    def describe(self, kv: PagedKV, first_layer: int, num_tokens: int, workspace: Tensor) -> CPass:
        """A pass over `num_tokens` or fewer, but for the residual stream, the turns and what attention has to
        know of the step. The first of the layers is the cache's `first_layer`."""
        parts, at = {}, workspace.data_ptr()
        for name, width in self._widths.items():
            parts[name] = at
            at += num_tokens * width * workspace.itemsize
        assert at <= workspace.data_ptr() + workspace.nbytes
        norm, heads = self.layers[0].qk_norm, self._heads
        attention = describe_cache(heads.num_heads, heads.head_dim, DTYPE_CODES[torch.float32], kv)
        assert attention.kv_heads == heads.num_kv_heads
        attention.keys += first_layer * layer_bytes(kv)
        attention.values += first_layer * layer_bytes(kv)
        for index, layer in enumerate(self._layers, first_layer):
            layer.window = kv.window(index) or 0
        rope = CRope(
            query_heads=heads.num_heads,
            key_heads=heads.num_kv_heads,
            half=heads.head_dim // 2,
            weight_dtype=0 if norm is None else dtype_code(norm.query_weight_D),
            eps=0.0 if norm is None else norm.eps,
        )
        return CPass(
            layers=ctypes.addressof(self._layers),
            **parts,
            num_layers=len(self.layers),
            rows=num_tokens,
            hidden=self._hidden,
            intermediate=self._intermediate,
            layer_bytes=layer_bytes(kv),
            rope=rope,
            attention=attention,
            norm_dtype=dtype_code(self.layers[0].input_norm_H),
            eps=self._eps,
        )


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
        self._described: dict[int, PassDescriber] = {}  # by the first layer's id

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
        describer, residual_TH = self._describer(layers, step), step.residual_TH
        num_tokens = len(residual_TH)
        assert step.cos_TP.shape == step.sin_TP.shape == (num_tokens, step.heads.head_dim // 2)
        workspace = describer.workspace(num_tokens)
        call = describer.describe(step.kv, first, num_tokens, workspace)
        call.residual = residual_TH.data_ptr()
        call.rope.cos, call.rope.sin = step.cos_TP.data_ptr(), step.sin_TP.data_ptr()
        gate_T1 = step.metadata.gate_T1
        if gate_T1 is not None:
            assert gate_T1.is_contiguous()
            assert gate_T1.shape == (num_tokens, 1)
            assert gate_T1.dtype == torch.float32
            call.gate = gate_T1.data_ptr()
        describe_step(call.attention, num_tokens, step.metadata)
        check(self._pass(ctypes.addressof(call), torch.get_num_threads()))

    def _describer(self, layers: list[DecoderLayer], step: _Step) -> PassDescriber:
        known = self._described.get(id(layers[0]))
        if known is None or len(known.layers) != len(layers):
            known = self._described[id(layers[0])] = PassDescriber(layers, step.heads, step.eps)
        return known


def _low_ranks(layer: DecoderLayer) -> tuple[LowRank | None, ...]:
    """In the order of CLayer."""
    adapter = layer.adapter
    if adapter is None:
        return (None,) * 4
    return adapter.qkv, adapter.output, adapter.gate_up, adapter.down


def _adapter_widths(layers: Sequence[DecoderLayer]) -> dict[str, int]:
    """Of a pass's working memory for what adapters add; none, where there are none."""
    found = [low_rank for layer in layers for low_rank in _low_ranks(layer) if low_rank is not None]
    return {
        "low": max((low_rank.down.out_features for low_rank in found), default=0),
        "added": max((low_rank.up.out_features for low_rank in found), default=0),
    }


def _describe_low_rank(low_rank: LowRank | None) -> CLowRank:
    return CLowRank() if low_rank is None else CLowRank(_address(low_rank.down), _address(low_rank.up))


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
        *map(_describe_low_rank, _low_ranks(layer)),
    )


def _address(linear: Linear) -> int:
    assert isinstance(linear, NativeLinear), "a linear of other kernels"
    return linear.address
