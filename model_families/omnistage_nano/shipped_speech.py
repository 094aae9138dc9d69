"""The speaking half as shipped → as its checkpoint has it: what is never drawn, and a projection that was not
trained, are zeros that need no place in the repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_CONTROL_CODES = 1024
WIDE = ("talker.model.codec_embedding.weight", "talker.codec_head.weight")


def read_sections(path: Path) -> dict[str, Any]:
    """The parts of config.json that describe the speaking half, as the training wrote them."""
    sections: dict[str, Any] = json.loads(path.read_text())
    return sections


def speaking_tensors(shipped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of `talker.*` and `code2wav.*`."""
    tensors = dict(shipped)
    num_codes = tensors["talker.code_predictor.lm_head.0.weight"].shape[0]
    for name in WIDE:
        trained = tensors[name]
        tensors[name] = torch.zeros(num_codes + NUM_CONTROL_CODES, trained.shape[1])
        tensors[name][: len(trained)] = trained
    for layer in ("linear_fc1", "linear_fc2"):
        for kind in ("weight", "bias"):
            text = tensors[f"talker.text_projection.{layer}.{kind}"]
            tensors[f"talker.hidden_projection.{layer}.{kind}"] = torch.zeros_like(text)
    return tensors
