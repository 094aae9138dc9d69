"""What the library computes slowly on a GPU, in kernels of our own: the snake, and convolutions of one
channel
to one, and of many to one.

Shapes: B rows, C channels, T steps, O output channels, K taps.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_BLOCK = 1024
_NARROW_STEPS = 32


def snake(x_BCT: Tensor, frequency_C1: Tensor, gain_C1: Tensor) -> Tensor:
    """x + gain · sin(frequency · x)² per channel (Ziyin et al. 2020, with a magnitude of its own)."""
    if takes(x_BCT):
        return fused_snake(x_BCT, frequency_C1, gain_C1)
    return (x_BCT * frequency_C1).sin_().square_().mul_(gain_C1).add_(x_BCT)


def fused_snake(x_BCT: Tensor, frequency_C1: Tensor, gain_C1: Tensor) -> Tensor:
    from vocoder import jit  # Triton is optional

    x_BCT = x_BCT.contiguous()
    out_BCT = torch.empty_like(x_BCT)
    num_values = x_BCT.numel()
    jit.snake[(-(-num_values // _BLOCK),)](
        x_BCT, frequency_C1, gain_C1, out_BCT, num_values, x_BCT.shape[1], x_BCT.shape[2], BLOCK=_BLOCK
    )
    return out_BCT


def takes(x_BCT: Tensor) -> bool:
    """Whether the kernels run for it. They have no gradient: what is trained goes without them."""
    learns = torch.is_grad_enabled() and x_BCT.requires_grad
    return x_BCT.device.type == "cuda" and not learns and _has_triton()


def depthwise_conv(x_BCT: Tensor, weight_C1K: Tensor, bias_C: Tensor, dilation: int) -> Tensor:
    from vocoder import jit  # Triton is optional

    (batch, channels, inputs), kernel = x_BCT.shape, weight_C1K.shape[-1]
    steps = inputs - (kernel - 1) * dilation
    out_BCT = x_BCT.new_empty(batch, channels, steps)
    jit.depthwise_conv[(-(-out_BCT.numel() // _BLOCK),)](
        x_BCT.contiguous(),
        weight_C1K,
        bias_C,
        out_BCT,
        out_BCT.numel(),
        channels,
        steps,
        inputs,
        KERNEL=kernel,
        DILATION=dilation,
        BLOCK=_BLOCK,
    )
    return out_BCT


def narrow_conv(x_BCT: Tensor, weight_1CK: Tensor, bias_1: Tensor, dilation: int) -> Tensor:
    """[B, 1, T] float32."""
    from vocoder import jit  # Triton is optional

    (batch, channels, inputs), kernel = x_BCT.shape, weight_1CK.shape[-1]
    steps = inputs - (kernel - 1) * dilation
    out_B1T = torch.empty(batch, 1, steps, dtype=torch.float32, device=x_BCT.device)
    jit.narrow_conv[(-(-steps // _NARROW_STEPS), batch)](
        x_BCT.contiguous(),
        weight_1CK,
        bias_1,
        out_B1T,
        channels,
        steps,
        inputs,
        KERNEL=kernel,
        DILATION=dilation,
        BLOCK_C=1 << (channels - 1).bit_length(),
        BLOCK_T=_NARROW_STEPS,
    )
    return out_B1T


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
