"""Counter-based random numbers: a token's noise depends on (seed, position, token id) and nothing else.

The hash, all in wrapping integers:
    key       = mix64(mix64(seed) + (position + 1) · 0x9E3779B97F4A7C15); mix64 is splitmix64's finaliser
    k0, k1    = low and high 32 bits of key
    h         = mix32(mix32(token + k0) xor k1); mix32 is the two-multiply finaliser "lowbias32"
    v         = (h >> 1 + 0.5) / 2³¹, uniform in (0, 1)
    gumbel    = -log(-log(1 - v)); small v, which decide who wins, keep all of their 31 bits
argmax(logit + gumbel) over tokens is a draw from softmax(logits).

Shapes: R rows, V tokens of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_64 = 0x9E3779B97F4A7C15


def gumbel_noise(seed_R: Tensor, position_R: Tensor, token_ids_RV: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [R, V]. `token_ids_RV` may be [1, V]; seeds are int64 of any value."""
    key_R1 = _mix64(_mix64(seed_R) + (position_R + 1) * _signed(_GOLDEN_64, 64)).unsqueeze(-1)
    low_R1, high_R1 = _low_word(key_R1), _low_word(key_R1 >> 32)
    hash_RV = _mix32_(_mix32_(token_ids_RV.int() + low_R1).bitwise_xor_(high_R1))
    uniform_RV = hash_RV.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    exponential_RV = uniform_RV.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential_RV.log_().neg_()


def signed_seed(seed: int) -> int:
    """Any integer as the int64 that the device holds."""
    return _signed(seed & (2**64 - 1), 64)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


def _low_word(x: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32."""
    word = x & 0xFFFFFFFF
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shift_right(x, 31, 64)


def _mix32_(x: Tensor) -> Tensor:
    """In place on int32."""
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(0x7FEB352D)
    x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(_signed(0x846CA68B, 32))
    return x.bitwise_xor_(_shift_right(x, 16, 32))


def _shift_right(x: Tensor, count: int, bits: int) -> Tensor:
    """Logical: torch shifts signed integers arithmetically, so the copies of the sign bit are cut off."""
    return (x >> count).bitwise_and_((1 << (bits - count)) - 1)
