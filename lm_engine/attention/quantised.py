"""Keys and values in e4m3, each head of a token with an exponent of its own: the plain path of the kernels.

A power of two scales exactly and costs e4m3, which is a float itself, no precision: a value is within 1/16 of
itself, or within 2⁻¹⁷ of the head's largest. One exponent a token, so that what is written never depends on
what is written beside it, before or after.

Shapes: X anything, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
MIN_EXPONENT = -126
_BIAS, _MANTISSA_BITS = 127, 23
_MANTISSA_OF_MAX = 0x600000  # 448 = 1.75 · 2⁸
_EXPONENT_OF_MAX = 8


def quantise(x_XD: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [X, D] and int8 exponents [X]."""
    x_XD = x_XD.float()
    bits_X = x_XD.abs().amax(dim=-1).view(torch.int32)
    exponent_X = (bits_X >> _MANTISSA_BITS) - (_BIAS + _EXPONENT_OF_MAX)
    exponent_X += (bits_X & ((1 << _MANTISSA_BITS) - 1)) > _MANTISSA_OF_MAX
    exponent_X.clamp_(min=MIN_EXPONENT)
    scaled_XD = torch.ldexp(x_XD, -exponent_X[..., None])
    return scaled_XD.to(torch.float8_e4m3fn), exponent_X.to(torch.int8)


def dequantise(q_XD: Tensor, exponent_X: Tensor) -> Tensor:
    """float32, exactly what is stored."""
    return torch.ldexp(q_XD.float(), exponent_X[..., None].int())
