"""State of a spoken answer inside the talker's engine: what has arrived of its input, what it has drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from contracts.errors import EngineError
from contracts.messages import Speak
from lm_engine.sequence import NO_SLOT
from lm_engine.talker.model import Ints, Speller, TalkerConfig, TalkerModel, TalkerPrompt, as_written
from lm_engine.talker.plan import RowPiece
from lm_engine.transfer import moved, to_device

MakeRows = Callable[[Callable[[], Tensor]], Future[Tensor]]


@dataclass
class InputRows:
    """The rows of one sequence in order of their index: those still needed, and how far they reach."""

    segments: deque[tuple[int, RowPiece]] = field(default_factory=deque)  # first index, rows
    end: int = 0
    pad: RowPiece | None = None  # what every index from `end` on takes, once the text has ended

    def append(self, rows: Future[Tensor], length: int, start: int = 0) -> None:
        assert self.pad is None, "rows after the end"
        self.segments.append((self.end, RowPiece(rows, start, length)))
        self.end += length

    def has(self, index: int) -> bool:
        return index < self.end or self.pad is not None

    def take(self, start: int, end: int) -> list[RowPiece]:
        """The pieces of [start, end). What lies before `end` is dropped."""
        pieces = []
        while self.segments and start < end:
            first, piece = self.segments[0]
            assert first <= start, "rows are taken in order"
            upto = min(end, first + piece.length)
            if start < upto:
                pieces.append(RowPiece(piece.rows, piece.start + start - first, upto - start))
                start = upto
            if upto == first + piece.length:
                self.segments.popleft()
        if start < end:
            assert self.pad is not None, f"row {start} is not there"
            pieces += [self.pad] * (end - start)
        return pieces


@dataclass(eq=False)
class SpokenAnswer:
    """One request. Its sequence is the prompt's rows, then one row per frame.

    Computing index `i` ≥ num_rows - 1 draws frame i - num_rows + 1. `num_computed` counts indices planned or
    computed; the last frames of them are drawn by steps whose results are not known yet.
    """

    message: Speak
    prompt: TalkerPrompt
    max_frames: int
    granted: int
    spell: Speller = as_written
    final_grant: bool = False
    rows: InputRows = field(default_factory=InputRows)
    hidden: list[tuple[Ints, Tensor]] = field(default_factory=list)  # of the prompt, until all is there
    hidden_ended: bool = False
    text: list[tuple[list[int], Tensor | None]] = field(default_factory=list)  # before the prompt's rows
    text_ended: bool = False
    slot: int = NO_SLOT
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_frames: int = 0  # known
    num_chunks: int = 0  # sent
    finished: bool = False
    id: str = field(init=False)
    num_rows: int = field(init=False)  # of the prompt

    def __post_init__(self) -> None:
        self.id, self.num_rows = self.message.request_id, self.prompt.num_rows

    @property
    def num_planned(self) -> int:
        """Frames drawn, or to be drawn by steps under way."""
        return max(self.num_computed - self.num_rows + 1, 0)

    @property
    def limit(self) -> int:
        return min(self.granted, self.max_frames)

    @property
    def is_cut(self) -> bool:
        """Whether it has all the frames it may ever have."""
        return self.num_frames >= self.max_frames or (self.final_grant and self.num_frames >= self.granted)

    @property
    def decodes(self) -> bool:
        return self.num_computed >= self.num_rows

    @property
    def may_decode(self) -> bool:
        return self.num_planned < self.limit and self.rows.has(self.num_computed)

    @property
    def num_kv_tokens(self) -> int:
        """All it can come to need; the last frame is never computed upon."""
        return self.num_rows + self.max_frames - 1


def take_hidden(answer: SpokenAnswer, positions_N: Tensor, hidden_NX: Tensor, config: TalkerConfig) -> None:
    """Raises EngineError for rows of the wrong shape."""
    positions: Ints = positions_N.cpu().numpy()
    if tuple(hidden_NX.shape) != (len(positions), config.hidden_width):
        want = (len(positions), config.hidden_width)
        raise EngineError(f"the thinker's hidden states have shape {tuple(hidden_NX.shape)}, want {want}")
    if answer.hidden_ended:
        raise EngineError("the thinker sent hidden states of the prompt after their end")
    if len(positions):
        answer.hidden.append((positions, hidden_NX))


def take_text(
    answer: SpokenAnswer, token_ids: list[int], hidden_KX: Tensor | None, config: TalkerConfig, *, last: bool
) -> None:
    """Raises EngineError for tokens or rows that no thinker sends."""
    if answer.text_ended:
        raise EngineError("the thinker sent text after its end")
    if not all(0 <= token < config.text_vocab_size for token in token_ids):
        raise EngineError("the thinker sent a token outside the vocabulary")
    if config.text_hidden and token_ids:
        want = (len(token_ids), config.hidden_width)
        if hidden_KX is None or tuple(hidden_KX.shape) != want:
            found = None if hidden_KX is None else tuple(hidden_KX.shape)
            raise EngineError(f"the hidden states of the text have shape {found}, want {want}")
    if spelled := answer.spell(token_ids, last):
        assert not config.text_hidden or len(spelled) == len(token_ids), "a row is a token here"
        answer.text.append((spelled, hidden_KX if config.text_hidden else None))


class RowMaker:
    """Turns what has arrived of a request into rows, made on the runner's thread."""

    def __init__(self, model: TalkerModel, make: MakeRows) -> None:
        self._model = model
        self._make = make
        closing = make(model.closing_rows)
        self._end, self._pad = RowPiece(closing, 0, 1), RowPiece(closing, 1, 1)
        self._table: Future[Tensor] | None = None
        if model.text_table_VW is not None:
            self._table = Future()
            self._table.set_result(model.text_table_VW)

    def advance(self, answer: SpokenAnswer) -> None:
        """Makes the rows that can be made now."""
        rows = answer.rows
        if rows.end == 0 and not self._start(answer):
            return
        for token_ids, hidden_KX in answer.text:
            if self._table is None:
                rows.append(self._text(token_ids, hidden_KX), len(token_ids))
                continue
            for token in token_ids:
                rows.append(self._table, 1, token)
        answer.text.clear()
        if answer.text_ended and rows.pad is None:
            rows.append(self._end.rows, 1)  # the end row is the first of the two
            rows.pad = self._pad

    def _start(self, answer: SpokenAnswer) -> bool:
        """Makes the prompt's rows once its hidden states and the first token of text are there."""
        if not answer.hidden_ended or not answer.text:
            return False
        hidden_NX = _select(answer, self._model.config)
        token_ids, text_KX = answer.text.pop(0)
        if len(token_ids) > 1:
            rest = None if text_KX is None else text_KX[1:]
            answer.text.insert(0, (token_ids[1:], rest))
        first_1X = None if text_KX is None else text_KX[:1]
        model, prompt, first = self._model, answer.prompt, token_ids[0]
        made = self._make(
            lambda: model.prompt_rows(prompt, moved(hidden_NX, model.device), first, self._moved(first_1X))
        )
        answer.rows.append(made, prompt.num_rows)
        answer.hidden.clear()
        return True

    def _text(self, token_ids: list[int], hidden_KX: Tensor | None) -> Future[Tensor]:
        model = self._model
        ids_K = np.array(token_ids, dtype=np.int64)
        return self._make(lambda: model.text_rows(to_device(ids_K, model.device), self._moved(hidden_KX)))

    def _moved(self, hidden: Tensor | None) -> Tensor | None:
        return None if hidden is None else moved(hidden, self._model.device)


def _select(answer: SpokenAnswer, config: TalkerConfig) -> Tensor:
    """[N, X]: the rows of the positions that the prompt needs. Raises EngineError when one is missing."""
    wanted = answer.prompt.hidden_positions
    if not len(wanted):
        return torch.zeros(0, config.hidden_width)
    found = np.concatenate([positions for positions, _ in answer.hidden]) if answer.hidden else wanted[:0]
    order = np.argsort(found, kind="stable")
    at = np.searchsorted(found, wanted, sorter=order)
    if len(found) == 0 or at.max() >= len(found) or (found[order[at]] != wanted).any():
        raise EngineError("the thinker sent no hidden states of some positions that the talker needs")
    rows_NX = torch.cat([hidden_NX for _, hidden_NX in answer.hidden])
    return rows_NX[torch.from_numpy(order[at]).to(rows_NX.device)]
