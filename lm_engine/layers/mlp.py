"""The two kinds of MLP: dense, and sparse, where a router sends every token to a few experts.

Shapes: T tokens, H hidden, I intermediate, E experts, K experts of a token, R = T·K rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.layers.kernels import Experts, ExpertWeights, Kernels, Linear


@dataclass(frozen=True)
class DenseMlp:
    kernels: Kernels
    gate_up: Linear
    down: Linear

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x_TH)))


@dataclass(frozen=True)
class SharedExpert:
    """Serves every token, as much as its own gate lets through."""

    mlp: DenseMlp
    gate: Linear  # one output, float32

    def __call__(self, x_TH: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x_TH)).to(x_TH.dtype) * self.mlp(x_TH)


@dataclass(frozen=True)
class SparseMlp:
    """Routing is in float32 whatever the weights: a rounded probability would choose another expert."""

    router: Linear  # [T, E] float32
    experts: Experts
    num_chosen: int
    normalise: bool  # the chosen experts' weights add up to one
    shared: SharedExpert | None

    def __call__(self, x_TH: Tensor) -> Tensor:
        probability_TE = torch.softmax(self.router(x_TH), dim=-1)
        weight_TK, expert_TK = torch.topk(probability_TE, self.num_chosen, dim=-1)
        if self.normalise:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        y_TH = self.experts(x_TH, expert_TK, weight_TK)
        return y_TH if self.shared is None else y_TH + self.shared(x_TH)


class LoopedExperts:
    """The plain path: one expert after the other, each on the tokens that chose it."""

    def __init__(self, kernels: Kernels, weights: Sequence[ExpertWeights]) -> None:
        self._mlps = [
            DenseMlp(kernels, kernels.pack_linear(w.gate_up_2IH), kernels.pack_linear(w.down_HI))
            for w in weights
        ]

    def __call__(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        sum_TH = torch.zeros_like(x_TH, dtype=torch.float32)
        for expert in sorted(set(expert_TK.flatten().tolist())):
            token_R, choice_R = (expert_TK == expert).nonzero(as_tuple=True)
            y_RH = self._mlps[expert](x_TH[token_R])
            sum_TH.index_add_(0, token_R, y_RH.float() * weight_TK[token_R, choice_R].unsqueeze(-1))
        return sum_TH.to(x_TH.dtype)


class GroupedLinear(Protocol):
    """Rows sorted by expert times each its expert's weight."""

    def __call__(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        """`ends_E` int32: the row after each expert's last. Returns [R, O] in x's dtype."""
        ...


def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies groups without asking the host for their sizes: from 2.10 on, and on a GPU for
    bfloat16."""
    return "grouped_mm" in dir(functional) and (device.type == "cpu" or dtype is torch.bfloat16)


class StackedLinear:
    """All experts in one grouped product, which reads the row counts on the device."""

    def __init__(self, weight_EOI: Tensor) -> None:
        self._weight_EIO = weight_EOI.transpose(1, 2)

    def __call__(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        return functional.grouped_mm(x_RI, self._weight_EIO, offs=ends_E)


class SlicedLinear:
    """A linear per expert on its slice of the rows, for kernels that keep weights in a layout of their
    own."""

    def __init__(self, kernels: Kernels, weights_OI: Sequence[Tensor]) -> None:
        self._linears = [kernels.pack_linear(weight_OI) for weight_OI in weights_OI]

    def __call__(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        y_RO = x_RI.new_empty(x_RI.shape[0], self._linears[0].out_features)
        start = 0
        for linear, end in zip(self._linears, ends_E.tolist(), strict=True):
            if end > start:
                y_RO[start:end] = linear(x_RI[start:end])
            start = end
        return y_RO


class GroupedExperts:
    """Rows are sorted by expert once, go through two grouped products, and are put back. With a product that
    does not ask the host, nothing here does: a CUDA graph can hold it."""

    def __init__(
        self, kernels: Kernels, gate_up: GroupedLinear, down: GroupedLinear, num_experts: int
    ) -> None:
        self._kernels = kernels
        self._gate_up, self._down = gate_up, down
        self._num_experts = num_experts

    def __call__(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        num_chosen = expert_TK.shape[1]
        sorted_R, order_R = expert_TK.flatten().sort(stable=True)
        experts_E = torch.arange(self._num_experts, device=x_TH.device)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
        x_RH = x_TH[order_R // num_chosen]
        inner_RI = self._kernels.silu_mul(self._gate_up(x_RH, ends_E))
        y_RH = torch.empty_like(x_RH)
        y_RH[order_R] = self._down(inner_RI, ends_E)
        weighted_TKH = y_RH.view(*expert_TK.shape, -1).float() * weight_TK.unsqueeze(-1)
        return weighted_TKH.sum(dim=1).to(x_TH.dtype)


def stack_experts(weights: Sequence[ExpertWeights]) -> tuple[Tensor, Tensor]:
    """[E, 2I, H] and [E, H, I]."""
    return torch.stack([w.gate_up_2IH for w in weights]), torch.stack([w.down_HI for w in weights])


def stacked_experts(kernels: Kernels, gate_up_E2IH: Tensor, down_EHI: Tensor) -> GroupedExperts:
    """Borrows the weights."""
    gate_up, down = StackedLinear(gate_up_E2IH), StackedLinear(down_EHI)
    return GroupedExperts(kernels, gate_up, down, gate_up_E2IH.shape[0])


def sliced_experts(kernels: Kernels, weights: Sequence[ExpertWeights]) -> GroupedExperts:
    gate_up = SlicedLinear(kernels, [w.gate_up_2IH for w in weights])
    return GroupedExperts(kernels, gate_up, SlicedLinear(kernels, [w.down_HI for w in weights]), len(weights))
