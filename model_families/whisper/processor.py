"""Whisper: the audio it takes, and prompts that start with a window of encoder output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from contracts.errors import BadRequest
from contracts.media import MediaItem, MediaSpan, Prompt
from contracts.specs import AudioSpec, MediaSpecs
from model_families.checkpoint import read_json
from model_families.processing import Positions, Processor
from model_families.whisper.config import SECONDS_PER_FRAME, WhisperConfig, read_whisper_config

PREPROCESSOR_FILE = "preprocessor_config.json"


class _FeatureExtractor(msgspec.Struct, frozen=True):
    sampling_rate: int = 16_000
    n_fft: int = 400
    hop_length: int = 160


@dataclass(frozen=True)
class WhisperProcessor:
    config: WhisperConfig
    audio_spec: AudioSpec

    @property
    def media_specs(self) -> MediaSpecs:
        return MediaSpecs(audio=self.audio_spec)

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        """The window's positions, which take encoder output, then the tokens."""
        if len(items) != 1:
            raise BadRequest("this model only transcribes; use /v1/audio/transcriptions", param="model")
        length = self.config.max_source_positions
        span = MediaSpan(offset=0, length=length, item_index=0, digest=items[0].pixel_digest)
        return Prompt([0] * length + token_ids, tuple(items), (span,))

    def positions(self, prompt: Prompt) -> tuple[Positions, int]:
        """Unused by the decoder, which counts from the window's end."""
        return np.arange(len(prompt.token_ids), dtype=np.int64)[None], 0


def open_processor(folder: Path) -> Processor:
    config = read_whisper_config(folder)
    extractor = read_json(folder / PREPROCESSOR_FILE, _FeatureExtractor)
    assert extractor.hop_length == round(extractor.sampling_rate * SECONDS_PER_FRAME), "10 ms a frame"
    return WhisperProcessor(
        config,
        AudioSpec(
            tokens="whisper",
            num_mels=config.num_mel_bins,
            sampling_rate=extractor.sampling_rate,
            n_fft=extractor.n_fft,
            hop_length=extractor.hop_length,
            min_samples=config.window_frames * extractor.hop_length,
        ),
    )
