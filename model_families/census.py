"""How many weights a checkpoint holds, by part and dtype, read from the files' headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from model_families.dummy_weights import open_checkpoint

ENCODER_MARK = "visual."


@dataclass(frozen=True)
class WeightCensus:
    """Elements by part; `dtype` is that of most elements."""

    decoder_elements: int
    encoder_elements: int
    dtype: torch.dtype


def take_census(folder: Path) -> WeightCensus:
    """Raises EngineError for an unreadable checkpoint."""
    elements = {True: 0, False: 0}
    dtypes: Counter[torch.dtype] = Counter()
    with open_checkpoint(folder) as checkpoint:
        for name in checkpoint.names:
            count = prod(checkpoint.shape(name))
            elements[ENCODER_MARK in name] += count
            dtypes[checkpoint.dtype(name)] += count
    return WeightCensus(elements[False], elements[True], dtypes.most_common(1)[0][0])
