"""Building blocks of the vision towers. Packed rows come first: x is [N, width]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_families.vision.attention import PackedAttention
from model_families.vision.packing import Segments
from model_families.vision.rotary import Rotation

NORM_EPS = 1e-6

Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


class PackedSelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, backend: PackedAttention) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.backend = backend
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        q_NHD, k_NHD, v_NHD = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        mixed = self.backend.attend(rotation.apply(q_NHD), rotation.apply(k_NHD), v_NHD, segments)
        out: Tensor = self.out(mixed.flatten(1))
        return out


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(width, inner)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(
        self, norm1: nn.Module, attention: PackedSelfAttention, norm2: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1 = norm1
        self.attention = attention
        self.norm2 = norm2
        self.mlp = mlp

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Merger(nn.Module):
    """Each merge block's patches side by side → one token of the language model's width.

    `norm` spans one patch, or the whole block when it has the block's width.
    """

    def __init__(
        self, norm: nn.Module, width: int, merge_size: int, out_width: int, *, norm_block: bool
    ) -> None:
        super().__init__()
        self.block_width = width * merge_size**2
        self.norm_block = norm_block
        self.norm = norm
        self.fc1 = nn.Linear(self.block_width, self.block_width)
        self.fc2 = nn.Linear(self.block_width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.block_width)) if self.norm_block else self.norm(x)
        out: Tensor = self.fc2(functional.gelu(self.fc1(x.view(-1, self.block_width))))
        return out
