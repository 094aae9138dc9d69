"""Qwen3-Omni's speech: what a checkpoint says with, and the parts that say it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from contracts.specs import SpeechSpec
from lm_engine.model import DecoderConfig
from model_families.checkpoint import read_config
from model_families.graphs import omni_pipeline
from model_families.parts import SpeechParts
from model_families.qwen3_omni_moe.talker import SAMPLING, TalkerSection, load_talker, read_talker_config
from model_families.qwen3_omni_moe.vocoder import load_vocoder, read_code2wav_config


class _Speaker(TalkerSection, frozen=True, kw_only=True):
    accept_hidden_layer: int = 24


class _Switch(msgspec.Struct, frozen=True):
    enable_audio_output: bool = True
    talker_config: _Speaker | None = None


def read_spec(folder: Path) -> SpeechSpec | None:
    switch = read_config(folder, _Switch)
    section = switch.talker_config
    if section is None or not switch.enable_audio_output:
        return None
    vocoder = read_code2wav_config(folder)
    return SpeechSpec(
        sample_rate=vocoder.sample_rate,
        samples_per_frame=vocoder.samples_per_frame,
        num_code_groups=section.num_code_groups,
        voices=tuple(section.speaker_id),
        sampling=SAMPLING,
    )


def read_decoder_config(folder: Path) -> DecoderConfig:
    return read_talker_config(folder)[1].decoder


def kept_hidden(folder: Path, thinker: DecoderConfig) -> DecoderConfig:
    """Of the prompt's media, after so many layers as the talker was trained on."""
    section = read_config(folder, _Switch).talker_config
    assert section is not None, "the checkpoint speaks"
    return replace(thinker, kept_hidden_layer=section.accept_hidden_layer, kept_hidden_of="media")


SPEECH = SpeechParts(
    read_spec=read_spec,
    read_talker_config=read_decoder_config,
    kept_hidden=kept_hidden,
    load_talker=load_talker,
    load_vocoder=load_vocoder,
    silent_pipeline=omni_pipeline("qwen3_omni_moe", speaks=False),
)
