"""The family's own vision tower as training runs it: pictures of one size side by side, no packing.

P pictures, N patches of one, D width. Equal to the packed forward when every layer attends to whole pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from model_families.default_model.compose import IMAGE_MEAN, IMAGE_STD, TRAINED_TOWER
from model_families.qwen2_5_vl.encoder import Qwen25VLTower, Qwen25VLVisionConfig
from model_families.vision.attention import GroupedAttention
from model_families.vision.layers import NORM_EPS
from model_families.vision.packing import pack_grids
from model_families.vision.rotary import axial_rotation

CONFIG = msgspec.convert({**TRAINED_TOWER, "out_hidden_size": 576}, Qwen25VLVisionConfig)
MEAN, STD = IMAGE_MEAN, IMAGE_STD

EMPTY_WEIGHT = 0.2  # of a cell that shows nothing, beside one that shows something
NEARNESS = 20.0  # nats for which a word is farther away, in squares, by the words' variance
FIRST_SPREAD = 0.3  # of untrained tokens, beside words

BlockForward = Callable[[Tensor, Tensor, Tensor, int, Sequence[Tensor]], Tensor]


def new_tower(config: Qwen25VLVisionConfig, words: Tensor, seed: int) -> Qwen25VLTower:
    """Untrained. Its tokens lie nearer to zero than words do."""
    generator = torch.Generator().manual_seed(seed)
    tower = Qwen25VLTower(config, GroupedAttention()).float()
    residual = (2 * config.depth) ** -0.5
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            scale = parameter.shape[1] ** -0.5
            scale *= residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        halves = tower.patch_embed.weight.view(config.hidden_size, 3, config.temporal_patch_size, -1)
        halves.copy_(halves.mean(2, keepdim=True).expand_as(halves))  # a picture is the same twice
        tower.merger.fc2.weight.mul_(words.float().square().mean().sqrt() * 2 * FIRST_SPREAD)
    return tower


def patches(pixels: Tensor, noise: Tensor, config: Qwen25VLVisionConfig) -> Tensor:
    """uint8 [P, height, width, 3] → float32 [P, N, patch width], noise added, in the order of the server."""
    side, merge = config.patch_size, config.spatial_merge_size
    values = pixels.float()
    values = (values + torch.randn_like(values) * noise.view(-1, 1, 1, 1)).clamp(0, 255).round()
    mean, std = (torch.tensor(x, device=pixels.device) * 255 for x in (MEAN, STD))
    count, height, width, channels = values.shape
    rows, columns = height // (side * merge), width // (side * merge)
    blocks = ((values - mean) / std).view(count, rows, merge, side, columns, merge, side, channels)
    flat = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(count, rows * columns * merge**2, channels, 1, -1)
    return flat.expand(-1, -1, -1, config.temporal_patch_size, -1).flatten(2)


def run_block(x: Tensor, cos: Tensor, sin: Tensor, heads: int, weights: Sequence[Tensor]) -> Tensor:
    """x [P, N, D]; cos and sin [N, 1, head]. A function of tensors: compiled once for all layers."""
    norm1, qkv_w, qkv_b, out_w, out_b, norm2, gate_w, gate_b, up_w, up_b, down_w, down_b = weights
    h = functional.rms_norm(x, norm1.shape, norm1, NORM_EPS)
    qkv = functional.linear(h, qkv_w, qkv_b).view(*h.shape[:2], 3 * heads, -1)
    turned, v = _rotate(qkv[:, :, : 2 * heads], cos, sin), qkv[:, :, 2 * heads :]
    q, k = turned[:, :, :heads], turned[:, :, heads:]
    mixed = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    x = x + functional.linear(mixed.transpose(1, 2).flatten(2), out_w, out_b)
    h = functional.rms_norm(x, norm2.shape, norm2, NORM_EPS)
    inner = functional.silu(functional.linear(h, gate_w, gate_b)) * functional.linear(h, up_w, up_b)
    return x + functional.linear(inner, down_w, down_b)


def _block_weights(block: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    modules = (*("norm1", "attention.qkv", "attention.out", "norm2", "mlp.gate", "mlp.up", "mlp.down"),)
    names = [
        f"{m}.{kind}" for m in modules for kind in ("weight", "bias") if kind == "weight" or "norm" not in m
    ]
    return [block.get_parameter(name).to(dtype) for name in names]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Looked(NamedTuple):
    tokens: Tensor  # [P, C, words' width]: what the language model takes
    inner: Tensor  # [P, C, merge block's width]: what they are made of


class TrainedTower(nn.Module):
    """The tower, with what teaches it alone: a head that says which labels a cell shows, no part of the
    model."""

    def __init__(
        self,
        tower: Qwen25VLTower,
        num_labels: int,
        dtype: torch.dtype,
        block_forward: BlockForward = run_block,
    ) -> None:
        super().__init__()
        self.tower = tower
        self.dtype = dtype  # of the computation; the weights are in float32
        self.block_forward = block_forward
        self.labels = nn.Linear(tower.merger.block_width, num_labels)
        nn.init.normal_(self.labels.weight, std=tower.merger.block_width**-0.5)
        nn.init.constant_(self.labels.bias, -4.0)

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """→ [P, C, words' width]."""
        return self.look(pixels, noise).tokens

    def look(self, pixels: Tensor, noise: Tensor) -> Looked:
        tower, config = self.tower, self.tower.config
        side, heads = config.patch_size, config.num_heads
        x = self._linear(patches(pixels, noise, config).to(self.dtype), tower.patch_embed)
        rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
        cos, sin = _angles(rows, columns, config.hidden_size // heads, pixels.device, self.dtype)
        for block in tower.blocks:
            x = self.block_forward(x, cos, sin, heads, _block_weights(block, self.dtype))
        merger = tower.merger
        weight = merger.norm.get_parameter("weight").to(self.dtype)
        x = functional.rms_norm(x, weight.shape, weight, NORM_EPS).reshape(len(x), -1, merger.block_width)
        inner = functional.gelu(self._linear(x, merger.fc1))
        return Looked(self._linear(inner, merger.fc2), inner)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        return functional.linear(x, layer.weight.to(self.dtype), bias)

    def label_loss(self, looked: Looked, labels: Tensor, spoken: Tensor, which: Tensor) -> Tensor:
        """What the head says of every label of every cell (binary cross-entropy, summed over labels); how far
        the token is from the word of `spoken` [K, width] that the cell is to be, `which` [P, C], or from
        nothing where that is -1 (in mean squares of those words); and whether that word is the nearest
        (cross-entropy).

        One word a cell, since the language model reads its own words and hardly any mixture of them. A head
        of its own, because words of one kind lie close together (two digits' at a cosine of 0.87, from the
        mean word): read off the token by its nearness to words alone, they would be learnt slowly."""
        logits = self._linear(looked.inner, self.labels).float()
        wanted = torch.zeros_like(logits).scatter_(2, labels.long(), 1.0)
        wanted[..., 0] = 0.0  # label 0 is padding
        named = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(2).mean()
        spoken, shows = spoken.float(), which >= 0
        words = functional.embedding(which.clamp(min=0), spoken) * shows.unsqueeze(2)
        distance = (looked.tokens.float() - words).square().mean(2)
        scale = words.square().mean() / shows.float().mean().clamp(min=1e-6) + 1e-6
        weight = torch.where(shows, 1.0, EMPTY_WEIGHT)
        far = (distance * weight).sum() / (weight.sum() * scale)
        spread = (spoken - spoken.mean(0)).square().sum(1).mean() + 1e-6
        nearness = (looked.tokens.float() @ spoken.T - spoken.square().sum(1) / 2) * (NEARNESS / spread)
        taken = functional.cross_entropy(
            nearness.flatten(0, 1), which.flatten(), ignore_index=-1, reduction="sum"
        )
        return named + far + taken / shows.sum().clamp(min=1)


@cache
def _angles(
    rows: int, columns: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    grid = pack_grids([(1, rows, columns)], CONFIG.spatial_merge_size)
    rotation = axial_rotation(grid, head_dim, CONFIG.rope_theta, device)
    cos, sin = (torch.cat([half, half], dim=-1).to(dtype) for half in (rotation.cos, rotation.sin))
    return cos, sin
