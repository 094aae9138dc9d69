"""Qwen3-ASR: the sound it takes, and its place in a prompt of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from contracts.errors import BadRequest
from contracts.media import MediaItem, MediaSpan, Prompt
from contracts.specs import MediaSpecs
from model_families.audio.audio_spec import qwen3_omni_spec, read_feature_config
from model_families.checkpoint import read_config
from model_families.processing import Positions, Processor
from model_families.qwen3_asr.decoder import Qwen3ASRConfig
from model_families.qwen3_asr.encoder import Qwen3ASREars

MIN_SAMPLES = 8000


@dataclass(frozen=True)
class Qwen3ASRProcessor:
    media_specs: MediaSpecs
    audio_token: int

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        if len(items) != 1 or token_ids.count(self.audio_token) != 1:
            raise BadRequest("this model only transcribes; use /v1/audio/transcriptions", param="model")
        offset, length = token_ids.index(self.audio_token), items[0].num_tokens
        span = MediaSpan(offset=offset, length=length, item_index=0, digest=items[0].pixel_digest)
        expanded = [*token_ids[:offset], *[self.audio_token] * length, *token_ids[offset + 1 :]]
        return Prompt(expanded, tuple(items), (span,))

    def positions(self, prompt: Prompt) -> tuple[Positions, float]:
        return np.arange(len(prompt.token_ids), dtype=np.int64)[None], 0


def open_processor(folder: Path) -> Processor:
    ears = read_config(folder, Qwen3ASREars).audio_config
    spec = qwen3_omni_spec(read_feature_config(folder), ears.n_window)
    audio = msgspec.structs.replace(spec, min_samples=MIN_SAMPLES)
    return Qwen3ASRProcessor(MediaSpecs(audio=audio), read_config(folder, Qwen3ASRConfig).audio_token_id)
