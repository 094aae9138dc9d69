"""Which family serves a checkpoint folder, and the folder opened as that family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from contracts.errors import BadRequest, EngineError
from contracts.media import MediaItem, Prompt
from contracts.params import SamplingDefaults
from contracts.pipeline import Pipeline
from contracts.specs import MediaSpecs, SpeechSpec
from encoder_pool.model import EncoderModel
from lm_engine.logits_rule import LogitsRule
from lm_engine.model import DecoderConfig, DecoderModel, Kernels
from lm_engine.parallel import TensorParallel
from lm_engine.talker.model import TalkerModel
from model_families import decoder_weights
from model_families.checkpoint import CONFIG_FILE, checkpoint_error, read_config
from model_families.dummy_weights import open_checkpoint
from model_families.family import Family
from model_families.llama.parts import PARTS as LLAMA
from model_families.omnistage_nano.parts import PARTS as OMNISTAGE_NANO
from model_families.parts import FamilyParts, SpeechParts
from model_families.processing import Processor
from model_families.qwen2.parts import PARTS as QWEN2
from model_families.qwen2_5_omni.parts import PARTS as QWEN2_5_OMNI
from model_families.qwen2_5_vl.parts import PARTS as QWEN2_5_VL
from model_families.qwen2_vl.parts import PARTS as QWEN2_VL
from model_families.qwen3.parts import PARTS as QWEN3
from model_families.qwen3_asr.parts import PARTS as QWEN3_ASR
from model_families.qwen3_omni_moe.parts import PARTS as QWEN3_OMNI_MOE
from model_families.qwen3_vl.parts import PARTS as QWEN3_VL
from model_families.qwen3_vl_moe.parts import PARTS as QWEN3_VL_MOE
from model_families.text import ChatTokenizer, HFChatTokenizer
from model_families.transcription import Transcriber
from model_families.whisper.parts import PARTS as WHISPER
from vocoder.model import VocoderModel

FAMILIES = {
    parts.name: parts
    for parts in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN2_5_OMNI,
        QWEN3_OMNI_MOE,
        WHISPER,
        QWEN3_ASR,
        OMNISTAGE_NANO,
    )
}
GENERATION_FILE = "generation_config.json"


class _Identity(msgspec.Struct, frozen=True):
    model_type: str = ""
    architectures: tuple[str, ...] | None = None


class _EndTokens(msgspec.Struct, frozen=True):
    eos_token_id: int | tuple[int, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        found = self.eos_token_id
        return (found,) if isinstance(found, int) else found or ()


class _ConfigEndTokens(_EndTokens, frozen=True):
    text_config: _EndTokens = _EndTokens()


class _WholeEndTokens(_ConfigEndTokens, frozen=True):
    thinker_config: _ConfigEndTokens = _ConfigEndTokens()


@dataclass(eq=False)
class OpenFamily:
    """A Family made of its folder's parts; see `Family` for the contracts."""

    name: str
    pipeline: Pipeline
    decoder_config: DecoderConfig
    media_specs: MediaSpecs
    context_length: int
    eos_token_ids: tuple[int, ...]
    folder: Path
    parts: FamilyParts
    processor: Processor
    speech: SpeechSpec | None
    talker_config: DecoderConfig | None

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return HFChatTokenizer(self.folder, self.parts.placeholders)

    @cached_property
    def transcriber(self) -> Transcriber | None:
        make = self.parts.transcriber
        return None if make is None else make(self.folder, self.tokenizer)

    @property
    def writes_down(self) -> str | None:
        return None if self.media_specs.audio is None else self.parts.writes_down

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        return self.processor.layout(token_ids, items)

    def positions(self, prompt: Prompt) -> tuple[np.ndarray, float]:
        return self.processor.positions(prompt)

    def load_encoder(self, stage: str, device: torch.device, dtype: torch.dtype) -> EncoderModel:
        if stage not in self.parts.encoders:
            raise EngineError(f"family {self.name} has no encoder {stage!r}")
        encoder = self.parts.encoders[stage](self.folder, self.media_specs, device, dtype)
        width, decoder = encoder.embedding_width, self.decoder_config
        if width not in (decoder.hidden_size, decoder.hidden_size * (1 + decoder.num_deepstack_levels)):
            raise checkpoint_error(
                f"config.json: the {stage} tower's embeddings are {width} wide (out_hidden_size, output_dim),"
                f" hidden_size is {decoder.hidden_size}"
            )
        return encoder

    def load_decoder(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        parallel: TensorParallel | None = None,
    ) -> DecoderModel:
        if self.parts.load_decoder is not None:
            if parallel is not None:
                raise EngineError(f"the decoder of {self.name} cannot be divided: set tensor_parallel = 1")
            return self.parts.load_decoder(self.folder, device, dtype, kernels)
        with open_checkpoint(self.folder) as checkpoint:
            return decoder_weights.load_decoder(
                checkpoint,
                self.decoder_config,
                self.parts.text_name,
                device=device,
                dtype=dtype,
                kernels=kernels,
                parallel=parallel,
            )

    def check_weights(self) -> None:
        if self.parts.load_decoder is None:
            with open_checkpoint(self.folder) as checkpoint:
                decoder_weights.check_decoder(checkpoint, self.decoder_config, self.parts.text_name)

    def logits_rule(self, device: torch.device) -> LogitsRule | None:
        make = self.parts.logits_rule
        return None if make is None else make(self.folder, device)

    def load_talker(self, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> TalkerModel:
        return self._speech_parts.load_talker(self.folder, self.processor, device, dtype, kernels)

    def spoken_of(self, text: str) -> str:
        return self._speech_parts.spoken_of(text)

    def load_vocoder(self, device: torch.device, dtype: torch.dtype) -> VocoderModel[Any]:
        return self._speech_parts.load_vocoder(self.folder, device, dtype)

    @property
    def _speech_parts(self) -> SpeechParts:
        if self.parts.speech is None or self.speech is None:
            raise EngineError(f"{self.folder.name} does not speak")
        return self.parts.speech


def open_family(folder: Path) -> Family:
    """Reads the configuration; no weight.

    Raises BadRequest for a model of no supported family, EngineError for a folder that contradicts itself.
    """
    parts = _parts_of(folder)
    parts.pipeline.validate()
    processor = parts.open_processor(folder)
    decoder_config = parts.read_decoder_config(folder)
    speech = None if parts.speech is None else parts.speech.read_spec(folder)
    pipeline, talker_config = parts.pipeline, None
    if parts.speech is not None and speech is None:
        pipeline = parts.speech.silent_pipeline
    elif parts.speech is not None:
        talker_config = parts.speech.read_talker_config(folder)
        decoder_config = parts.speech.kept_hidden(folder, decoder_config)
    return OpenFamily(
        name=parts.name,
        pipeline=pipeline,
        decoder_config=decoder_config,
        media_specs=processor.media_specs,
        context_length=decoder_config.max_position,
        eos_token_ids=_end_tokens(folder),
        folder=folder,
        parts=parts,
        processor=processor,
        speech=speech,
        talker_config=talker_config,
    )


def _parts_of(folder: Path) -> FamilyParts:
    identity = read_config(folder, _Identity)
    for parts in FAMILIES.values():
        if identity.model_type in (parts.name, *parts.model_types):
            return parts
    for parts in FAMILIES.values():
        if set(parts.architectures) & set(identity.architectures or ()):
            return parts
    supported = ", ".join(FAMILIES)
    raise BadRequest(
        f"model type {identity.model_type!r} of {folder.name} is not supported; supported: {supported}",
        param="model",
        code="unsupported_model",
    )


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Of generation_config.json, as far as it names any. Raises a checkpoint error for what cannot be."""
    path = folder / GENERATION_FILE
    if not path.exists():
        return SamplingDefaults()
    names = SamplingDefaults.__struct_fields__
    try:
        named = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert(
            {name: named[name] for name in names if named.get(name) is not None}, SamplingDefaults
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise checkpoint_error(f"{path}: {error}") from error


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """Of generation_config.json, and only where it names none of config.json, as transformers does."""
    path = folder / GENERATION_FILE
    if path.exists():
        try:
            if ids := msgspec.json.decode(path.read_bytes(), type=_EndTokens).ids:
                return ids
        except msgspec.DecodeError as error:
            raise checkpoint_error(f"{path}: {error}") from error
    config = read_config(folder, _WholeEndTokens)
    thinker = config.thinker_config
    if ids := config.ids or config.text_config.ids or thinker.ids or thinker.text_config.ids:
        return ids
    raise checkpoint_error(f"neither {GENERATION_FILE} nor {CONFIG_FILE} names an eos_token_id")
