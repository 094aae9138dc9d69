"""Parameters of a generation: frozen, validated once at the API edge."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is given where it leaves a parameter out: the checkpoint's own (generation_config.json),
    else what changes nothing. `top_k` 0 or -1 is off."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. `temperature` 0 is greedy. Ranges are checked by `api`, asserted by the engine.

    `logprobs`: None = none wanted; k ≥ 0 = the chosen token's and the k best alternatives'.
    `seed`: draws depend on (seed, sample index, position) alone. None = the coordinator fills in a random
    one.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    ruled: bool = True  # by what the model's own rules forbid; False: its bare distribution is asked for

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
