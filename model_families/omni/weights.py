"""Where the parts of an omni checkpoint's thinker lie, as transformers names them and as published."""

from __future__ import annotations

from collections.abc import Mapping

from model_families.decoder_weights import rename_text
from model_families.vision.weights import rename_tower

_ROOTS = ("thinker.", "thinker.model.", "", "model.")
VISION_PREFIXES = tuple(f"{root}visual." for root in _ROOTS)
AUDIO_PREFIXES = tuple(f"{root}audio_tower." for root in _ROOTS)
TEXT_PREFIXES = tuple(f"{root}model.language_model." for root in ("thinker.", ""))
TEXT_PREFIXES += tuple(f"{root}model." for root in ("thinker.", ""))
_OTHER_PARTS = ("talker.", "code2wav.", "token2wav.", *VISION_PREFIXES, *AUDIO_PREFIXES)


def thinker_text_name(name: str) -> str | None:
    if name.startswith(_OTHER_PARTS):
        return None
    head = name.removeprefix("thinker.")
    return head if head == "lm_head.weight" else rename_text(name, TEXT_PREFIXES)


def thinker_vision_name(name: str, modules: Mapping[str, str]) -> str | None:
    return rename_tower(name, modules, VISION_PREFIXES)


def thinker_audio_name(name: str, modules: Mapping[str, str]) -> str | None:
    return rename_tower(name, modules, AUDIO_PREFIXES)
