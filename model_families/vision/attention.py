"""Attention over packed segments: the plain masked path, the one grouped by length, and the GPU kernels.

Shapes: N packed rows, H heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from model_families.vision.packing import Segments


class PackedAttention(Protocol):
    """Stateless. Rows attend to all rows of their own segment and to no other."""

    name: str

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
        """Returns [N, H, D]. Scale is D**-0.5."""
        ...


class MaskedAttention:
    """The plain path: one attention over everything under a block-diagonal mask; N² memory."""

    name = "masked"

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHD, k_NHD, v_NHD))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=segments.mask)
        return out[0].transpose(0, 1)


class GroupedAttention:
    """Segments of equal length form a batch: one call per distinct length; nearly all windows share one."""

    name = "grouped"

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
        out_NHD = torch.empty_like(q_NHD)
        for group in segments.groups:
            shape = (group.count, group.length, *q_NHD.shape[1:])
            q, k, v = (x[group.rows].reshape(shape).transpose(1, 2) for x in (q_NHD, k_NHD, v_NHD))
            out = functional.scaled_dot_product_attention(q, k, v)
            out_NHD[group.rows] = out.transpose(1, 2).flatten(0, 1)
        return out_NHD


class VarlenAttention:
    """One variable-length flash kernel for all segments; CUDA, half precision, head size a multiple of 8."""

    name = "varlen"

    def __init__(self) -> None:
        # Brings torch's compiler along: seconds that only a worker with this kernel should pay.
        from torch.nn.attention.varlen import varlen_attn

        self._kernel = varlen_attn

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
        longest = segments.max_length
        out = self._kernel(q_NHD, k_NHD, v_NHD, segments.starts, segments.starts, longest, longest)
        assert isinstance(out, Tensor)
        return out


class TritonPackedAttention:
    """As `VarlenAttention`, for head sizes that it pads: those that are no power of two."""

    name = "packed"

    def __init__(self) -> None:
        from lm_engine.triton.packed import attend_packed

        self._attend = attend_packed

    @staticmethod
    def takes(dtype: torch.dtype, head_dim: int) -> bool:
        half = dtype in (torch.float16, torch.bfloat16)
        return half and 16 < head_dim <= 128 and head_dim & (head_dim - 1) != 0

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
        q, k, v = (_heads_side_by_side(x_NHD) for x_NHD in (q_NHD, k_NHD, v_NHD))
        return self._attend(q, k, v, segments.starts, segments.max_length)


def _heads_side_by_side(x_NHD: Tensor) -> Tensor:
    return x_NHD if x_NHD.stride()[1:] == (x_NHD.shape[2], 1) else x_NHD.contiguous()


def select_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> PackedAttention:
    """The fastest path that supports the device, the dtype and the head size."""
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256:
        return VarlenAttention()
    return GroupedAttention()
