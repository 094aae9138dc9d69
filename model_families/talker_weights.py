"""Checkpoint names → ours, for the talkers of the omni families and the text embeddings they borrow."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from lm_engine.decoder import WeightSource
from model_families.decoder_weights import rename_text

# As transformers 5 names the thinker's table, and as the published checkpoints do.
TEXT_TABLES = ("thinker.model.language_model.embed_tokens.weight", "thinker.model.embed_tokens.weight")
PREDICTOR = "talker.code_predictor."
_PROJECTION = re.compile(r"talker\.(text|hidden)_projection\.linear_fc([12])\.(weight|bias)")
_GROUP = re.compile(r"(?:model\.codec_embedding|lm_head)\.(\d+)\.weight")


def talker_name(name: str) -> str | None:
    """`embed.weight`, `head.weight` (codes), `text_embed.weight`, `layers.…`, `norm.weight`; of Qwen2.5-Omni
    `projection.…`, of Qwen3-Omni `text.fc1.…`, `hidden.fc1.…` and the code predictor's under `predictor.`."""
    if name in TEXT_TABLES:
        return "text_embed.weight"
    if not name.startswith("talker."):
        return None
    if name.startswith(PREDICTOR):
        return _predictor_name(name)
    if match := _PROJECTION.fullmatch(name):
        return f"{match[1]}.fc{match[2]}.{match[3]}"
    if name.startswith("talker.thinker_to_talker_proj."):
        return name.replace("talker.thinker_to_talker_proj", "projection")
    if name == "talker.codec_head.weight":
        return "head.weight"
    if name == "talker.model.codec_embedding.weight":
        return "embed.weight"
    return rename_text(name, ("talker.model.",)) or name


def _predictor_name(name: str) -> str | None:
    rest = name.removeprefix(PREDICTOR)
    if match := _GROUP.fullmatch(rest):
        kind = "head" if rest.startswith("lm_head") else "embed"
        return f"predictor.{kind}.{match[1]}.weight"
    renamed = rename_text(name, (f"{PREDICTOR}model.",))
    return None if renamed is None else f"predictor.{renamed}"


class Under:
    """A WeightSource: the tensors of another one whose names start with `prefix`."""

    def __init__(self, source: WeightSource, prefix: str) -> None:
        self.device: torch.device = source.device
        self.dtype: torch.dtype = source.dtype
        self._source, self._prefix = source, prefix

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(self._prefix + name, shape)
