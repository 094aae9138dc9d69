"""Log-mel features and token counts equal the extractors and processors of `transformers`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
    _get_feat_extract_output_lengths as qwen2_5_omni_lengths,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths as qwen3_omni_lengths,
)

from contracts.specs import AudioSpec, MediaLimits
from preprocess.items import prepare_audio
from preprocess.mel import log_mel, mel_filters
from tests.preprocess.recordings import QWEN2_5_OMNI, QWEN3_ASR, QWEN3_OMNI, WHISPER, wav

TOLERANCE = 1e-4  # theirs is in float32 and rounds as much as 1e-4 near the floor of loud frames
EXACT_TOLERANCE = 2e-5  # to the same mathematics in float64
LENGTHS = [1600, 16_000, 16_001, 16_159, 33_333]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def speech_like(length: int) -> np.ndarray:
    """A gliding tone that stops and starts over some noise: loud and quiet bins in one frame."""
    time_s = np.arange(length) / 16_000
    glide = np.sin(2 * np.pi * (300 + 400 * time_s) * time_s) * (np.sin(9 * time_s) > 0)
    noise = np.random.default_rng(length).standard_normal(length)
    return (0.4 * glide + 0.01 * noise).astype(np.float32)


def features(samples: np.ndarray, spec: AudioSpec) -> np.ndarray:
    out = np.full((spec.num_mels, spec.num_frames(len(samples))), np.nan, np.float32)
    log_mel(samples, spec, out)
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_qwen3_omni(length):
    samples = speech_like(length)
    extractor = WhisperFeatureExtractor(feature_size=128)
    theirs = extractor(
        samples, sampling_rate=16_000, padding=True, truncation=False, return_attention_mask=True
    )
    assert theirs["attention_mask"].all()
    np.testing.assert_allclose(features(samples, QWEN3_OMNI), theirs["input_features"][0], atol=TOLERANCE)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk_s", [4, 300])
def test_qwen2_5_omni_which_pads_and_masks(length, chunk_s):
    samples = speech_like(length)
    samples[-1] = 1.0  # the loudest value lies in the last frames, some of which are masked
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=chunk_s)
    theirs = extractor(samples, sampling_rate=16_000, padding="max_length", return_attention_mask=True)
    counted = theirs["attention_mask"][0].astype(bool)
    spec = AudioSpec(tokens="qwen2_5_omni", tail="zeros", max_samples=chunk_s * 16_000)
    np.testing.assert_allclose(
        features(samples, spec), theirs["input_features"][0][:, counted], atol=TOLERANCE
    )


def test_qwen2_5_omni_at_its_very_limit():
    samples = speech_like(32_000)
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
    theirs = extractor(samples, sampling_rate=16_000)["input_features"][0]
    spec = AudioSpec(tokens="qwen2_5_omni", tail="zeros", max_samples=32_000)
    np.testing.assert_allclose(features(samples, spec), theirs, atol=TOLERANCE)


@pytest.mark.parametrize("length", [1600, 7999, 16_001])
def test_qwen3_asr_with_its_least_length(length):
    samples = speech_like(length)
    theirs = Qwen3ASRFeatureExtractor(n_window=0)(
        samples, sampling_rate=16_000, padding=True, return_tensors="np"
    )
    (ours,) = windows_of(samples, QWEN3_ASR)
    np.testing.assert_allclose(ours, theirs["input_features"][0], atol=TOLERANCE)


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("length", [1600, 479_999, 480_000, 500_000])
def test_whisper_in_windows_of_thirty_seconds(num_mels, length):
    samples = speech_like(length)
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    spec = AudioSpec(tokens="whisper", num_mels=num_mels, window_samples=480_000)
    ours = windows_of(samples, spec)
    assert len(ours) == -(-length // 480_000)
    for position, window in enumerate(ours):
        piece = samples[position * 480_000 :][:480_000]
        theirs = extractor(piece, sampling_rate=16_000)["input_features"][0]
        np.testing.assert_allclose(window, theirs, atol=TOLERANCE)


def windows_of(samples: np.ndarray, spec: AudioSpec) -> list[np.ndarray]:
    """By way of a file, as in a worker."""

    prepared = prepare_audio(wav(samples, tag=3), spec, MediaLimits())
    return [features(window, spec) for window, _ in prepared.windows]


@pytest.mark.parametrize("length", LENGTHS)
def test_features_equal_the_definition_in_float64(length):
    samples = speech_like(length)
    padded = np.pad(samples.astype(np.float64), 200, mode="reflect")
    frames = np.stack([padded[start : start + 400] for start in range(0, length // 160 * 160, 160)])
    spectrum = np.fft.rfft(frames * np.hanning(401)[:400])
    power = np.abs(spectrum) ** 2 @ mel_filters(128, 400, 16_000).astype(np.float64)
    logs = np.log10(np.maximum(power, 1e-10))
    expected = (np.maximum(logs, logs.max() - 8) + 4) / 4
    np.testing.assert_allclose(features(samples, QWEN3_OMNI), expected.T, atol=EXACT_TOLERANCE)


def test_pure_tones_and_silence():
    for samples in (np.zeros(8000, np.float32), np.ones(8000, np.float32), speech_like(8000) * 1e-5):
        theirs = WhisperFeatureExtractor(feature_size=128)(samples, sampling_rate=16_000, padding=True)
        np.testing.assert_allclose(features(samples, QWEN3_OMNI), theirs["input_features"][0], atol=TOLERANCE)


def test_token_counts():
    frames = np.arange(3, 3001)
    assert [QWEN2_5_OMNI.num_tokens(n) for n in frames.tolist()] == qwen2_5_omni_lengths(frames).tolist()
    assert [QWEN3_OMNI.num_tokens(n) for n in frames.tolist()] == qwen3_omni_lengths(frames).tolist()
    assert WHISPER.num_tokens(3000) == 1500
    for spec in (QWEN2_5_OMNI, QWEN3_OMNI):
        assert spec.num_tokens(spec.num_frames(spec.min_samples)) > 0
