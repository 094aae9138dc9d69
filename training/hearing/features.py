"""Sound as the ears take it, on the device: disturbed as rooms and microphones do, then log-mel.

Shapes: B sounds, S samples, F mel frames, M mels, K frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from preprocess.mel import FLOOR, RANGE, mel_filters

SAMPLING_RATE, N_FFT, HOP, NUM_MELS = 16_000, 400, 160, 80
ROOM_S = 0.4  # of echoes
GRID = 8000  # lengths of transforms: of small prime factors
BENDS = 8  # of a microphone's response


def num_frames(lengths_B: Tensor) -> Tensor:
    return -(-lengths_B // HOP)


def log_mel(sound_BS: Tensor, lengths_B: Tensor, throat_B: Tensor | None = None) -> Tensor:
    """[B, M, F] as preprocessing makes it of each sound; zeros behind its frames. Sounds end in zeros.
    `throat_B`: factors by which all frequencies are moved."""
    frames_B = num_frames(lengths_B)
    padded = functional.pad(sound_BS, (0, N_FFT + HOP))
    window = torch.hann_window(N_FFT, device=sound_BS.device)
    spectrum_BKF = torch.stft(padded, N_FFT, HOP, window=window, center=True, return_complex=True)
    filters_KM = torch.from_numpy(mel_filters(NUM_MELS, N_FFT, SAMPLING_RATE)).to(sound_BS.device)
    power_BKF = spectrum_BKF.abs().square()
    if throat_B is not None:
        power_BKF = _moved(power_BKF, throat_B)
    power_BFM = power_BKF.transpose(1, 2) @ filters_KM
    mel_BFM = power_BFM.clamp(min=FLOOR).log10()
    loudest = mel_BFM.amax((1, 2), keepdim=True)
    mel_BFM = (torch.maximum(mel_BFM, loudest - RANGE) + 4) / 4
    longest = int(frames_B.max())
    counts = torch.arange(longest, device=sound_BS.device) < frames_B[:, None]
    return (mel_BFM[:, :longest] * counts[..., None]).transpose(1, 2)


def _moved(power_BKF: Tensor, factors_B: Tensor) -> Tensor:
    bins = power_BKF.shape[1]
    at_BK = (torch.arange(bins, device=power_BKF.device) / factors_B[:, None]).clamp(max=bins - 1)
    low_BK = at_BK.long()
    low_BKF, high_BKF = (
        power_BKF.gather(1, index_BK[..., None].expand(-1, -1, power_BKF.shape[2]))
        for index_BK in (low_BK, (low_BK + 1).clamp(max=bins - 1))
    )
    return torch.lerp(low_BKF, high_BKF, (at_BK - low_BK)[..., None])


def disturb(sound_BS: Tensor, lengths_B: Tensor) -> Tensor:
    """Echoes, a microphone's response, noise; some are left as they are."""
    count, samples = sound_BS.shape
    device = sound_BS.device
    size = -(-(samples + int(ROOM_S * SAMPLING_RATE)) // GRID) * GRID
    spectrum_BK = torch.fft.rfft(sound_BS, size) * torch.fft.rfft(_rooms(count, device), size)
    spectrum_BK = spectrum_BK * _responses(count, spectrum_BK.shape[1], device)
    heard_BS = torch.fft.irfft(spectrum_BK, size)[:, :samples]
    inside = torch.arange(samples, device=device) < lengths_B[:, None]
    loud_B1 = (heard_BS.square() * inside).sum(1, keepdim=True).div(lengths_B[:, None]).sqrt()
    noise_db = 8 + 40 * torch.rand(count, 1, device=device)
    heard_BS = heard_BS + _noises(count, size, device)[:, :samples] * loud_B1 * 10 ** (-noise_db / 20)
    plain = torch.rand(count, 1, device=device) < 0.15
    return torch.where(plain, sound_BS, heard_BS) * inside


def _rooms(count: int, device: torch.device) -> Tensor:
    """Impulse responses: the sound itself, then noise that dies away."""
    samples = int(ROOM_S * SAMPLING_RATE)
    time_s = torch.arange(samples, device=device) / SAMPLING_RATE
    fades_s = 0.08 + 0.5 * torch.rand(count, 1, device=device)  # to a thousandth
    echo = torch.randn(count, samples, device=device) * 10 ** (-3 * time_s / fades_s)
    echo[:, : SAMPLING_RATE // 500] = 0.0
    echo = echo / echo.square().sum(1, keepdim=True).sqrt()
    share = 10 ** (-(4 + 20 * torch.rand(count, 1, device=device)) / 20)
    share = torch.where(torch.rand(count, 1, device=device) < 0.4, 0.0, share)
    response = share * echo
    response[:, 0] = 1.0
    return response


def _responses(count: int, bins: int, device: torch.device) -> Tensor:
    """Gains by frequency: a smooth curve of some decibels; of some only what a telephone lets through."""
    bends = 6 * torch.randn(count, 1, BENDS, device=device)
    db = functional.interpolate(bends, size=bins, mode="linear", align_corners=True)[:, 0]
    hertz = torch.linspace(0, SAMPLING_RATE / 2, bins, device=device)
    narrow = torch.where((hertz < 280) | (hertz > 3500), -35.0, 0.0)
    telephone = torch.rand(count, 1, device=device) < 0.12
    gains: Tensor = torch.pow(10.0, (db.clamp(-15, 15) + torch.where(telephone, narrow, 0.0)) / 20)
    return gains


def _noises(count: int, samples: int, device: torch.device) -> Tensor:
    """Of unit loudness; from white to deep."""
    spectrum = torch.fft.rfft(torch.randn(count, samples, device=device))
    slope = 1.2 * torch.rand(count, 1, device=device)
    spectrum = spectrum * (torch.arange(spectrum.shape[1], device=device) + 20.0) ** -slope
    noise: Tensor = torch.fft.irfft(spectrum, samples)
    loudness = noise.square().mean(1, keepdim=True).sqrt()
    return noise / loudness.clamp(min=1e-8)
