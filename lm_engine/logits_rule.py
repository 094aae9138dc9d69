"""The seam for models whose next token is bound by what they said before: a rule over the logits of a step.

Shapes: S sampling rows, V vocabulary, L longest history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class History:
    """What the sampling rows have behind them, on the device."""

    tokens_SL: Tensor  # int64, garbage from `lengths_S` on
    lengths_S: Tensor  # int64: prompt and output
    num_prompt_S: Tensor  # int64


class LogitsRule(Protocol):
    """A pure function of a row's own history, so that batch and schedule change nothing."""

    def apply(self, logits_SV: Tensor, history: History) -> Tensor:
        """Allowed logits; -inf forbids. May write into `logits_SV`. Log-probabilities are of the result."""
        ...
