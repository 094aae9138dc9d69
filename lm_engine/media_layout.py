"""Where a prompt's media lie: which rows of which item each position takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.errors import EngineError
from contracts.media import MediaSpan, Prompt
from lm_engine.prefix_cache import Extras


@dataclass(frozen=True, slots=True)
class EmbeddingRun:
    """Positions [start, start + length) take rows [row, row + length) of an item's embeddings."""

    start: int
    length: int
    item_index: int
    row: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.length


class MediaLayout:
    """The spans of one prompt, indexed. Raises EngineError when they contradict the items or each other."""

    def __init__(self, prompt: Prompt) -> None:
        self.spans = prompt.spans
        self.num_rows = [item.num_tokens for item in prompt.items]
        self.item_end: dict[int, int] = {}  # position after the item's last span
        self.runs: list[EmbeddingRun] = []
        _check_order(prompt)
        rows = [0] * len(prompt.items)
        for span in prompt.spans:
            self.item_end[span.item_index] = span.end
            for run in _runs_of(span, rows[span.item_index]):
                self.runs.append(run)
                rows[span.item_index] += run.length
        for index in self.item_end:
            if rows[index] != self.num_rows[index]:
                raise EngineError(
                    f"item {index} has {self.num_rows[index]} embedding rows, its spans take {rows[index]}"
                )
        self.end = prompt.spans[-1].end if prompt.spans else 0
        self.first_seen = _first_seen(prompt, self.runs)
        self._span_ends = [span.end for span in self.spans]
        self._run_ends = [run.end for run in self.runs]

    def spans_in(self, start: int, end: int) -> Iterator[MediaSpan]:
        """Spans that touch [start, end), in order."""
        for index in range(bisect_right(self._span_ends, start), len(self.spans)):
            if self.spans[index].offset >= end:
                return
            yield self.spans[index]

    def span_at(self, position: int) -> MediaSpan | None:
        return next(self.spans_in(position, position + 1), None)

    def runs_in(self, start: int, end: int) -> Iterator[EmbeddingRun]:
        """The runs that touch [start, end), clipped to it."""
        for index in range(bisect_right(self._run_ends, start), len(self.runs)):
            run = self.runs[index]
            if run.start >= end:
                return
            low = max(run.start, start)
            length = min(run.end, end) - low
            yield EmbeddingRun(low, length, run.item_index, run.row + low - run.start, run.digest)

    def num_visual(self, start: int, end: int) -> int:
        """Positions of [start, end) inside spans, whether or not each takes a row."""
        return sum(min(end, span.end) - max(start, span.offset) for span in self.spans_in(start, end))

    def items_from(self, position: int) -> list[int]:
        """Items with a position at or after this one, in order of their first such span."""
        first = bisect_right(self._span_ends, position)
        return list(dict.fromkeys(span.item_index for span in self.spans[first:]))

    def extras(self, start: int, end: int) -> Extras:
        """What a block over [start, end) holds beyond its token ids (see BlockContent)."""
        if start >= self.end:
            return ()
        return tuple((run.digest, run.row, run.start - start, run.length) for run in self.runs_in(start, end))

    def block_extras(self, num_blocks: int, block_size: int) -> list[Extras]:
        """`extras` of the first blocks; those inside a run, almost all of a picture's, without a search."""
        extras: list[Extras] = [()] * num_blocks
        for run in self.runs:
            row = run.row - run.start
            for index in range(run.start // block_size, min(-(-run.end // block_size), num_blocks)):
                start, end = index * block_size, (index + 1) * block_size
                if run.start <= start and end <= run.end:
                    extras[index] = ((run.digest, row + start, 0, block_size),)
                else:
                    extras[index] = self.extras(start, end)
        return extras


def _first_seen(prompt: Prompt, runs: list[EmbeddingRun]) -> int | None:
    """Position of the first row of a picture or video; None: the prompt has neither."""
    seen = (run.start for run in runs if prompt.items[run.item_index].modality != "audio")
    return next(seen, None)


def _check_order(prompt: Prompt) -> None:
    position = 0
    for span in prompt.spans:
        if span.offset < position or span.length < 1 or span.end > len(prompt.token_ids):
            raise EngineError(f"media span at {span.offset} overlaps another or leaves the prompt")
        if not 0 <= span.item_index < len(prompt.items):
            raise EngineError(f"media span at {span.offset} names item {span.item_index}, which is missing")
        if span.embed_mask is not None and len(span.embed_mask) != span.length:
            raise EngineError(f"media span at {span.offset} has a mask of another length")
        position = span.end


def _runs_of(span: MediaSpan, row: int) -> Iterator[EmbeddingRun]:
    if span.embed_mask is None:
        yield EmbeddingRun(span.offset, span.length, span.item_index, row, span.digest)
        return
    start: int | None = None
    for index, takes_row in enumerate((*span.embed_mask, False)):
        if takes_row and start is None:
            start = index
        elif not takes_row and start is not None:
            yield EmbeddingRun(span.offset + start, index - start, span.item_index, row, span.digest)
            row += index - start
            start = None
