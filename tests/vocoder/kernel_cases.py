"""The vocoder's kernels against the plain ones, on the GPU if there is one, else in Triton's interpreter.
Collected
through ../lm_engine/test_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vocoder.kernels import depthwise_conv, fused_snake, narrow_conv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(2, 3, 700), (1, 96, 1), (3, 1, 5)])
def test_the_fused_snake_is_the_formula(shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 3
    frequency, gain = (torch.rand(shape[1], 1, generator=generator) * 2 for _ in range(2))
    expected = x.double() + gain.double() * (x.double() * frequency.double()).sin().square()
    found = fused_snake(x.to(DEVICE), frequency.to(DEVICE), gain.to(DEVICE)).cpu()
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("conv", [depthwise_conv, narrow_conv])
def test_the_convolutions_are_the_library_s(conv, dilation):
    generator = torch.Generator().manual_seed(2)
    x, bias = torch.randn(2, 5, 90, generator=generator), torch.randn(5, generator=generator)
    if conv is narrow_conv:
        weight, bias = torch.randn(1, 5, 7, generator=generator), bias[:1]
    else:
        weight = torch.randn(5, 1, 7, generator=generator)
    groups = weight.shape[0]
    double = (x.double(), weight.double(), bias.double())
    expected = functional.conv1d(*double, dilation=dilation, groups=groups)
    found = conv(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), dilation).cpu()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
