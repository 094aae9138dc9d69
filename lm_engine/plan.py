"""What the scheduler tells the runner to do in one step, and what comes back. Host data only, but for
embeddings.

Shapes: T tokens of the step, A position axes (1 = RoPE, 3 = M-RoPE), L tokens of a sequence.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from torch import Tensor

from contracts.messages import TokenLogprobs
from contracts.params import SamplingParams


@dataclass(frozen=True)
class Admission:
    """A sequence takes row `slot` of the device's request table.

    `token_ids` is the prompt followed by tokens generated earlier (after preemption or on replay), the first
    `num_prompt_tokens` of it are the prompt. `positions_AL` covers the prompt; the token at index
    i ≥ num_prompt_tokens has position `i + position_delta` on every axis. `seed` is the sample's own.
    `stop_token_ids` may not be drawn as one of the first `sampling.min_tokens` generated tokens.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    positions_AL: np.ndarray  # whole numbers or float32: where video runs, time goes on in fractions
    position_delta: float
    sampling: SamplingParams
    seed: int
    block_ids: tuple[int, ...]  # blocks it starts with (prefix hits and the first chunk's)
    stop_token_ids: tuple[int, ...] = ()  # all that end it, forbidden until `sampling.min_tokens` are out
    gated_from: int | None = None  # index of its first row of a picture or video; None: it has none


class SequenceStep(msgspec.Struct, frozen=True, gc=False):  # a struct: hundreds are built every step
    """Compute `num_tokens` tokens of `slot` from index `start`; `new_block_ids` are appended to its block
    table first.

    `samples`: the last computed token's logits are sampled; the drawn token becomes token `start +
    num_tokens` of
    the sequence in the device table, so the next step may be planned before the result is known.
    """

    slot: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class SpanPiece:
    """Rows of an item's embeddings that replace token embeddings in this step.

    Rows `source_start : source_start + length` of `embeddings` go to sequence indices
    `start : start + length` of `slot` (sequence indices, not step rows). The width is the hidden size times
    (1 + number of deepstack levels), or the hidden size alone for items without such features (audio).
    """

    slot: int
    start: int
    length: int
    embeddings: Tensor
    source_start: int


@dataclass(frozen=True)
class HiddenRead:
    """Kept hidden states of these sequence indices of `slot`, which this step or earlier ones compute."""

    slot: int
    indices: np.ndarray  # int64


@dataclass(frozen=True)
class AlignmentRead:
    """Of the sequence in `slot`, `length` tokens long with its encoder positions, all of which this step or
    earlier ones compute: where its last `num_tokens` lie among its first `num_positions`."""

    slot: int
    length: int
    num_tokens: int
    num_positions: int


@dataclass(frozen=True)
class StepPlan:
    """Order of effects: release slots, admit, copy blocks (source → target), append blocks, compute,
    read hidden states, sample. A released slot may be unknown to the runner when the plan that admitted it
    failed."""

    step_id: int
    released_slots: tuple[int, ...]
    admissions: tuple[Admission, ...]
    block_copies: tuple[tuple[int, int], ...]
    sequences: tuple[SequenceStep, ...]
    span_pieces: tuple[SpanPiece, ...]
    hidden_reads: tuple[HiddenRead, ...] = ()
    alignment_reads: tuple[AlignmentRead, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)


class SampledToken(msgspec.Struct, frozen=True):
    slot: int
    token_id: int
    logprobs: TokenLogprobs | None  # when the sequence asked for them


@dataclass(frozen=True)
class StepResult:
    """`sampled` has one entry per sequence with `samples`, in plan order.

    `failed_slots`: those whose logits were not finite; their token is meaningless and their request fails.
    """

    step_id: int
    sampled: tuple[SampledToken, ...]
    failed_slots: tuple[int, ...] = ()
    hidden: tuple[Tensor, ...] = ()  # [N, H] on the device, one per read of the plan
    alignments: tuple[tuple[int, ...], ...] = ()  # first position of each token, one per read of the plan


class Runner(Protocol):
    """Runs plans one after another, in the order submitted, on a thread of its own.

    A plan may be submitted before the result of the one before it is known. A step that fails sets the
    exception on its future and leaves the runner able to run later plans.
    """

    def submit(self, plan: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None:
        """Waits for the running step; later ones may be dropped. Idempotent."""
        ...
