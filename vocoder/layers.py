"""Causal layers that stream: what they need of the past they carry in their slots. x is [batch, channels,
time]."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vocoder import kernels
from vocoder.streaming import Level, StateLayout, StreamBatch

FEW_STEPS = 256  # a transposed convolution over fewer input steps costs several times the product it is


class CausalConv(nn.Module):
    """A convolution padded with zeros at the left only; carries its last (kernel - 1) * dilation inputs."""

    def __init__(
        self,
        layout: StateLayout,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.reach = (kernel - 1) * dilation
        self.dilation = dilation
        self.groups = groups
        self.slot = layout.reserve(in_channels, self.reach)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(self, x_BCT: Tensor, streams: StreamBatch) -> Tensor:
        if self.reach:
            x_BCT = torch.cat([streams.read(self.slot), x_BCT], dim=-1)
            streams.write(self.slot, x_BCT[..., x_BCT.shape[-1] - self.reach :])
        if self.groups == self.weight.shape[0] and kernels.takes(x_BCT):
            conv = kernels.narrow_conv if self.groups == 1 else kernels.depthwise_conv
            return conv(x_BCT, self.weight, self.bias, self.dilation)
        return functional.conv1d(x_BCT, self.weight, self.bias, dilation=self.dilation, groups=self.groups)


class CausalUpsampling(nn.Module):
    """A transposed convolution that loses kernel - stride samples at both ends.

    Those at the left are void; those at the right are not complete before the next step comes, so the part
    of them
    that is known is carried, and dropped with the stream.
    """

    def __init__(
        self, layout: StateLayout, in_channels: int, out_channels: int, kernel: int, stride: int
    ) -> None:
        super().__init__()
        self.stride = stride
        self.overlap = kernel - stride
        self.slot = layout.reserve(out_channels, self.overlap)
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(self, x_BCT: Tensor, streams: StreamBatch) -> Tensor:
        is_short = x_BCT.shape[0] * x_BCT.shape[2] <= FEW_STEPS and self.overlap <= self.stride
        y_BCT, rest_BCT = self._by_product(x_BCT) if is_short else self._by_convolution(x_BCT)
        if self.overlap:
            y_BCT[..., : self.overlap] += streams.read(self.slot)
            streams.write(self.slot, rest_BCT)
        return y_BCT.add_(self.bias[:, None])

    def _by_convolution(self, x_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """The samples that are complete but for what is carried, and the overlap with the next chunk."""
        y_BCT = functional.conv_transpose1d(x_BCT, self.weight, stride=self.stride)
        num_complete = x_BCT.shape[-1] * self.stride
        return y_BCT[..., :num_complete], y_BCT[..., num_complete:]

    def _by_product(self, x_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """The same as one product and an addition, for an overlap of at most one step."""
        batch, channels, length = x_BCT.shape
        taps = x_BCT.transpose(1, 2).reshape(-1, channels) @ self.weight.view(channels, -1)
        taps_BTCK = taps.view(batch, length, *self.weight.shape[1:])
        y_BTCS = taps_BTCK[..., : self.stride]
        if self.overlap:
            y_BTCS[:, 1:, :, : self.overlap] += taps_BTCK[:, :-1, :, self.stride :]
        y_BCT = y_BTCS.transpose(1, 2).reshape(batch, -1, length * self.stride)
        return y_BCT, taps_BTCK[:, -1, :, self.stride :]


class Snake(nn.Module):
    """x + gain * sin(frequency * x)^2 per channel (Ziyin et al. 2020, with a magnitude of its own)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.empty(channels, 1))
        self.gain = nn.Parameter(torch.empty(channels, 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        return kernels.snake(x_BCT, self.frequency, self.gain)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then a pointwise MLP, scaled per channel (Liu et al. 2022), causal."""

    KERNEL = 7
    EPS = 1e-6

    def __init__(self, layout: StateLayout, channels: int) -> None:
        super().__init__()
        self.depthwise = CausalConv(layout, channels, channels, self.KERNEL, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=self.EPS)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.empty(channels))

    def forward(self, x_BCT: Tensor, streams: StreamBatch) -> Tensor:
        y_BTC = self.norm(self.depthwise(x_BCT, streams).transpose(1, 2))
        y_BTC = self.down(functional.gelu(self.up(y_BTC))) * self.scale
        out: Tensor = x_BCT + y_BTC.transpose(1, 2)
        return out


class ResidualUnit(nn.Module):
    """Snake, dilated convolution, snake, pointwise convolution, around a residual."""

    KERNEL = 7

    def __init__(self, layout: StateLayout, channels: int, dilation: int) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv1 = CausalConv(layout, channels, channels, self.KERNEL, dilation=dilation)
        self.snake2 = Snake(channels)
        self.conv2 = CausalConv(layout, channels, channels, 1)

    def forward(self, x_BCT: Tensor, streams: StreamBatch) -> Tensor:
        y_BCT = self.conv1(self.snake1(x_BCT), streams)
        out: Tensor = self.conv2(self.snake2(y_BCT), streams)
        return out.add_(x_BCT)


class UpsamplingBlock(nn.Module):
    """Snake, upsampling, three residual units of growing dilation."""

    DILATIONS = (1, 3, 9)

    def __init__(
        self, layout: StateLayout, level: Level, in_channels: int, out_channels: int, stride: int
    ) -> None:
        super().__init__()
        kernel = 2 * stride
        self.level = level.upsampled(kernel, stride)
        self.snake = Snake(in_channels)
        self.upsampling = CausalUpsampling(layout, in_channels, out_channels, kernel, stride)
        self.units = nn.ModuleList(
            ResidualUnit(layout, out_channels, dilation) for dilation in self.DILATIONS
        )

    def forward(self, x_BCT: Tensor, streams: StreamBatch) -> Tensor:
        x_BCT = streams.blank_void(self.upsampling(self.snake(x_BCT), streams), self.level)
        for unit in self.units:
            x_BCT = streams.blank_void(unit(x_BCT, streams), self.level)
        return x_BCT
