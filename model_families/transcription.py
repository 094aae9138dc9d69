"""The seam between a family that transcribes and the stages: which prompts to run, what their tokens say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from contracts.messages import Align, SampleDelta
from contracts.params import SamplingParams
from contracts.transcription import TranscriptEvent, TranscriptionOptions


@dataclass(frozen=True)
class Ask:
    """One request of the language model: a prompt about the mel frames [start, end) of the recording.
    `align`: where tokens of it lie is wanted, not an answer. `is_answer`: its tokens are, or may be, the
    transcript's."""

    token_ids: tuple[int, ...]
    start: int
    end: int
    sampling: SamplingParams
    align: Align | None = None
    is_answer: bool = True


class Recognition(Protocol):
    """One recording on its way to text: `next_ask`, then `take` until that ask's sample has finished,
    again."""

    def next_ask(self) -> Ask | None:
        """None: the recording is transcribed."""
        ...

    def take(self, delta: SampleDelta) -> list[TranscriptEvent]: ...


class Transcriber(Protocol):
    """Stateless."""

    def start(self, options: TranscriptionOptions, num_frames: int, duration_s: float) -> Recognition:
        """`num_frames`: mel frames of the recording; those after `duration_s` hold the silence that a short
        one
        is filled up with. Raises BadRequest for options that the checkpoint cannot follow."""
        ...

    def num_positions(self, ask: Ask) -> int:
        """Embedding rows that the encoder makes of the ask's frames."""
        ...
