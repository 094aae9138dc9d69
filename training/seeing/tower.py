"""The family's own vision tower as training runs it: pictures of one size side by side, no packing.

P pictures, N patches of one, D width. Equal to the packed forward when every layer attends to whole pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

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

BlockForward = Callable[[Tensor, Tensor, Tensor, int, Sequence[Tensor]], Tensor]


def new_tower(config: Qwen25VLVisionConfig, words: Tensor, seed: int) -> Qwen25VLTower:
    """Untrained. Its tokens lie around the mean of the words, as far from it as words do."""
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
        mean = words.float().mean(0)
        tower.merger.fc2.weight.mul_((words.float() - mean).std() * 2)
        tower.merger.fc2.bias.copy_(mean)
    return tower


def patches(pixels: Tensor, noise: Tensor, config: Qwen25VLVisionConfig) -> Tensor:
    """uint8 [P, height, width, 3] → float32 [P, N, patch width], noise added, in the order of the server."""
    side, merge = config.patch_size, config.spatial_merge_size
    values = pixels.float()
    if bool(noise.any()):
        values = values + torch.randn_like(values) * noise.view(-1, 1, 1, 1)
        values = values.clamp(0, 255).round()
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


class TrainedTower(nn.Module):
    """The tower with a head that says which labels a cell shows: how near its token is to their words."""

    def __init__(
        self,
        tower: Qwen25VLTower,
        label_words: Tensor,
        dtype: torch.dtype,
        block_forward: BlockForward = run_block,
    ) -> None:
        super().__init__()
        self.tower = tower
        self.dtype = dtype  # of the computation; the weights are in float32
        self.block_forward = block_forward
        self.register_buffer("label_words", label_words, persistent=False)  # [labels, width], unit length
        self.label_words: Tensor
        self.sharpness = nn.Parameter(torch.tensor(1.5))  # a logarithm
        self.threshold = nn.Parameter(torch.full((len(label_words),), -4.0))

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """→ [P, C, words' width]."""
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
        return self._linear(functional.gelu(self._linear(x, merger.fc1)), merger.fc2)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        return functional.linear(x, layer.weight.to(self.dtype), bias)

    def label_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy over every label of every cell, summed over labels."""
        offset = tokens.float() - self.tower.merger.fc2.bias.float().detach()
        logits = offset @ self.label_words.T * self.sharpness.exp() + self.threshold
        wanted = torch.zeros_like(logits).scatter_(2, labels.long(), 1.0)
        losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        return losses[..., 1:].sum(2).mean()  # label 0 is padding


@cache
def _angles(
    rows: int, columns: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    grid = pack_grids([(1, rows, columns)], CONFIG.spatial_merge_size)
    rotation = axial_rotation(grid, head_dim, CONFIG.rope_theta, device)
    cos, sin = (torch.cat([half, half], dim=-1).to(dtype) for half in (rotation.cos, rotation.sin))
    return cos, sin
