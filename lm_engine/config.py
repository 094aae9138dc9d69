"""EngineConfig: what one language-model engine may use, checked once at build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority", "fair", "cache_aware"]
SpokenHidden = Literal["media", "all"]


@dataclass(frozen=True)
class EngineConfig:
    """Raises ValueError at build for bounds that could never make progress.

    `num_blocks` counts the scratch block 0. `embedding_width` 0 = the model takes no embeddings.
    `atomic_spans`: a media span is computed in one step (bidirectional attention inside it); then
    `max_item_tokens`, the longest span the processor can produce, is checked here instead of per request.
    `mixed_step_tokens`: of a step in which sequences decode, whose next tokens wait for all of it. None: as
    any other step. `encoder_step_tokens`: of such a step while an encoder computes on the same device, its
    decodes in any case; 0: nothing but those. None: no fewer, as for atomic spans, which would wait for the
    encoder's pauses.
    `aging_s`: waiting that long is worth one level of priority (policy "priority").
    `max_deferrals`: times a request may be overtaken (policy "cache_aware").
    `min_shared_tokens`: a request waits for a prefill under way that computes so many tokens for both; None:
    it computes them, too. `min_early_tokens`: of a prompt whose next item is missing; fewer wait for it.
    `spoken_hidden`: whose kept hidden states a talker takes: the prompt's media, or all of the prompt and of
    the answer. None: there is no talker.
    """

    num_blocks: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    block_size: int = 16
    max_step_tokens: int = 2048
    mixed_step_tokens: int | None = None
    encoder_step_tokens: int | None = None
    max_sequences: int = 64
    max_step_visual_tokens: int = 2048
    long_prefill_cap: int = 1024
    max_resident_embedding_tokens: int = 65536
    embedding_width: int = 0
    plain_embedding_width: int = 0  # of items without deepstack features; 0: there are none
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 4_000_000
    policy: Policy = "fcfs"
    aging_s: float = 10.0
    max_deferrals: int = 8
    min_shared_tokens: int | None = 256
    min_early_tokens: int = 256
    prefix_cache: bool = True
    atomic_spans: bool = False
    max_item_tokens: int | None = None
    overlap: bool = True
    spoken_hidden: SpokenHidden | None = None
    stage: str = "lm"

    def __post_init__(self) -> None:
        bounds = {
            "context_length": self.context_length,
            "block_size": self.block_size,
            "max_sequences": self.max_sequences,
            "max_step_visual_tokens": self.max_step_visual_tokens,
            "long_prefill_cap": self.long_prefill_cap,
            "max_resident_embedding_tokens": self.max_resident_embedding_tokens,
            "max_waiting_requests": self.max_waiting_requests,
            "max_waiting_tokens": self.max_waiting_tokens,
            "min_early_tokens": self.min_early_tokens,
        }
        for name, value in bounds.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, want at least 1")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks is {self.num_blocks}, want the scratch block and at least one more")
        if self.step_tokens_beside_decodes < self.max_sequences:
            # Every decoding sequence gets its token in every step.
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} or mixed_step_tokens {self.mixed_step_tokens}"
                f" is below max_sequences {self.max_sequences}"
            )
        if self.encoder_step_tokens is not None and self.encoder_step_tokens < 0:
            raise ValueError(f"encoder_step_tokens is {self.encoder_step_tokens}, want at least 0")
        self._check_atomic_spans()

    def _check_atomic_spans(self) -> None:
        if not self.atomic_spans:
            return
        if self.encoder_step_tokens is not None:
            raise ValueError("encoder_step_tokens: atomic spans need whole steps")
        if self.max_atomic_span < (self.max_item_tokens or 1):
            raise ValueError(
                f"media spans must not be split: a step of {self.step_tokens_beside_decodes} less "
                f"max_sequences {self.max_sequences} leaves {self.max_atomic_span} tokens, an item may have "
                f"{self.max_item_tokens or 1}"
            )

    @property
    def kv_capacity_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_atomic_span(self) -> int:
        """What is left of a step for one span however many sequences decode beside it."""
        return self.step_tokens_beside_decodes - self.max_sequences

    @property
    def step_tokens_beside_decodes(self) -> int:
        mixed = self.mixed_step_tokens
        return self.max_step_tokens if mixed is None else min(mixed, self.max_step_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
