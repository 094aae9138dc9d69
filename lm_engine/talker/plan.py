"""What the talker's scheduler tells its runner to do in one step, and what comes back.

Shapes: K rows of a piece, W width of an input row, R sequences of the step, Q code groups.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lm_engine.plan import Admission, SequenceStep


class RowPiece(NamedTuple):
    """Rows `start : start + length` of a tensor [K, W] that the runner made, or will have made by then."""

    rows: Future[Tensor]
    start: int
    length: int


@dataclass(frozen=True)
class TalkerPlan:
    """Order of effects: release slots, admit, compute, draw frames.

    `pieces`: the input rows of the step's tokens, in order. `feedback`, one per sequence: its one token also
    takes the embedding of the frame that its slot drew last.
    """

    step_id: int
    released_slots: tuple[int, ...]
    admissions: tuple[Admission, ...]
    sequences: tuple[SequenceStep, ...]
    pieces: tuple[RowPiece, ...]
    feedback: tuple[bool, ...]


@dataclass(frozen=True)
class FramesDrawn:
    """One frame per sequence that samples, in plan order: `codes` int64 [1, Q] each, on the host, and its
    first code. `valid`: False where logits were not finite."""

    step_id: int
    codes: tuple[Tensor, ...]
    first: tuple[int, ...]
    valid: tuple[bool, ...]


class FrameRunner(Protocol):
    """Runs rows and plans one after another, in the order submitted, on a thread of its own."""

    def rows(self, make: Callable[[], Tensor]) -> Future[Tensor]:
        """Calls `make` in order with the plans, so plans submitted later may use its result unasked."""
        ...

    def submit(self, plan: TalkerPlan) -> Future[FramesDrawn]: ...

    def close(self) -> None: ...
