"""ECAPA-TDNN (Desplanques et al. 2020): a reference mel to one vector. x is [batch, channels, time]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

MIN_VARIANCE = 1e-12


@dataclass(frozen=True)
class SpeakerConfig:
    mel_dim: int
    out_dim: int
    channels: tuple[int, ...]  # of the first block, the residual blocks, and what they add up to
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    groups: int  # of a residual block, each seeing the one before it
    gate_channels: int

    def __post_init__(self) -> None:
        assert len(self.channels) == len(self.kernels) == len(self.dilations) >= 3
        assert sum(self.channels[1:-1]) == self.channels[-1]


def same_conv(in_channels: int, out_channels: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(
        in_channels, out_channels, kernel, dilation=dilation, padding="same", padding_mode="reflect"
    )


class GroupedConvs(nn.Module):
    """Channel groups convolved one after the other, each added to the next; the first passes through."""

    def __init__(self, channels: int, groups: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // groups
        self.convs = nn.ModuleList(same_conv(width, width, kernel, dilation) for _ in range(groups - 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        first, *rest = x_BCT.chunk(len(self.convs) + 1, dim=1)
        outputs = [first]
        for conv, part in zip(self.convs, rest, strict=True):
            carried = part if len(outputs) == 1 else part + outputs[-1]
            outputs.append(conv(carried).relu())
        return torch.cat(outputs, dim=1)


class ResidualBlock(nn.Module):
    """Pointwise, grouped, pointwise, then a gate per channel from the mean over time."""

    def __init__(self, config: SpeakerConfig, index: int) -> None:
        super().__init__()
        before, channels = config.channels[index - 1], config.channels[index]
        self.conv1 = same_conv(before, channels)
        self.grouped = GroupedConvs(channels, config.groups, config.kernels[index], config.dilations[index])
        self.conv2 = same_conv(channels, channels)
        self.squeeze = same_conv(channels, config.gate_channels)
        self.gate = same_conv(config.gate_channels, channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT = self.conv2(self.grouped(self.conv1(x_BCT).relu())).relu()
        gate_BC1 = self.gate(self.squeeze(y_BCT.mean(dim=2, keepdim=True)).relu()).sigmoid()
        out: Tensor = y_BCT * gate_BC1 + x_BCT
        return out


def _statistics(x_BCT: Tensor, weight_BCT: Tensor) -> tuple[Tensor, Tensor]:
    mean_BC1 = (weight_BCT * x_BCT).sum(dim=2, keepdim=True)
    variance_BC1 = (weight_BCT * (x_BCT - mean_BC1).square()).sum(dim=2, keepdim=True)
    return mean_BC1, variance_BC1.clamp(min=MIN_VARIANCE).sqrt()


class SpeakerEncoder(nn.Module):
    def __init__(self, config: SpeakerConfig) -> None:
        super().__init__()
        width = config.channels[-1]
        self.entry = same_conv(config.mel_dim, config.channels[0], config.kernels[0], config.dilations[0])
        self.blocks = nn.ModuleList(
            ResidualBlock(config, index) for index in range(1, len(config.channels) - 1)
        )
        self.merge = same_conv(width, width, config.kernels[-1], config.dilations[-1])
        self.score1 = same_conv(3 * width, config.attention_channels)
        self.score2 = same_conv(config.attention_channels, width)
        self.exit = same_conv(2 * width, config.out_dim)

    def forward(self, mel_BTM: Tensor) -> Tensor:
        """[batch, out_dim]"""
        x_BCT = self.entry(mel_BTM.transpose(1, 2)).relu()
        levels = []
        for block in self.blocks:
            x_BCT = block(x_BCT)
            levels.append(x_BCT)
        x_BCT = self.merge(torch.cat(levels, dim=1)).relu()
        mean, deviation = _statistics(x_BCT, torch.full_like(x_BCT, 1 / x_BCT.shape[2]))
        context = torch.cat([x_BCT, mean.expand_as(x_BCT), deviation.expand_as(x_BCT)], dim=1)
        weight_BCT = self.score2(self.score1(context).relu().tanh()).softmax(dim=2)
        pooled: Tensor = self.exit(torch.cat(_statistics(x_BCT, weight_BCT), dim=1))
        return pooled[..., 0]
