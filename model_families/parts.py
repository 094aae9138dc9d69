"""The parts of one family, as its folder declares them and the registry opens them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from contracts.media import Modality
from contracts.pipeline import Pipeline
from contracts.specs import MediaSpecs, SpeechSpec
from encoder_pool.model import EncoderModel
from lm_engine.logits_rule import LogitsRule
from lm_engine.model import DecoderConfig, DecoderModel, Kernels
from lm_engine.talker.model import TalkerModel
from model_families.decoder_weights import TextName
from model_families.processing import Processor
from model_families.text import ChatTokenizer
from model_families.transcription import Transcriber
from vocoder.model import VocoderModel


class LoadEncoder(Protocol):
    def __call__(
        self, folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype
    ) -> EncoderModel: ...


class LoadDecoder(Protocol):
    def __call__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, kernels: Kernels
    ) -> DecoderModel: ...


class LoadTalker(Protocol):
    def __call__(
        self,
        folder: Path,
        processor: Processor,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> TalkerModel: ...


class LoadVocoder(Protocol):
    def __call__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> VocoderModel[Any]: ...


def all_of(text: str) -> str:
    return text if text.strip() else ""


@dataclass(frozen=True)
class SpeechParts:
    """`read_spec`: None for a checkpoint without its talker; then `silent_pipeline` is the graph.
    `kept_hidden` fills in what the thinker's cache keeps for the talker. `spoken_of`: what of a text is
    spoken, "" where nothing of it can be."""

    read_spec: Callable[[Path], SpeechSpec | None]
    read_talker_config: Callable[[Path], DecoderConfig]
    kept_hidden: Callable[[Path, DecoderConfig], DecoderConfig]
    load_talker: LoadTalker
    load_vocoder: LoadVocoder
    silent_pipeline: Pipeline
    spoken_of: Callable[[str], str] = all_of


@dataclass(frozen=True)
class FamilyParts:
    """`model_types`: of config.json, beside the family's name. `architectures`: names there that stand for
    the family when its type does not. `load_decoder`: where the family's decoder is not the common one.
    `writes_down`: see `Family`."""

    pipeline: Pipeline
    architectures: tuple[str, ...]
    open_processor: Callable[[Path], Processor]
    read_decoder_config: Callable[[Path], DecoderConfig]
    text_name: TextName
    load_decoder: LoadDecoder | None = None
    logits_rule: Callable[[Path, torch.device], LogitsRule] | None = None
    transcriber: Callable[[Path, ChatTokenizer], Transcriber] | None = None
    writes_down: str | None = None
    encoders: Mapping[str, LoadEncoder] = field(default_factory=dict)  # by stage
    speech: SpeechParts | None = None
    model_types: tuple[str, ...] = ()
    placeholders: Mapping[Modality, str] = field(default_factory=dict)  # for string-only templates

    @property
    def name(self) -> str:
        return self.pipeline.name
