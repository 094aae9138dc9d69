"""What every family gives the stages: an opened checkpoint that knows its graph, its prompt layout and its
parts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from contracts.media import MediaItem, Prompt
from contracts.pipeline import Pipeline
from contracts.specs import MediaSpecs, SpeechSpec
from encoder_pool.model import EncoderModel
from lm_engine.logits_rule import LogitsRule
from lm_engine.model import DecoderConfig, DecoderModel, Kernels
from lm_engine.parallel import TensorParallel
from lm_engine.talker.model import TalkerModel
from model_families.text import ChatTokenizer
from model_families.transcription import Transcriber
from vocoder.model import VocoderModel


class Family(Protocol):
    """A checkpoint folder, opened: the configuration is read, no weight is loaded yet."""

    name: str
    pipeline: Pipeline
    decoder_config: DecoderConfig
    media_specs: MediaSpecs
    context_length: int
    eos_token_ids: tuple[int, ...]
    speech: SpeechSpec | None  # None: it does not speak
    talker_config: DecoderConfig | None  # ditto

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Tokenizer and chat template, read at the first use (a worker needs neither). Blocks for seconds."""
        ...

    @property
    def transcriber(self) -> Transcriber | None:
        """None: not a model for transcriptions; else it does nothing else. Reads the tokenizer."""
        ...

    @property
    def writes_down(self) -> str | None:
        """The language, as an ISO 639-1 code, of which its ears write down what they hear (an `encoder_pool`
        `Listener`), without the language model; None: they do not."""
        ...

    def layout(self, token_ids: list[int], items: list[MediaItem]) -> Prompt:
        """Expands each placeholder token to its item's tokens, in order.

        Raises BadRequest when placeholders and items do not match in number.
        """
        ...

    def positions(self, prompt: Prompt) -> tuple[np.ndarray, float]:
        """RoPE positions [A, T] of the prompt, int64 or float32, and delta: token i ≥ T has position
        i + delta on every axis."""
        ...

    def check_weights(self) -> None:
        """Raises EngineError when the checkpoint's tensors are not those that config.json describes. Reads
        headers only; the decoder's alone, towers are checked as they load."""
        ...

    def load_encoder(self, stage: str, device: torch.device, dtype: torch.dtype) -> EncoderModel:
        """The tower of an encoder stage of the pipeline. Raises when there is none."""
        ...

    def load_decoder(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        parallel: TensorParallel | None = None,
    ) -> DecoderModel:
        """`parallel`: the share of one rank. Raises EngineError when the decoder cannot be divided."""
        ...

    def logits_rule(self, device: torch.device) -> LogitsRule | None:
        """What binds the next token beside the model's own logits."""
        ...

    def load_talker(self, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> TalkerModel:
        """Raises when `speech` is None."""
        ...

    def spoken_of(self, text: str) -> str:
        """What of a text is spoken; "" where nothing of it can be: then its talker need not be asked.
        Raises when `speech` is None."""
        ...

    def load_vocoder(self, device: torch.device, dtype: torch.dtype) -> VocoderModel[Any]:
        """Raises when `speech` is None."""
        ...
