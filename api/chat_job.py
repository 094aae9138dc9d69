"""A chat request, validated: what is asked of the service and how its answer is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from api.answer import UsageMode
from api.routes.base import new_id
from api.sample_text import TextOptions
from stages.service import GenerationRequest


@dataclass(frozen=True)
class SpokenOptions:
    """`voice`: None is the model's own. `format`: as clients call it."""

    voice: str | None
    format: str


@dataclass(frozen=True)
class ChatJob:
    """`echo`: text that every answer starts with. `spoken`: None for an answer in text alone."""

    request: GenerationRequest
    text: TextOptions
    model: str
    echo: str
    usage: UsageMode
    spoken: SpokenOptions | None = None
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return self.request.sampling.n
