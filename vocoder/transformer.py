"""A streaming transformer over codec frames: causal attention inside a sliding window, scaled residuals.

x is [batch, time, width]; heads are [batch, heads, time, head width].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vocoder.streaming import StateLayout, StreamBatch


@dataclass(frozen=True)
class TransformerConfig:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # frames that a frame sees, itself included
    rope_theta: float
    norm_eps: float
    attention_bias: bool

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert self.head_dim % 2 == 0
        assert self.window >= 1


@dataclass(frozen=True, eq=False)
class Places:
    """Where a chunk's frames stand in their streams, and what they see."""

    cos_B1TD: Tensor
    sin_B1TD: Tensor
    sees_B1TK: Tensor  # bool, over the window - 1 carried frames and the chunk

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        low, high = x_BHTD.chunk(2, dim=-1)
        return x_BHTD * self.cos_B1TD + torch.cat([-high, low], dim=-1) * self.sin_B1TD


def place_frames(config: TransformerConfig, x_BTW: Tensor, num_frames_B: Tensor) -> Places:
    device, num_steps, carried = x_BTW.device, x_BTW.shape[1], config.window - 1
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency_P = config.rope_theta ** -(half / config.head_dim)
    at_BT = num_frames_B[:, None] + torch.arange(num_steps, device=device)
    angle_BTP = at_BT[..., None].float() * frequency_P
    angle_B1TD = torch.cat([angle_BTP, angle_BTP], dim=-1)[:, None]
    key_BK = num_frames_B[:, None] + torch.arange(-carried, num_steps, device=device)
    back_BTK = at_BT[:, :, None] - key_BK[:, None]
    sees_BTK = (back_BTK >= 0) & (back_BTK < config.window) & (key_BK >= 0)[:, None]
    return Places(angle_B1TD.cos().to(x_BTW.dtype), angle_B1TD.sin().to(x_BTW.dtype), sees_BTK[:, None])


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class WindowAttention(nn.Module):
    """Carries the rotated keys and the values of the last window - 1 frames."""

    def __init__(self, layout: StateLayout, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        carried = (config.num_kv_heads, config.window - 1, config.head_dim)
        self.keys, self.values = layout.reserve(*carried), layout.reserve(*carried)
        self.q = nn.Linear(config.hidden_size, query, bias=bias)
        self.k = nn.Linear(config.hidden_size, kv, bias=bias)
        self.v = nn.Linear(config.hidden_size, kv, bias=bias)
        self.out = nn.Linear(query, config.hidden_size, bias=bias)

    def forward(self, x_BTW: Tensor, places: Places, streams: StreamBatch) -> Tensor:
        config = self.config
        q_BHTD = places.rotate(self._split(self.q(x_BTW)))
        k_BHKD = torch.cat([streams.read(self.keys), places.rotate(self._split(self.k(x_BTW)))], dim=2)
        v_BHKD = torch.cat([streams.read(self.values), self._split(self.v(x_BTW))], dim=2)
        first = k_BHKD.shape[2] - (config.window - 1)
        streams.write(self.keys, k_BHKD[:, :, first:])
        streams.write(self.values, v_BHKD[:, :, first:])
        y_BHTD = functional.scaled_dot_product_attention(
            q_BHTD,
            k_BHKD,
            v_BHKD,
            attn_mask=places.sees_B1TK,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        out: Tensor = self.out(y_BHTD.transpose(1, 2).flatten(2))
        return out

    def _split(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.view(*x_BTW.shape[:2], -1, self.config.head_dim).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, layout: StateLayout, config: TransformerConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = RmsNorm(width, config.norm_eps)
        self.attention = WindowAttention(layout, config)
        self.attention_scale = nn.Parameter(torch.empty(width))
        self.mlp_norm = RmsNorm(width, config.norm_eps)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.mlp_scale = nn.Parameter(torch.empty(width))

    def forward(self, x_BTW: Tensor, places: Places, streams: StreamBatch) -> Tensor:
        x_BTW = x_BTW + self.attention_scale * self.attention(self.attention_norm(x_BTW), places, streams)
        y_BTW = self.mlp_norm(x_BTW)
        y_BTW = self.down(functional.silu(self.gate(y_BTW)) * self.up(y_BTW))
        out: Tensor = x_BTW + self.mlp_scale * y_BTW
        return out


class StreamingTransformer(nn.Module):
    def __init__(self, layout: StateLayout, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(layout, config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_BTW: Tensor, streams: StreamBatch) -> Tensor:
        places = place_frames(self.config, x_BTW, streams.num_frames_B)
        for layer in self.layers:
            x_BTW = layer(x_BTW, places, streams)
        normed: Tensor = self.norm(x_BTW)
        return normed
