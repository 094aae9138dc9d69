"""Budgets of one step, how far they let a sequence compute, and the measured rate behind Retry-After."""

from __future__ import annotations

from dataclasses import dataclass, field

from lm_engine.config import EngineConfig
from lm_engine.plan import Admission, SequenceStep, SpanPiece
from lm_engine.sequence import Request, Sequence

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(slots=True)
class StepDraft:
    """A plan in the making. A row may be taken back while the step is being planned."""

    tokens_left: int
    visual_left: int  # below zero only after an atomic span that is larger than the whole budget
    rows: dict[Sequence, SequenceStep] = field(default_factory=dict)
    pieces: dict[Sequence, list[SpanPiece]] = field(default_factory=dict)
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: dict[Sequence, None] = field(default_factory=dict)  # admitted onto blocks of earlier steps
    preempted: bool = False
    withheld: int = 0  # of the step's tokens
    kept: int = 0  # ... for waiting prompts that fit into them whole

    def withhold(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self.tokens_left, "more than the step has left"
        self.tokens_left -= num_tokens
        self.withheld += num_tokens

    def keep_for_short(self, num_tokens: int) -> None:
        """From what is planned next, until `offer_kept`."""
        self.withhold(num_tokens)
        self.kept = num_tokens

    def offer_kept(self) -> None:
        self.tokens_left += self.kept
        self.withheld -= self.kept

    def has_only_kept(self) -> bool:
        return self.tokens_left <= self.kept

    def put(self, seq: Sequence, row: SequenceStep) -> None:
        assert row.num_tokens >= 1, f"{seq.request.id} is scheduled for nothing"
        assert seq not in self.rows, f"{seq.request.id} is scheduled twice"
        self.rows[seq] = row
        self.tokens_left -= row.num_tokens
        assert self.tokens_left >= 0, "max_step_tokens is exceeded"
        media = seq.request.media
        if row.start < media.end:
            end = row.start + row.num_tokens
            self.visual_left -= media.num_visual(row.start, end)
            self.pieces[seq] = _pieces(seq.request, row, end)

    def take_back(self, seq: Sequence) -> SequenceStep | None:
        row = self.rows.pop(seq, None)
        if row is not None:
            self.tokens_left += row.num_tokens
            self.visual_left += seq.request.media.num_visual(row.start, row.start + row.num_tokens)
            self.pieces.pop(seq, None)
        return row


def _pieces(request: Request, row: SequenceStep, end: int) -> list[SpanPiece]:
    pieces = []
    for run in request.media.runs_in(row.start, end):
        embeddings = request.claims[run.item_index]
        assert embeddings is not None, f"{request.id} is scheduled over item {run.item_index} without rows"
        pieces.append(SpanPiece(row.slot, run.start, run.length, embeddings, run.row))
    return pieces


def chunk_end(seq: Sequence, start: int, draft: StepDraft, config: EngineConfig) -> int:
    """How far this step may compute the sequence from `start`; `start` itself when it may not at all.

    Ends at the sequence's last token, the token budgets, a span whose embeddings are missing, or where the
    visual budget runs out.
    """
    request = seq.request
    end = min(seq.total, start + min(draft.tokens_left, config.long_prefill_cap))
    if start >= request.media.end:
        return end
    visual_left = draft.visual_left
    for span in request.media.spans_in(start, end):
        begin = max(start, span.offset)
        if request.claims.get(span.item_index) is None:
            return begin
        if config.atomic_spans:
            assert begin == span.offset, "a span that must not be split was split"
            if span.end > end and begin == start and span.length <= draft.tokens_left:
                end = span.end  # a span longer than long_prefill_cap goes alone
            unused = visual_left == config.max_step_visual_tokens
            if span.end > end or not (span.length <= visual_left or unused):
                return begin
        elif min(end, span.end) - begin > visual_left:
            return begin + max(visual_left, 0)
        visual_left -= min(end, span.end) - begin
    return end


class RateMeter:
    """Tokens computed per second of the time that steps ran: an exponential mean over about 32 steps."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def record(self, num_tokens: int, duration_s: float) -> None:
        decay = 1 - 1 / 32
        self._tokens = self._tokens * decay + num_tokens
        self._seconds = self._seconds * decay + duration_s

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    def retry_after_s(self, tokens_ahead: int) -> float:
        """When the work ahead will have been computed, within sane bounds."""
        rate = self.tokens_per_s
        if not rate:
            return MIN_RETRY_S
        return min(max(tokens_ahead / rate, MIN_RETRY_S), MAX_RETRY_S)
