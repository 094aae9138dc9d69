"""preprocessor_config.json of an omni checkpoint → AudioSpec, with transformers' defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec

from contracts.specs import AudioSpec
from model_families.checkpoint import read_processor_config

FILE = "preprocessor_config.json"


class FeatureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of Whisper's feature extractor."""

    feature_size: int = 128
    sampling_rate: int = 16_000
    n_fft: int = 400
    hop_length: int = 160
    chunk_length: int = 300  # seconds

    @property
    def max_samples(self) -> int:
        return self.chunk_length * self.sampling_rate


def read_feature_config(folder: Path) -> FeatureConfig:
    return read_processor_config(folder, FILE, "feature_extractor", FeatureConfig) or FeatureConfig()


def qwen2_5_omni_spec(config: FeatureConfig) -> AudioSpec:
    """The reference pads with silence to the longest sound that it takes."""
    return msgspec.structs.replace(_common(config), tail="zeros", max_samples=config.max_samples)


def qwen3_omni_spec(config: FeatureConfig, n_window: int) -> AudioSpec:
    return msgspec.structs.replace(_common(config), tokens="qwen3_omni", n_window=n_window)


def _common(config: FeatureConfig) -> AudioSpec:
    return AudioSpec(
        tokens="qwen2_5_omni",
        num_mels=config.feature_size,
        sampling_rate=config.sampling_rate,
        n_fft=config.n_fft,
        hop_length=config.hop_length,
    )
