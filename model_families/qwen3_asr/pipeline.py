"""Qwen3-ASR: a recording through the audio tower into a language model that writes it down."""

from __future__ import annotations

import dataclasses

from model_families.whisper.pipeline import PIPELINE as LISTENING

PIPELINE = dataclasses.replace(LISTENING, name="qwen3_asr")
