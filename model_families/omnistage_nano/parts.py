"""omnistage-nano: its parts put together. Thinker, ears and eyes are Qwen2.5-Omni's kind, talker and vocoder
Qwen3-Omni's, marks around pictures and sound its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from contracts.media import Modality
from lm_engine.model import DecoderConfig
from model_families.omni.config import read_thinker_config
from model_families.omni.processor import OmniProcessor
from model_families.omnistage_nano.ears import load_ears
from model_families.omnistage_nano.pipeline import PIPELINE
from model_families.omnistage_nano.positions import OnePerToken
from model_families.omnistage_nano.speech import SPEECH
from model_families.parts import FamilyParts
from model_families.processing import Processor
from model_families.qwen2_5_omni.decoder import decoder_config
from model_families.qwen2_5_omni.encoder import load_encoder
from model_families.qwen2_5_omni.processor import open_processor
from model_families.qwen2_5_omni.weights import text_name
from model_families.text_config import CheckpointConfig

PLACEHOLDERS: Mapping[Modality, str] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}


def read_decoder_config(folder: Path) -> DecoderConfig:
    return decoder_config(read_thinker_config(folder, CheckpointConfig))


class _Trained(msgspec.Struct, frozen=True):
    hears: bool = True  # false: its ears were not trained
    one_position_per_token: bool = False  # how its eyes were trained; false: as Qwen2.5-Omni has it


def open_nano(folder: Path) -> Processor:
    processor = open_processor(folder)
    assert isinstance(processor, OmniProcessor)
    trained = read_thinker_config(folder, _Trained)
    if trained.one_position_per_token:
        processor = replace(processor, place=OnePerToken())
    if trained.hears:
        return processor
    return replace(processor, media_specs=msgspec.structs.replace(processor.media_specs, audio=None))


PARTS = FamilyParts(
    pipeline=PIPELINE,
    architectures=("OmnistageNanoForConditionalGeneration",),
    open_processor=open_nano,
    read_decoder_config=read_decoder_config,
    text_name=text_name,
    writes_down="en",
    encoders={"vision": load_encoder, "audio": load_ears},
    speech=SPEECH,
    placeholders=PLACEHOLDERS,
)
