"""Qwen3-ASR: checkpoint names → ours."""

from __future__ import annotations

from model_families.decoder_weights import rename_text
from model_families.qwen3_omni_moe.audio_weights import MODULES
from model_families.vision.weights import rename_tower

_PROJECTIONS = {
    "model.multi_modal_projector.linear_1.": "projection1.",
    "model.multi_modal_projector.linear_2.": "projection2.",
}
_TOWER = ("model.audio_tower.",)


def text_name(name: str) -> str | None:
    return rename_text(name, ("model.language_model.",))


def audio_name(name: str) -> str | None:
    """The projector counts as the tower's last layers."""
    for theirs, ours in _PROJECTIONS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return rename_tower(name, MODULES, _TOWER)
