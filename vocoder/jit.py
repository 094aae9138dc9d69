"""Kernels of the vocoder's layers in Triton.

Shapes: B rows, C channels, T steps.
"""

import triton
import triton.language as tl

from contracts.triton_cache import keep_launchers

keep_launchers()


@triton.jit
def snake(x_ptr, frequency_ptr, gain_ptr, out_ptr, num_values, num_channels, num_steps, BLOCK: tl.constexpr):
    """x + gain · sin(frequency · x)² per channel of [B, C, T], computed in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    channel = (at // num_steps) % num_channels
    frequency = tl.load(frequency_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wave = tl.sin(x * frequency)
    tl.store(out_ptr + at, (x + gain * wave * wave).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def depthwise_conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_values,
    num_channels,
    num_steps,
    num_inputs,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each channel of [B, C, inputs] by itself, to [B, C, T]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    row = at // num_steps
    channel = row % num_channels
    first = row * num_inputs + at % num_steps
    sum = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(KERNEL):
        weight = tl.load(weight_ptr + channel * KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
        sum += weight * tl.load(x_ptr + first + tap * DILATION, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, sum.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def narrow_conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_channels,
    num_steps,
    num_inputs,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """All channels of [B, C, inputs] into the one of [B, 1, T]. Program (part of the steps, row)."""
    row = tl.program_id(1).to(tl.int64)
    steps_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels_C = tl.arange(0, BLOCK_C)
    inside_C = channels_C < num_channels
    inside_CT = inside_C[:, None] & (steps_T < num_steps)[None, :]
    x_CT = x_ptr + (row * num_channels + channels_C)[:, None] * num_inputs + steps_T[None, :]
    sum_CT = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
    for tap in tl.static_range(KERNEL):
        weight_C = tl.load(weight_ptr + channels_C * KERNEL + tap, mask=inside_C, other=0.0).to(tl.float32)
        sum_CT += weight_C[:, None] * tl.load(x_CT + tap * DILATION, mask=inside_CT, other=0.0).to(tl.float32)
    y_T = tl.sum(sum_CT, axis=0) + tl.load(bias_ptr).to(tl.float32)
    tl.store(out_ptr + row * num_steps + steps_T, y_T.to(out_ptr.dtype.element_ty), mask=steps_T < num_steps)
