"""omnistage-nano's talker: Qwen3-Omni's, which hears nothing but the words it speaks, in pieces."""

from __future__ import annotations

from functools import partial
from pathlib import Path

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
from model_families.checkpoint import checkpoint_error, read_config
from model_families.omnistage_nano.front import Front, FrontSpeller, open_front
from model_families.processing import Processor
from model_families.qwen3_omni_moe.talker import OmniSections, Talker, find_turns, load_talker

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
        front: Front,
    ) -> None:
        super().__init__(sections, config, source, kernels, predictor, processor)
        self._front, self._pad = front, sections.tts_pad_token_id

    def lay_out(self, prompt: Prompt, voice: str) -> TalkerPrompt:
        """The head of the answer's turn alone."""
        ids = np.array(prompt.token_ids, dtype=np.int64)
        _, answer = find_turns(ids, self._sections)
        return super().lay_out(Prompt(ids[answer:].tolist(), (), ()), voice)

    def speller(self) -> Speller:
        return FrontSpeller(self._front, self._pad)


class _Reads(msgspec.Struct, frozen=True):
    spelling: str = ""  # what the talker learned to read


def _check_reads_phonemes(folder: Path) -> None:
    """A talker that learned something else would babble."""
    if read_config(folder, _Reads).spelling != "phonemes":
        raise checkpoint_error(
            f'{folder}/config.json does not say "spelling": "phonemes", the only thing that the talker is'
            " given: it is of an older build, build it anew"
        )


def load_nano_talker(
    folder: Path, processor: Processor, device: torch.device, dtype: torch.dtype, kernels: KernelChoice
) -> Talker:
    _check_reads_phonemes(folder)
    kind = partial(NanoTalker, front=open_front(folder))
    return load_talker(folder, processor, device, dtype, kernels, residual=RESIDUAL, kind=kind)
