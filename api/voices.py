"""Voices as clients name them."""

from __future__ import annotations

import msgspec

from contracts.errors import BadRequest
from stages.service import ModelCard

MAX_SHOWN_CHARS = 40


class VoiceObject(msgspec.Struct, kw_only=True):
    id: str


def check_voice(given: str | VoiceObject | None, card: ModelCard, param: str = "voice") -> str | None:
    """The voice as the model spells it; None stands for its default. Raises BadRequest naming all of them."""
    if given is None:
        return None
    name = given.id if isinstance(given, VoiceObject) else given
    for voice in card.voices:
        if voice.lower() == name.strip().lower():
            return voice
    shown = name if len(name) <= MAX_SHOWN_CHARS else name[:MAX_SHOWN_CHARS] + "…"
    raise BadRequest(
        f"there is no voice {shown!r}; choose one of: {', '.join(card.voices)}",
        param=param,
        code="unknown_voice",
    )
