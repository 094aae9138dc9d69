"""What makes every hearing of a sound another one, on the device: pace and size of the speaker, the reach of
microphones and codecs, voices beside it, what is masked. Rooms and noise are `features.disturb`'s.

Shapes: B sounds, S samples, K frequencies, M mels, F mel frames.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from training.hearing.features import GRID, SAMPLING_RATE

PACE, PACED_SHARE = (0.88, 1.16), 0.7
HASTE, HASTE_SHARE = (0.85, 1.3), 0.5
THROAT, THROAT_SHARE = (0.86, 1.16), 0.6
BESIDE_SHARE, BESIDE_DB = 0.12, (5.0, 22.0)  # others who speak; how much softer
CLIPPED_SHARE, CLIPPED_AT = 0.1, (0.25, 0.8)  # of the loudest sample
DULL_SHARE, DULL_HZ = 0.3, (2600.0, 7000.0)
THIN_SHARE, THIN_HZ = 0.25, (60.0, 350.0)
STEEP = 6  # of the two: order of the slope
MASKED_SHARE, MASKED_MELS, MASKED_FRAMES, MASKS = 0.6, 10, 14, 2
CODED_SHARE, CODED_RANGE = 0.15, (0.7, 1.5)  # below a mel's loudest frame, in units of 40 dB: dropped


def _some(share: float, like_B: Tensor) -> Tensor:
    return torch.rand(like_B.shape[0], device=like_B.device) < share


def _between(bounds: tuple[float, float], like_B: Tensor) -> Tensor:
    low, high = bounds
    return low + (high - low) * torch.rand(like_B.shape[0], device=like_B.device)


def _factors(bounds: tuple[float, float], share: float, like_B: Tensor) -> Tensor:
    factors = _between((log(bounds[0]), log(bounds[1])), like_B).exp()
    return torch.where(_some(share, like_B), factors, torch.ones_like(factors))


def pace(sound_BS: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Played faster or slower, which is a smaller or larger speaker too. Returns the new lengths as well."""
    factors_B = _factors(PACE, PACED_SHARE, lengths_B)
    new_B = (lengths_B / factors_B).long()
    at_BS = torch.arange(int(new_B.max()), device=sound_BS.device) * factors_B[:, None]
    first_BS = at_BS.long()
    part_BS = at_BS - first_BS
    last = sound_BS.shape[1] - 1
    a, b, c, d = (sound_BS.gather(1, (first_BS + step).clamp(0, last)) for step in (-1, 0, 1, 2))
    # A cubic through four samples (Catmull and Rom).
    bend = a - 2.5 * b + 2 * c - 0.5 * d + part_BS * (1.5 * (b - c) + 0.5 * (d - a))
    paced_BS = b + part_BS * (0.5 * (c - a) + part_BS * bend)
    inside = torch.arange(paced_BS.shape[1], device=sound_BS.device) < new_B[:, None]
    return paced_BS * inside, new_B


def hurried(mel_BMF: Tensor, frames_B: Tensor) -> tuple[Tensor, Tensor]:
    """Said faster or slower by the same speaker. Returns the new numbers of frames as well."""
    factors_B = _factors(HASTE, HASTE_SHARE, frames_B)
    new_B = (frames_B / factors_B).long()
    at_BF = torch.arange(int(new_B.max()), device=mel_BMF.device) * factors_B[:, None]
    first_BF = at_BF.long()
    low, high = (
        mel_BMF.gather(
            2, torch.minimum(index_BF, frames_B[:, None] - 1)[:, None].expand(-1, mel_BMF.shape[1], -1)
        )
        for index_BF in (first_BF, first_BF + 1)
    )
    inside_BF = torch.arange(at_BF.shape[1], device=mel_BMF.device) < new_B[:, None]
    return torch.lerp(low, high, (at_BF - first_BF)[:, None]) * inside_BF[:, None], new_B


def throats(lengths_B: Tensor) -> Tensor:
    """[B]: by what resonances are moved (`features.log_mel`)."""
    return _factors(THROAT, THROAT_SHARE, lengths_B)


def beside(sound_BS: Tensor, lengths_B: Tensor) -> Tensor:
    """Some with another one of the sounds, softer."""
    softer_B = 10 ** (-_between(BESIDE_DB, lengths_B) / 20) * _some(BESIDE_SHARE, lengths_B)
    inside = torch.arange(sound_BS.shape[1], device=sound_BS.device) < lengths_B[:, None]
    return sound_BS + sound_BS.roll(1, 0) * softer_B[:, None] * inside


def recorded(sound_BS: Tensor, lengths_B: Tensor) -> Tensor:
    """Some too loud for what took them in, some without their highest or lowest frequencies."""
    samples = sound_BS.shape[1]
    loudest_B1 = sound_BS.abs().amax(1, keepdim=True)
    limit_B1 = torch.where(
        _some(CLIPPED_SHARE, lengths_B)[:, None],
        _between(CLIPPED_AT, lengths_B)[:, None] * loudest_B1,
        loudest_B1,
    )
    clipped_BS = torch.minimum(torch.maximum(sound_BS, -limit_B1), limit_B1)
    size = -(-samples // GRID) * GRID
    spectrum_BK = torch.fft.rfft(clipped_BS, size)
    hertz_K = torch.linspace(0, SAMPLING_RATE / 2, spectrum_BK.shape[1], device=sound_BS.device)
    high_B = torch.where(_some(DULL_SHARE, lengths_B), _between(DULL_HZ, lengths_B), torch.inf)
    low_B = torch.where(_some(THIN_SHARE, lengths_B), _between(THIN_HZ, lengths_B), 0.0)
    gains_BK = 1 / (1 + (hertz_K / high_B[:, None]) ** STEEP)
    gains_BK = gains_BK / (1 + (low_B[:, None] / hertz_K.clamp(min=1.0)) ** STEEP)
    inside = torch.arange(samples, device=sound_BS.device) < lengths_B[:, None]
    heard_BS: Tensor = torch.fft.irfft(spectrum_BK * gains_BK, size)
    return heard_BS[:, :samples] * inside


def masked(mel_BMF: Tensor, frames_B: Tensor) -> Tensor:
    """Some without what a codec drops, some with bands and moments of nothing but their mean. Zeros behind a
    sound's frames stay."""
    count, mels, frames = mel_BMF.shape
    device = mel_BMF.device
    inside_BF = torch.arange(frames, device=device) < frames_B[:, None]
    loudest_BM1 = mel_BMF.masked_fill(~inside_BF[:, None], -torch.inf).amax(2, keepdim=True)
    lowest_B11 = mel_BMF.masked_fill(~inside_BF[:, None], torch.inf).amin((1, 2), keepdim=True)
    dropped = mel_BMF < loudest_BM1 - _between(CODED_RANGE, frames_B)[:, None, None]
    dropped &= _some(CODED_SHARE, frames_B)[:, None, None]
    mel_BMF = torch.where(dropped, lowest_B11, mel_BMF)
    mean_B11 = (mel_BMF * inside_BF[:, None]).sum((1, 2), keepdim=True) / (frames_B * mels)[:, None, None]
    hidden_BMF = torch.zeros_like(mel_BMF, dtype=torch.bool)
    for _ in range(MASKS):
        for places, width, axis in ((mels, MASKED_MELS, 2), (frames, MASKED_FRAMES, 1)):
            size_B1 = torch.rand(count, 1, device=device) * width
            start_B1 = torch.rand(count, 1, device=device) * (places - size_B1)
            at = torch.arange(places, device=device)
            hidden_BMF |= ((at >= start_B1) & (at < start_B1 + size_B1)).unsqueeze(axis)
    hidden_BMF &= _some(MASKED_SHARE, frames_B)[:, None, None]
    return torch.where(hidden_BMF, mean_B11, mel_BMF) * inside_BF[:, None]
