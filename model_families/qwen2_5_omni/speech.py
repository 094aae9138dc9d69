"""Qwen2.5-Omni's speech: what a checkpoint says with, and the parts that say it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from contracts.specs import SpeechSpec
from lm_engine.model import DecoderConfig
from model_families.checkpoint import read_config
from model_families.graphs import omni_pipeline
from model_families.parts import SpeechParts
from model_families.qwen2_5_omni.speakers import read_speakers
from model_families.qwen2_5_omni.talker import SAMPLING, TalkerSection, load_talker, read_talker_config
from model_families.qwen2_5_omni.vocoder import SAMPLE_RATE, load_vocoder, read_token2wav_config


class _Switch(msgspec.Struct, frozen=True):
    enable_audio_output: bool = True
    talker_config: TalkerSection | None = None


def read_spec(folder: Path) -> SpeechSpec | None:
    switch = read_config(folder, _Switch)
    if switch.talker_config is None or not switch.enable_audio_output:
        return None
    dit, bigvgan = read_token2wav_config(folder)
    return SpeechSpec(
        sample_rate=SAMPLE_RATE,
        samples_per_frame=dit.repeats * bigvgan.hop,
        num_code_groups=1,
        voices=tuple(read_speakers(folder)),
        sampling=SAMPLING,
    )


def read_decoder_config(folder: Path) -> DecoderConfig:
    return read_talker_config(folder)[1].decoder


def kept_hidden(folder: Path, thinker: DecoderConfig) -> DecoderConfig:
    """Of everything, after the final norm."""
    return replace(thinker, kept_hidden_layer=thinker.num_layers, kept_hidden_of="all")


SPEECH = SpeechParts(
    read_spec=read_spec,
    read_talker_config=read_decoder_config,
    kept_hidden=kept_hidden,
    load_talker=load_talker,
    load_vocoder=load_vocoder,
    silent_pipeline=omni_pipeline("qwen2_5_omni", speaks=False),
)
