"""Building blocks of the audio towers. Packed rows come first: x is [N, width]."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_families.vision.attention import PackedAttention
from model_families.vision.packing import Segments

NORM_EPS = 1e-5


class AudioAttention(nn.Module):
    """Every row attends to all of its segment. `key_bias`: a key's bias shifts all scores of a query alike,
    so families may leave it out."""

    def __init__(self, width: int, num_heads: int, backend: PackedAttention, *, key_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.backend = backend
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=key_bias)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q_NHD, k_NHD, v_NHD = (
            part(x).unflatten(1, (self.num_heads, -1)) for part in (self.q, self.k, self.v)
        )
        out: Tensor = self.out(self.backend.attend(q_NHD, k_NHD, v_NHD, segments).flatten(1))
        return out


class AudioBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(
        self, width: int, num_heads: int, inner: int, backend: PackedAttention, *, key_bias: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attention = AudioAttention(width, num_heads, backend, key_bias=key_bias)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = x + self.attention(self.norm1(x), segments)
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """[length, width] float32: sines of each position at falling frequencies, then the cosines."""
    half = width // 2
    assert width == 2 * half, "an odd width"
    assert half > 1, "too narrow for more than one frequency"
    step = math.log(10_000.0) / (half - 1)
    frequency = torch.exp(-step * torch.arange(half, dtype=torch.float32, device=device))
    angle = torch.arange(length, device=device).unsqueeze(1) * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)
