"""Layers of a step in which a picture adapter takes part.

Shapes: T tokens, H hidden, I inputs and O outputs of a linear.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from lm_engine.layers.kernels import DecoderLayer, Linear, LowRank
from lm_engine.layers.mlp import DenseMlp


@dataclass
class _GatedLinear:
    linear: Linear
    low_rank: LowRank
    gate_T1: Tensor

    def __post_init__(self) -> None:
        self.in_features, self.out_features = self.linear.in_features, self.linear.out_features

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.linear(x_TI).add_(self.low_rank(x_TI, self.gate_T1))


def with_gate(layer: DecoderLayer, gate_T1: Tensor) -> DecoderLayer:
    """The layer for one step. A token whose gate is 0 gets what it would without an adapter, to the bit.
    `gate_T1`: in the dtype of the activations."""
    adapter, mlp = layer.adapter, layer.mlp
    if adapter is None:
        return layer
    assert isinstance(mlp, DenseMlp), "an adapter beside experts"
    gated = DenseMlp(
        mlp.kernels,
        _gated(mlp.gate_up, adapter.gate_up, gate_T1),
        _gated(mlp.down, adapter.down, gate_T1),
    )
    qkv, output = (
        _gated(layer.qkv, adapter.qkv, gate_T1),
        _gated(layer.output, adapter.output, gate_T1),
    )
    return dataclasses.replace(layer, qkv=qkv, output=output, mlp=gated)


def _gated(linear: Linear, low_rank: LowRank | None, gate_T1: Tensor) -> Linear:
    return linear if low_rank is None else _GatedLinear(linear, low_rank, gate_T1)
