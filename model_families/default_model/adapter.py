"""The picture adapter as it is shipped: its layers' matrices stacked, B transposed.

So there are few names, and a scale for each component of A and of B, whatever size one has beside the other.
`adapter.{proj}.a` [layers * rank, inputs], `adapter.{proj}.b` [layers * rank, outputs].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

PREFIX = "adapter."
_NAMES = {"a": "lora_A", "b": "lora_B"}


def split_adapter(shipped: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Of all that is shipped, the adapter as the checkpoint names it: `layers.{i}.{proj}.lora_A.weight`
    [rank, inputs], `….lora_B.weight` [outputs, rank]; nothing where there is none."""
    tensors: dict[str, Tensor] = {}
    for name, stacked in shipped.items():
        if not name.startswith(PREFIX):
            continue
        projection, kind = name.removeprefix(PREFIX).split(".")
        assert len(stacked) % num_layers == 0, f"{name} is not of {num_layers} layers"
        for layer, matrix in enumerate(stacked.chunk(num_layers)):
            value = matrix if kind == "a" else matrix.T
            tensors[f"layers.{layer}.{projection}.{_NAMES[kind]}.weight"] = value.contiguous()
    return tensors


def join_adapter(tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """`split_adapter` backwards."""
    projections = {name.split(".")[2] for name in tensors}
    shipped: dict[str, Tensor] = {}
    for projection in sorted(projections):
        parts = [
            [tensors[f"layers.{layer}.{projection}.{name}.weight"] for layer in range(num_layers)]
            for name in _NAMES.values()
        ]
        shipped[f"{PREFIX}{projection}.a"] = torch.cat(parts[0])
        shipped[f"{PREFIX}{projection}.b"] = torch.cat([matrix.T for matrix in parts[1]])
    return shipped
