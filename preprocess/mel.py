"""Log-mel features of the Whisper kind, in numpy: equal to the families' `transformers` extractors.

Shapes: S samples, F mel frames, M mel bands, B frequency bins.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from contracts.specs import AudioSpec

Float32 = npt.NDArray[np.float32]

MAX_FREQUENCY = 8000.0
FLOOR = 1e-10  # of the mel power, before the logarithm
RANGE = 8.0  # decades kept below the loudest value
_BLOCK_FRAMES = 512  # so that the windows of an hour of sound are never in memory at once

# The mel scale of Slaney's Auditory Toolbox: linear below 1 kHz, logarithmic above.
_LINEAR_HZ_PER_MEL = 200 / 3
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27


def log_mel(samples_S: Float32, spec: AudioSpec, out_MF: Float32) -> None:
    """Writes the features of the whole of `samples_S` to `out_MF` (C order, spec.num_frames(S) frames).

    Frame f is centred on sample f * hop_length; the start sees the sound's reflection, the end what
    `spec.tail` says. Values: (max(log10(power), loudest - 8) + 4) / 4.
    """
    num_samples = len(samples_S)
    num_frames = spec.num_frames(num_samples)
    assert out_MF.shape == (spec.num_mels, num_frames)
    assert num_samples > spec.n_fft // 2
    # Frames behind the last one that counts may still hold some of the sound: the loudest may be there.
    padded_S, num_heard = _with_edges(samples_S, spec)
    windows_FS = np.lib.stride_tricks.sliding_window_view(padded_S, spec.n_fft)[:: spec.hop_length]
    hann_S, filters_BM = _window(spec.n_fft), mel_filters(spec.num_mels, spec.n_fft, spec.sampling_rate)
    loudest = -np.inf
    for start in range(0, num_heard, _BLOCK_FRAMES):
        end = min(start + _BLOCK_FRAMES, num_heard)
        spectrum_FB = np.fft.rfft(windows_FS[start:end] * hann_S)
        power_FB = np.square(spectrum_FB.real) + np.square(spectrum_FB.imag)
        log_FM = np.log10(np.maximum(power_FB @ filters_BM, np.float32(FLOOR)))
        loudest = max(loudest, float(log_FM.max()))
        kept = min(end, num_frames) - start
        if kept > 0:
            out_MF[:, start : start + kept] = log_FM[:kept].T
    np.maximum(out_MF, np.float32(loudest - RANGE), out=out_MF)
    out_MF += np.float32(4.0)
    out_MF *= np.float32(0.25)


def _with_edges(samples_S: Float32, spec: AudioSpec) -> tuple[Float32, int]:
    """The samples as the windows see them, and how many frames of them the reference looks at."""
    half = spec.n_fft // 2
    num_samples = len(samples_S)
    if spec.tail == "zeros":
        end = num_samples + spec.n_fft
        if spec.max_samples is not None:
            end = max(num_samples, min(end, spec.max_samples))
        samples_S = np.pad(samples_S, (0, end - num_samples))
    num_heard = max(len(samples_S) // spec.hop_length, spec.num_frames(num_samples))
    return np.pad(samples_S, half, mode="reflect"), num_heard


@lru_cache(maxsize=4)
def _window(length: int) -> Float32:
    """Hann, periodic."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)).astype(np.float32)


@lru_cache(maxsize=4)
def mel_filters(num_mels: int, n_fft: int, sampling_rate: int) -> Float32:
    """[B, M]: triangles of equal area between neighbouring points of the mel scale."""
    bins_B = np.linspace(0, sampling_rate / 2, n_fft // 2 + 1)[:, None]
    edges = _hertz(np.linspace(0.0, _mels(MAX_FREQUENCY), num_mels + 2))
    lower_M, centre_M, upper_M = edges[:-2], edges[1:-1], edges[2:]
    rising_BM = (bins_B - lower_M) / (centre_M - lower_M)
    falling_BM = (upper_M - bins_B) / (upper_M - centre_M)
    triangles_BM = np.maximum(0, np.minimum(rising_BM, falling_BM)) * 2 / (upper_M - lower_M)
    return triangles_BM.astype(np.float32)


def _mels(hertz: float) -> float:
    """Above the break of the scale."""
    assert hertz >= _BREAK_HZ
    return float(_BREAK_MEL + np.log(hertz / _BREAK_HZ) / _LOG_STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = _BREAK_HZ * np.exp(_LOG_STEP * (np.maximum(mels, _BREAK_MEL) - _BREAK_MEL))
    return np.where(mels < _BREAK_MEL, mels * _LINEAR_HZ_PER_MEL, above)
