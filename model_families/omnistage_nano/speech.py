"""omnistage-nano's speech: Qwen3-Omni's, with cooler draws: a small talker has less to choose from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from contracts.params import SamplingParams
from contracts.specs import SpeechSpec
from model_families.omnistage_nano.front import spoken_of
from model_families.omnistage_nano.pipeline import SILENT_PIPELINE
from model_families.omnistage_nano.talker import load_nano_talker
from model_families.qwen3_omni_moe.speech import SPEECH as QWEN3_OMNI

SAMPLING = SamplingParams(temperature=0.6, top_k=50)


def read_spec(folder: Path) -> SpeechSpec | None:
    spec = QWEN3_OMNI.read_spec(folder)
    return None if spec is None else msgspec.structs.replace(spec, sampling=SAMPLING)


SPEECH = replace(
    QWEN3_OMNI,
    read_spec=read_spec,
    load_talker=load_nano_talker,
    silent_pipeline=SILENT_PIPELINE,
    spoken_of=spoken_of,
)
