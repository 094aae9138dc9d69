"""How many weights a checkpoint holds, by stage and dtype, read from the files' headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from model_families.dummy_weights import open_checkpoint

# What marks a tensor of each stage but the thinker, to which all others belong.
_STARTS: Mapping[str, str] = {"talker.": "talker", "code2wav.": "vocoder", "token2wav.": "vocoder"}
_MARKS: Mapping[str, str] = {
    "visual.": "vision",
    "audio_tower.": "audio",
    "model.encoder.": "audio",
    "multi_modal_projector.": "audio",
}


@dataclass(frozen=True)
class WeightCensus:
    """Elements by stage; `dtype` is that of most elements."""

    elements: Mapping[str, int]
    dtype: torch.dtype

    def of(self, stage: str) -> int:
        return self.elements.get(stage, 0)


def take_census(folder: Path) -> WeightCensus:
    """Raises EngineError for an unreadable checkpoint."""
    elements: Counter[str] = Counter()
    dtypes: Counter[torch.dtype] = Counter()
    with open_checkpoint(folder) as checkpoint:
        for name in checkpoint.names:
            count = prod(checkpoint.shape(name))
            elements[_stage_of(name)] += count
            dtypes[checkpoint.dtype(name)] += count
    return WeightCensus(elements, dtypes.most_common(1)[0][0])


def _stage_of(name: str) -> str:
    for start, stage in _STARTS.items():
        if name.startswith(start):
            return stage
    return next((stage for mark, stage in _MARKS.items() if mark in name), "thinker")
