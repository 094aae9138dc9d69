"""omnistage-nano's talker: Qwen3-Omni's, which hears nothing but the words it speaks, in pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from contracts.media import Prompt
from contracts.params import SamplingParams
from lm_engine.decoder import WeightSource
from lm_engine.layers.kernels import Kernels
from lm_engine.model import Kernels as KernelChoice
from lm_engine.talker.model import Speller, TalkerConfig, TalkerPrompt
from lm_engine.talker.predictor import CodePredictor
from model_families.omnistage_nano.front import FrontSpeller, open_front
from model_families.omnistage_nano.spelling import Speller as LetterSpeller
from model_families.omnistage_nano.spelling import open_spelling
from model_families.processing import Processor
from model_families.qwen3_omni_moe.talker import OmniSections, Talker, find_turns, load_talker

NewSpeller = Callable[[int], Speller]  # of an answer, with that pad
RESIDUAL = SamplingParams(temperature=0.6, top_k=50)


class NanoTalker(Talker):
    def __init__(
        self,
        sections: OmniSections,
        config: TalkerConfig,
        source: WeightSource,
        kernels: Kernels,
        predictor: CodePredictor,
        processor: Processor,
        *,
        new_speller: NewSpeller,
    ) -> None:
        super().__init__(sections, config, source, kernels, predictor, processor)
        self._new_speller, self._pad = new_speller, sections.tts_pad_token_id

    def lay_out(self, prompt: Prompt, voice: str) -> TalkerPrompt:
        """The head of the answer's turn alone."""
        ids = np.array(prompt.token_ids, dtype=np.int64)
        _, answer = find_turns(ids, self._sections)
        return super().lay_out(Prompt(ids[answer:].tolist(), (), ()), voice)

    def speller(self) -> Speller:
        return self._new_speller(self._pad)


class _Reads(msgspec.Struct, frozen=True):
    spelling: Literal["letters", "phonemes"] = "letters"  # what the talker learned to read


def open_speller(folder: Path) -> NewSpeller:
    if msgspec.json.decode((folder / "config.json").read_bytes(), type=_Reads).spelling == "letters":
        return partial(LetterSpeller, open_spelling(folder))
    return partial(FrontSpeller, open_front(folder))


def load_nano_talker(
    folder: Path, processor: Processor, device: torch.device, dtype: torch.dtype, kernels: KernelChoice
) -> Talker:
    kind = partial(NanoTalker, new_speller=open_speller(folder))
    return load_talker(folder, processor, device, dtype, kernels, residual=RESIDUAL, kind=kind)
