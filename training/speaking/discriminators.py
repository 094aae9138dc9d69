"""Who tells made speech from true: by periods (Kong et al. 2020) and by spectra (Jang et al. 2021).

Shapes: B crops, S samples, C channels, F frames, N bins.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.speaking.spectra import stft

SLOPE = 0.1


class _Periodic(nn.Module):
    """Sound folded into rows of one period, convolved along the columns."""

    def __init__(self, period: int, channels: int) -> None:
        super().__init__()
        self.period = period
        sizes = [1, channels, 2 * channels, 4 * channels, 8 * channels]
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, (5, 1), (3, 1), padding=(2, 0)) for a, b in pairwise(sizes)
        )
        self.layers.append(nn.Conv2d(sizes[-1], sizes[-1], (5, 1), padding=(2, 0)))
        self.last = nn.Conv2d(sizes[-1], 1, (3, 1), padding=(1, 0))

    def forward(self, sound_BS: Tensor) -> list[Tensor]:
        sound_BS = functional.pad(sound_BS, (0, -sound_BS.shape[1] % self.period))
        return _run(sound_BS.view(len(sound_BS), 1, -1, self.period), self.layers, self.last)


class _Spectral(nn.Module):
    """The complex spectrum at one resolution, convolved along time and frequency."""

    window: Tensor

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(2, channels, (3, 9), padding=(1, 4)),
                *(nn.Conv2d(channels, channels, (3, 9), (1, 2), padding=(1, 4)) for _ in range(3)),
                nn.Conv2d(channels, channels, (3, 3), padding=(1, 1)),
            ]
        )
        self.last = nn.Conv2d(channels, 1, (3, 3), padding=(1, 1))

    def forward(self, sound_BS: Tensor) -> list[Tensor]:
        spectrum_BNF = stft(sound_BS.float(), self.size, self.size // 4, self.window)
        image_B2FN = torch.view_as_real(spectrum_BNF).permute(0, 3, 2, 1).contiguous()
        return _run(image_B2FN, self.layers, self.last)


def _run(x: Tensor, layers: nn.ModuleList, last: nn.Module) -> list[Tensor]:
    maps = []
    for layer in layers:
        x = functional.leaky_relu(layer(x), SLOPE)
        maps.append(x)
    return [*maps, last(x)]


class Discriminators(nn.Module):
    """Each gives its maps, the verdict last."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.judges = nn.ModuleList(
            [
                *(_Periodic(period, channels) for period in (2, 3, 5, 7, 11)),
                *(_Spectral(size, channels) for size in (2048, 1024, 512)),
            ]
        )

    def forward(self, sound_BS: Tensor) -> list[list[Tensor]]:
        return [judge(sound_BS) for judge in self.judges]


def judge_loss(true: list[list[Tensor]], made: list[list[Tensor]]) -> Tensor:
    """Squares: true is one, made is zero (Mao et al. 2017)."""
    losses = [
        (1 - a[-1].float()).square().mean() + b[-1].float().square().mean()
        for a, b in zip(true, made, strict=True)
    ]
    return torch.stack(losses).mean()


def fooled_loss(made: list[list[Tensor]]) -> Tensor:
    return torch.stack([(1 - maps[-1].float()).square().mean() for maps in made]).mean()


def matching_loss(true: list[list[Tensor]], made: list[list[Tensor]]) -> Tensor:
    """Mean distance of all maps, each against its own size."""
    losses = [
        functional.l1_loss(b.float(), a.detach().float()) / a.detach().float().abs().mean().clamp(min=1e-3)
        for one, other in zip(true, made, strict=True)
        for a, b in zip(one[:-1], other[:-1], strict=True)
    ]
    return torch.stack(losses).mean()
