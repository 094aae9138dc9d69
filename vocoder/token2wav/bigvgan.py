"""BigVGAN (Lee et al. 2022): mel to PCM. Not causal, but no sample sees further than `reach` mel frames.

x is [batch, channels, time].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from vocoder.layers import Snake

EDGE_KERNEL = 7
FILTER_TAPS = 12
RATIO = 2  # the activations run at twice the rate
ACTIVATION_REACH = FILTER_TAPS // RATIO + 1
MIN_DB, REFERENCE_DB = -115.0, 20.0


@dataclass(frozen=True)
class BigVganConfig:
    mel_dim: int
    width: int  # halved by each upsampling
    block_kernels: tuple[int, ...]
    block_dilations: tuple[tuple[int, ...], ...]
    upsample_rates: tuple[int, ...]
    upsample_kernels: tuple[int, ...]

    def __post_init__(self) -> None:
        pairs = zip(self.upsample_rates, self.upsample_kernels, strict=True)
        assert all(kernel >= rate and (kernel - rate) % 2 == 0 for rate, kernel in pairs)

    @property
    def hop(self) -> int:
        """Samples per mel frame."""
        return prod(self.upsample_rates)

    @property
    def reach(self) -> int:
        """Mel frames on each side beyond which nothing changes a frame's samples."""
        block = max(
            sum((kernel - 1) // 2 * (dilation + 1) + 2 * ACTIVATION_REACH for dilation in dilations)
            for kernel, dilations in zip(self.block_kernels, self.block_dilations, strict=True)
        )
        steps = EDGE_KERNEL // 2 + ACTIVATION_REACH
        for rate, kernel in zip(reversed(self.upsample_rates), reversed(self.upsample_kernels), strict=True):
            steps = ceil((steps + block + kernel) / rate)
        return steps + EDGE_KERNEL // 2


def low_pass() -> Tensor:
    """[taps]: a sinc cut at half the band, under a Kaiser window for a transition of 0.6 of it."""
    cutoff, transition = 0.5 / RATIO, 4 * 0.6 / RATIO
    attenuation = 2.285 * (FILTER_TAPS // 2 - 1) * math.pi * transition + 7.95
    if attenuation > 50:
        beta = 0.1102 * (attenuation - 8.7)
    elif attenuation >= 21:
        beta = 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    else:
        beta = 0.0
    window = torch.kaiser_window(FILTER_TAPS, periodic=False, beta=beta, device="cpu")
    at = torch.arange(FILTER_TAPS, device="cpu") - (FILTER_TAPS - 1) / 2
    taps = 2 * cutoff * window * torch.sinc(2 * cutoff * at)
    return taps / taps.sum()


class SmoothSnake(nn.Module):
    """A snake at twice the rate between two low-pass filters, so that it folds no overtones back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.snake = Snake(channels)

    def forward(self, x_BCT: Tensor, taps: Tensor) -> Tensor:
        batch, channels, length = x_BCT.shape
        half, wide = FILTER_TAPS // 2, FILTER_TAPS - 1
        x_X1T = x_BCT.reshape(batch * channels, 1, length)
        x_X1T = functional.pad(x_X1T, (half - 1, half - 1), mode="replicate")
        up_X1T = functional.conv_transpose1d(x_X1T, RATIO * taps[None, None], stride=RATIO)
        margin = (up_X1T.shape[-1] - RATIO * length) // 2
        up_BCT = up_X1T[..., margin : margin + RATIO * length].reshape(batch, channels, -1)
        y_X1T = self.snake(up_BCT).reshape(batch * channels, 1, -1)
        y_X1T = functional.pad(y_X1T, (wide // 2, FILTER_TAPS // 2), mode="replicate")
        return functional.conv1d(y_X1T, taps[None, None], stride=RATIO).view(batch, channels, length)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        reach = (kernel - 1) // 2

        def conv(dilation: int) -> nn.Conv1d:
            return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=reach * dilation)

        self.convs1 = nn.ModuleList(conv(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(conv(1) for _ in dilations)
        self.activations1 = nn.ModuleList(SmoothSnake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(SmoothSnake(channels) for _ in dilations)

    def forward(self, x_BCT: Tensor, taps: Tensor) -> Tensor:
        for conv1, conv2, activation1, activation2 in zip(
            self.convs1, self.convs2, self.activations1, self.activations2, strict=True
        ):
            y_BCT = conv1(activation1(x_BCT, taps))
            x_BCT = x_BCT + conv2(activation2(y_BCT, taps))
        return x_BCT


class BigVgan(nn.Module):
    def __init__(self, config: BigVganConfig) -> None:
        super().__init__()
        self.config = config
        self.entry = nn.Conv1d(config.mel_dim, config.width, EDGE_KERNEL, padding=EDGE_KERNEL // 2)
        self.upsamplings = nn.ModuleList()
        self.blocks = nn.ModuleList()
        channels = config.width
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernels, strict=True):
            padding = (kernel - rate) // 2
            self.upsamplings.append(
                nn.ConvTranspose1d(channels, channels // 2, kernel, stride=rate, padding=padding)
            )
            channels //= 2
            self.blocks.extend(
                ResidualBlock(channels, kernel, dilations)
                for kernel, dilations in zip(config.block_kernels, config.block_dilations, strict=True)
            )
        self.activation = SmoothSnake(channels)
        self.exit = nn.Conv1d(channels, 1, EDGE_KERNEL, padding=EDGE_KERNEL // 2, bias=False)
        self.taps = low_pass()

    def forward(self, mel_BMT: Tensor) -> Tensor:
        """[batch, frames * hop], of natural-log mels."""
        taps = self.taps.to(mel_BMT.device)
        x_BCT = self.entry(scaled_decibels(mel_BMT))
        num_blocks = len(self.config.block_kernels)
        for index, upsampling in enumerate(self.upsamplings):
            x_BCT = upsampling(x_BCT)
            blocks = self.blocks[index * num_blocks : (index + 1) * num_blocks]
            x_BCT = torch.stack([block(x_BCT, taps) for block in blocks]).sum(0) / num_blocks
        pcm_B1T: Tensor = self.exit(self.activation(x_BCT, taps))
        return pcm_B1T[:, 0].clamp(-1, 1)


def scaled_decibels(mel: Tensor) -> Tensor:
    """In [-1, 1]: from MIN_DB to 0 dB, after a shift by REFERENCE_DB."""
    decibels = 20 * torch.log10(mel.exp().clamp(min=10 ** (MIN_DB / 20))) - REFERENCE_DB
    return (2 * (decibels - MIN_DB) / -MIN_DB - 1).clamp(-1, 1)
