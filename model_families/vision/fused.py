"""Vision blocks by the decoder's GPU kernels: norms with the residual, rotation and gate each in one launch.

Shapes: N packed rows, H heads, D head size, W width, I inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from lm_engine.layers.kernels import HeadShape, Kernels
from model_families.vision.layers import Block, GatedMlp, PackedSelfAttention
from model_families.vision.packing import Segments
from model_families.vision.rotary import Rotation

# Library products of a width that no vector load divides take several times as long.
INNER_MULTIPLE = 64
GATE_OF_ONE = 64.0  # its own SiLU in every dtype, and a power of two


class FusedBlock(nn.Module):
    """A `Block` of RMS norms and a SiLU gate, with the same weights; the same values to a rounding."""

    def __init__(self, block: Block, kernels: Kernels, *, spends_input: bool = False) -> None:
        """`spends_input`: nobody reads it afterwards, and the block adds to it where it is."""
        super().__init__()
        assert fits(block)
        assert isinstance(block.mlp, GatedMlp)
        assert isinstance(block.norm1, nn.RMSNorm)
        assert isinstance(block.norm2, nn.RMSNorm)
        self._kernels = kernels
        self._attention = block.attention
        self._norm1, self._norm2 = block.norm1, block.norm2
        self._spends_input = spends_input
        self._gate_up_2IW, self._gate_up_bias, self._down_WI = _pack(block.mlp)

    def forward(self, x_NW: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        kernels = self._kernels
        normed_NW = kernels.rms_norm(x_NW, self._norm1.weight, _eps(self._norm1))
        mixed_NW = attend(self._attention, normed_NW, rotation, segments, kernels)
        own_NW = x_NW if self._spends_input else x_NW.clone()  # the residual stream is written from here on
        normed_NW, x_NW = kernels.add_rms_norm(mixed_NW, own_NW, self._norm2.weight, _eps(self._norm2))
        gated_NI = kernels.silu_mul(functional.linear(normed_NW, self._gate_up_2IW, self._gate_up_bias))
        return x_NW.addmm_(gated_NI, self._down_WI.t())


def attend(
    attention: PackedSelfAttention, x_NW: Tensor, rotation: Rotation, segments: Segments, kernels: Kernels
) -> Tensor:
    """`attention(x_NW, ...)` with queries and keys rotated where the projection left them."""
    qkv_NX = attention.qkv(x_NW)
    num_heads = attention.num_heads
    heads = HeadShape(num_heads, num_heads, qkv_NX.shape[1] // (3 * num_heads))
    cos_NP, sin_NP = rotation.cos.squeeze(1), rotation.sin.squeeze(1)
    q_NHD, k_NHD, v_NHD = kernels.split_rope(qkv_NX, heads, cos_NP, sin_NP, None)
    out: Tensor = attention.out(attention.backend.attend(q_NHD, k_NHD, v_NHD, segments).flatten(1))
    return out


def fits(block: nn.Module) -> bool:
    return (
        isinstance(block, Block)
        and isinstance(block.norm1, nn.RMSNorm)
        and isinstance(block.norm2, nn.RMSNorm)
        and isinstance(block.mlp, GatedMlp)
        and block.mlp.activation is functional.silu
    )


def fuse_blocks(blocks: nn.ModuleList, kernels: Kernels) -> None:
    """Replaces, in place, every block that fits. Of a tower that keeps no block's output but the last."""
    follows = False
    for index, block in enumerate(blocks):
        fitting = isinstance(block, Block) and fits(block)
        if isinstance(block, Block) and fitting:
            blocks[index] = FusedBlock(block, kernels, spends_input=follows)
        follows = fitting


def _eps(norm: nn.RMSNorm) -> float:
    assert norm.eps is not None
    return norm.eps


def _pack(mlp: GatedMlp) -> tuple[Tensor, Tensor, Tensor]:
    """[gate; up] weights and bias, and the down weight; the inner width padded with zeros, which change
    nothing: silu(0) · 0 = 0. One that is added is 1 in every row, exactly, and its weight is the down bias:
    the product is then all that there is to add to the residual."""
    inner = mlp.gate.out_features
    extra = 1 + -(inner + 1) % INNER_MULTIPLE
    gate_up = [functional.pad(linear.weight, (0, 0, 0, extra)) for linear in (mlp.gate, mlp.up)]
    biases = [functional.pad(linear.bias, (0, extra)) for linear in (mlp.gate, mlp.up)]
    for bias_I, value in zip(biases, (GATE_OF_ONE, 1 / GATE_OF_ONE), strict=True):
        bias_I[inner] = value
    down_WI = functional.pad(mlp.down.weight, (0, extra)).contiguous()
    down_WI[:, inner] = mlp.down.bias
    return torch.cat(gate_up), torch.cat(biases), down_WI
