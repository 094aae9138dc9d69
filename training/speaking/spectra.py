"""Spectra of sound as losses and inputs of training. Shapes: B crops, S samples, M mel bands, F frames."""

from __future__ import annotations

from math import log10

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.speaking.sizes import SAMPLE_RATE

# Of a magnitude; what is quieter is not heard. A tenth of the speech is silence to the last bit: with a floor
# of 1e-5 it has ten times the loss, and fifty times the gradient, of what is said.
FLOOR = 0.03


def mel_filters(num_bins: int, num_mels: int, sample_rate: int) -> Tensor:
    """[bins, mels]: triangles of unit height, evenly spaced on 2595 log10(1 + f/700)."""
    nyquist = sample_rate / 2
    top = 2595 * log10(1 + nyquist / 700)
    edges_hz = 700 * (10 ** (torch.linspace(0, top, num_mels + 2) / 2595) - 1)
    at_hz = torch.linspace(0, nyquist, num_bins)[:, None]
    low, mid, high = edges_hz[:-2], edges_hz[1:-1], edges_hz[2:]
    rise, fall = (at_hz - low) / (mid - low), (high - at_hz) / (high - mid)
    return torch.minimum(rise, fall).clamp(min=0)


class Mel(nn.Module):
    """log10 of the mel spectrum, one frame a hop, frame f centred on the middle of its hop."""

    window: Tensor
    filters_NM: Tensor

    def __init__(self, size: int, hop: int, num_mels: int) -> None:
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        filters = mel_filters(size // 2 + 1, num_mels, SAMPLE_RATE)
        self.register_buffer("filters_NM", filters, persistent=False)

    def forward(self, sound_BS: Tensor) -> Tensor:
        """[B, M, F] with F = S // hop."""
        frames = sound_BS.shape[1] // self.hop
        side = (self.size - self.hop) // 2
        padded_BS = functional.pad(sound_BS[:, : frames * self.hop], (side, self.size - self.hop - side))
        power_BNF = stft(padded_BS, self.size, self.hop, self.window).abs()
        mel_BMF = (power_BNF.transpose(1, 2) @ self.filters_NM).transpose(1, 2)
        return mel_BMF.clamp(min=FLOOR).log10()


def stft(sound_BS: Tensor, size: int, hop: int, window: Tensor) -> Tensor:
    return torch.stft(sound_BS, size, hop, window=window, center=False, return_complex=True)


class SpectralLoss(nn.Module):
    """Mean distance of log-mel spectra at several resolutions, and of the magnitudes themselves."""

    SIZES = ((2048, 128), (1024, 96), (512, 64), (256, 32), (128, 16))

    def __init__(self) -> None:
        super().__init__()
        self.mels = nn.ModuleList(Mel(size, size // 4, bands) for size, bands in self.SIZES)

    def forward(self, made_BS: Tensor, true_BS: Tensor) -> Tensor:
        total = made_BS.new_zeros(())
        for mel in self.mels:
            a, b = mel(made_BS), mel(true_BS)
            total = total + functional.l1_loss(a, b) + 0.5 * (a - b).square().mean().add(1e-8).sqrt()
        return total / len(self.SIZES)
