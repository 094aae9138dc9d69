"""The seam between the talker's engine and a family's talker: prompts, rows, frames.

Shapes: P prompt rows, W width of an input row, H hidden of the talker, X hidden of the thinker, K text
tokens,
R rows of a step, S of them sampling, Q code groups of a frame, V codes of the first group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contracts.media import Prompt
from contracts.params import SamplingParams
from lm_engine.model import AttentionBackend, AttentionMetadata, DecoderConfig, PagedKV

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TalkerConfig:
    """`decoder.vocab_size` counts the codes of the first group. `residual`: how the other groups are drawn
    when the request draws at all."""

    decoder: DecoderConfig
    num_code_groups: int
    hidden_width: int  # X
    text_hidden: bool  # text tokens come with the thinker's hidden states
    text_vocab_size: int
    end_codes: tuple[int, ...]
    suppressed_codes: tuple[int, ...]  # never drawn
    residual: SamplingParams


@dataclass(frozen=True)
class TalkerPrompt:
    """One request's prompt as the talker sees it. Host data only.

    `codes`: one first-group code a row, for what the penalties count as seen. `leading_text`: text of the
    thinker's prompt that is spoken before what the thinker writes.
    """

    token_ids: Ints  # text of the rows that come from the thinker's prompt
    is_media: npt.NDArray[np.bool_]  # of these
    hidden_positions: Ints  # positions of the thinker's prompt whose hidden states are needed, ascending
    voice: int  # the family's id of it
    codes: list[int]
    positions_AP: np.ndarray  # as `Admission.positions_AL`
    position_delta: float
    leading_text: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.codes)


Speller = Callable[[list[int], bool], list[int]]
"""(The thinker's next tokens, whether they are the last) → the rows of text that they are to the talker. Each
answer has one of its own, which is asked token after token and may hold back what it does not know the end
of, until the last. However the tokens are parted, the rows are the same."""


def as_written(token_ids: list[int], last: bool) -> list[int]:
    """A row a token."""
    return token_ids


Draw = Callable[[Tensor, int], Tensor]
"""(logits [S, V'] of a code group, the group) → codes [S]. Spends the logits (float32)."""


class TalkerModel(Protocol):
    """The mathematics of one talker; holds weights and scratch memory, no request state.

    The input at a sequence index is a row, which arrives, plus the embedding of the frame that the step
    before drew. Rows of text: one per token that the speller gives after the first (which is part of the
    prompt), then the end row, then the pad row for ever.
    """

    config: TalkerConfig
    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    text_table_VW: Tensor | None  # the rows of all text tokens, where they are known beforehand

    def lay_out(self, prompt: Prompt, voice: str) -> TalkerPrompt:
        """Raises BadRequest for a voice it has not, or a prompt that asks for no answer."""
        ...

    def speller(self) -> Speller:
        """For one answer. Where text comes with hidden states, a row is a token."""
        ...

    def reserve(self, max_sequences: int) -> None:
        """Allocates scratch memory; once, before any step."""
        ...

    def prompt_rows(
        self, prompt: TalkerPrompt, hidden_NX: Tensor, first_token: int, first_hidden_1X: Tensor | None
    ) -> Tensor:
        """[P, W]. `hidden_NX`: one row per entry of `prompt.hidden_positions`. All are on the device, of any
        dtype."""
        ...

    def text_rows(self, token_ids_K: Tensor, hidden_KX: Tensor | None) -> Tensor:
        """[K, W]."""
        ...

    def closing_rows(self) -> Tensor:
        """[2, W]: the end row and the pad row."""
        ...

    def frame_rows(self, codes_RQ: Tensor) -> Tensor:
        """[R, W]: embeddings of frames, summed over the groups."""
        ...

    def forward(
        self,
        rows_TW: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[T, H], after the final norm. Spends `rows_TW`."""
        ...

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """[S, V] float32, of the first code group."""
        ...

    def complete(self, hidden_SH: Tensor, code_S: Tensor, draw: Draw) -> Tensor:
        """[S, Q] int64: the frames whose first codes are `code_S`."""
        ...
