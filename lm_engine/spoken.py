"""What the talker hears of the thinker: hidden states of the prompt, and the answer's text as it is written.

Shapes: N positions, K tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from contracts.chunks import Chunk
from lm_engine.config import SpokenHidden
from lm_engine.plan import HiddenRead, SequenceStep
from lm_engine.sequence import Request
from lm_engine.sequence import Sequence as Sample

if TYPE_CHECKING:
    from torch import Tensor

PROMPT_STREAM, TEXT_STREAM = "prompt", "text"
MAX_CHUNK_BYTES = 4 << 20  # a long prompt's hidden states go in pieces, so that an edge holds several


@dataclass
class _Told:
    """How far the streams of one request have come. Text counts the answer's tokens from its first."""

    prompt_asked: bool = False
    num_text_asked: int = 0  # tokens whose hidden states steps under way or done have read
    hidden: list[Tensor] = field(default_factory=list)  # read and not sent
    num_text_sent: int = 0
    num_chunks: dict[str, int] = field(default_factory=lambda: {PROMPT_STREAM: 0, TEXT_STREAM: 0})
    num_spoken: int | None = None  # tokens that are spoken, once the answer has ended


@dataclass(frozen=True)
class Reading:
    """A read of a step, and what it is for."""

    sample: Sample
    read: HiddenRead
    stream: str


class SpeechFeed:
    """The streams of all requests with speech, from `open` until their last text is sent.

    The prompt's hidden states are sent when the prompt is computed, once, whatever is preempted and computed
    again. With "all" each token of text goes with its hidden state, so one step after it was drawn.
    """

    def __init__(self, of: SpokenHidden | None) -> None:
        self._of = of
        self._told: dict[Request, _Told] = {}
        self._ready: list[Chunk] = []

    def open(self, request: Request) -> None:
        assert self._of is not None, "the model keeps no hidden states"
        assert len(request.sequences) == 1, "a spoken answer is one sample"
        self._told[request] = _Told()

    def forget(self, request: Request) -> None:
        self._told.pop(request, None)

    def drop(self, request_id: str) -> None:
        """What is ready is not sent."""
        self._ready = [chunk for chunk in self._ready if chunk.request_id != request_id]

    def clear(self) -> None:
        self._told.clear()
        self._ready.clear()

    @property
    def has_chunks(self) -> bool:
        return bool(self._ready)

    @property
    def is_idle(self) -> bool:
        return not self._told and not self._ready

    def take_chunks(self) -> tuple[Chunk, ...]:
        chunks, self._ready = tuple(self._ready), []
        return chunks

    # --- what steps must read -------------------------------------------------------------------------------
    def plan_reads(self, samples: Sequence[Sample], rows: Sequence[SequenceStep]) -> list[Reading]:
        """For a step that computes `rows` of `samples`."""
        if not self._told:
            return []
        readings: list[Reading] = []
        for sample, row in zip(samples, rows, strict=True):
            told = self._told.get(sample.request)
            if told is not None:
                readings += self._reads_of(sample, told, row)
        return readings

    def _reads_of(self, sample: Sample, told: _Told, row: SequenceStep) -> Iterable[Reading]:
        num_prompt, end = sample.request.num_prompt, row.start + row.num_tokens
        if end < num_prompt:
            return
        if not told.prompt_asked:
            told.prompt_asked = True
            yield Reading(sample, HiddenRead(row.slot, self._heard(sample.request)), PROMPT_STREAM)
        first = num_prompt + told.num_text_asked
        if self._of == "all" and end > first:
            told.num_text_asked = end - num_prompt
            yield Reading(sample, HiddenRead(row.slot, np.arange(first, end)), TEXT_STREAM)

    def _heard(self, request: Request) -> np.ndarray:
        if self._of == "all":
            return np.arange(request.num_prompt)
        runs = [np.arange(run.start, run.end) for run in request.media.runs]
        return np.concatenate([np.zeros(0, dtype=np.int64), *runs])

    # --- what has become known ------------------------------------------------------------------------------
    def landed(self, readings: Sequence[Reading], hidden: Sequence[Tensor]) -> None:
        for reading, hidden_NH in zip(readings, hidden, strict=True):
            told = self._told.get(reading.sample.request)
            if told is None:
                continue  # it ended before
            if reading.stream == TEXT_STREAM:
                told.hidden.append(hidden_NH)
            else:
                self._send_prompt(reading, told, hidden_NH)

    def finish(self, sample: Sample, num_spoken: int) -> None:
        """The answer has ended; its first `num_spoken` tokens are spoken."""
        told = self._told.get(sample.request)
        if told is not None:
            told.num_spoken = num_spoken

    def send_texts(self, samples: Iterable[Sample]) -> None:
        if self._told:
            for sample in samples:
                self.send_text(sample)

    def send_text(self, sample: Sample) -> None:
        """Sends what is known and was not sent; with the answer's end, the last of it."""
        told = self._told.get(sample.request)
        if told is None:
            return
        ended = told.num_spoken is not None
        known = told.num_spoken if told.num_spoken is not None else sample.num_output
        if self._of == "all":
            known = min(known, told.num_text_sent + sum(len(rows_KH) for rows_KH in told.hidden))
        if known == told.num_text_sent and not ended:
            return
        first = sample.request.num_prompt
        token_ids = sample.token_ids[first + told.num_text_sent : first + known]
        tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int64)}
        if told.hidden:
            tensors["hidden"] = torch.cat(told.hidden)[: len(token_ids)]
            told.hidden.clear()
        told.num_text_sent = known
        self._send(sample.request, told, TEXT_STREAM, tensors, last=ended)
        if ended:
            del self._told[sample.request]

    def _send_prompt(self, reading: Reading, told: _Told, hidden_NH: Tensor) -> None:
        request, positions_N = reading.sample.request, torch.from_numpy(reading.read.indices)
        row_bytes = hidden_NH.shape[1] * hidden_NH.element_size()
        per_chunk = max(MAX_CHUNK_BYTES // row_bytes, 1)
        starts = range(0, max(len(positions_N), 1), per_chunk)
        for start in starts:
            part = slice(start, start + per_chunk)
            tensors = {"positions": positions_N[part], "hidden": hidden_NH[part]}
            self._send(request, told, PROMPT_STREAM, tensors, last=start == starts[-1])

    def _send(
        self, request: Request, told: _Told, stream: str, tensors: dict[str, Tensor], *, last: bool
    ) -> None:
        seq = told.num_chunks[stream]
        told.num_chunks[stream] = seq + 1
        self._ready.append(Chunk(request.id, stream, seq, last, tensors))
