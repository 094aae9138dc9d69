"""CUDA graphs of whole frames: from a row of input and the last frame to all codes of the next.

Shapes: R rows of a batch, W width of an input row, H hidden of the talker, Q code groups.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.graphs import compile_ahead, stand_in
from lm_engine.layers.mlp import has_grouped_product
from lm_engine.model import AttentionBackend, AttentionMetadata, PagedKV
from lm_engine.passes import TOKEN_SIZES, CapturedPasses, CudaRecorder, MixedPasses, Record, Replay
from lm_engine.random import signed_seed
from lm_engine.request_table import RequestTable
from lm_engine.talker.model import TalkerModel

if TYPE_CHECKING:
    from lm_engine.triton.codes import CodeBuffers
    from lm_engine.triton.step import DecodeBuffers

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
MAX_PROMPT_ROWS = 512  # of a step by graphs; beyond, launching takes less time than computing
PROMPT_ROWS = tuple(size for size in TOKEN_SIZES if size <= MAX_PROMPT_ROWS)
GROUP_SEED = 0x2545F4914F6CDD1D  # odd: groups of one frame draw from different streams


class FrameGraphs(Protocol):
    """Called from one thread, on one stream. What they draw is valid, as int64 [R, Q + 1]: the codes, which
    are in table and frames then, and whether their logits were finite."""

    def frames(self, packed_4R: np.ndarray, rows_RW: Tensor) -> Tensor:
        """The step of `RequestTable.pack_decodes`, each sequence's last frame fed back."""
        ...

    def draws(self, packed_4R: np.ndarray, hidden_RH: Tensor) -> Tensor:
        """The end of such a step alone, given the hidden states."""
        ...

    def compile_all(self) -> None:
        """Compiles what `capture_all` will need, on several threads."""
        ...

    def capture_all(self) -> int: ...

    def capture_next(self) -> bool:
        """As of the LM's graphs."""
        ...


def draws_in_graphs(sampling: SamplingParams) -> bool:
    """Whether the graphs' sampler does all that is asked for."""
    return not (sampling.logit_bias or sampling.min_tokens or sampling.logprobs is not None)


def make_frame_graphs(
    model: TalkerModel, kv: PagedKV, table: RequestTable, last_frame: Tensor, suppressed_V: Tensor
) -> FrameGraphs | None:
    """None where frames cannot be captured."""
    if model.device.type != "cuda" or model.attention.name != "triton":
        return None
    if model.config.decoder.moe is not None and not has_grouped_product(model.device, model.dtype):
        return None
    return CapturedFrames(model, kv, table, last_frame, suppressed_V)


class PromptModel:
    """A talker as `MixedPasses` see it: its input rows are there already."""

    def __init__(self, model: TalkerModel) -> None:
        self.config = model.config.decoder
        self._model = model

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Rows that stand for any."""
        return self._model.closing_rows()[:1].expand(len(token_ids_T), -1)

    def forward(
        self,
        hidden_TH: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
    ) -> Tensor:
        return self._model.forward(hidden_TH, positions_AT, kv, attention, metadata)


def make_prompt_passes(model: TalkerModel, kv: PagedKV, table: RequestTable) -> MixedPasses:
    """Graphs of prompts' rows, where there are graphs of frames."""
    return CapturedPasses(PromptModel(model), model.attention, kv, table, max_tokens=MAX_PROMPT_ROWS)


@dataclass(frozen=True)
class _Buffers:
    decode: DecodeBuffers
    codes: CodeBuffers
    rows_RW: Tensor
    hidden_RH: Tensor


@dataclass(frozen=True)
class _Captured:
    buffers: _Buffers
    frames: tuple[Replay, Tensor]
    draws: tuple[Replay, Tensor]


class CapturedFrames:
    """Borrows model, cache, table and `last_frame` [slots + 1, Q], whose last row is scratch for padding
    rows;
    their memory must stay where it is. A step of more rows than the largest batch goes in several."""

    def __init__(
        self,
        model: TalkerModel,
        kv: PagedKV,
        table: RequestTable,
        last_frame: Tensor,
        suppressed_V: Tensor,
        record: Record | None = None,
    ) -> None:
        assert last_frame.shape[0] == table.max_sequences + 1
        self._model, self._kv, self._table = model, kv, table
        self._last_frame, self._suppressed_V = last_frame, suppressed_V
        self._record = record or CudaRecorder(table.device)
        self._sizes = [size for size in BATCH_SIZES if size < table.max_sequences]
        self._sizes.append(min(table.max_sequences, BATCH_SIZES[-1]))
        self._captured: dict[int, _Captured] = {}

    def frames(self, packed_4R: np.ndarray, rows_RW: Tensor) -> Tensor:
        num_rows = packed_4R.shape[1]
        assert rows_RW.shape[0] == num_rows
        drawn = []
        for part in self._parts(num_rows):
            captured = self._write(packed_4R[:, part])
            replay, drawn_RX = captured.frames
            size = part.stop - part.start
            captured.buffers.rows_RW[:size].copy_(rows_RW[part])
            replay()
            drawn.append(drawn_RX[:size].clone())
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def draws(self, packed_4R: np.ndarray, hidden_RH: Tensor) -> Tensor:
        drawn = []
        for part in self._parts(packed_4R.shape[1]):
            captured = self._write(packed_4R[:, part])
            replay, drawn_RX = captured.draws
            size = part.stop - part.start
            captured.buffers.hidden_RH[:size].copy_(hidden_RH[part])
            replay()
            drawn.append(drawn_RX[:size].clone())
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def compile_all(self) -> None:
        compile_ahead(self.run_once, self.missing(), self._table.device)

    def capture_all(self) -> int:
        for size in self.missing():
            self._capture(size)
        return 2 * len(self._captured)

    def capture_next(self) -> bool:
        missing = self.missing()
        for size in missing[:1]:
            self._capture(size)
        return bool(missing)

    def missing(self) -> list[int]:
        """Batches that are not captured yet, the largest first."""
        return sorted(set(self._sizes) - self._captured.keys(), reverse=True)

    @torch.inference_mode()
    def run_once(self, size: int) -> None:
        """A frame of padding alone, on the current stream."""
        self._run_frames(self._allocate(size))

    def _parts(self, num_rows: int) -> list[slice]:
        largest = self._sizes[-1]
        return [slice(i, min(i + largest, num_rows)) for i in range(0, num_rows, largest)]

    def _write(self, packed_4R: np.ndarray) -> _Captured:
        num_rows = packed_4R.shape[1]
        size = stand_in(next(size for size in self._sizes if size >= num_rows), self._captured)
        captured = self._captured.get(size) or self._capture(size)
        padded_4B = np.zeros((4, size), dtype=np.int32)
        padded_4B[0] = -1
        padded_4B[:, :num_rows] = packed_4R
        captured.buffers.decode.packed_4R.copy_(self._table.to_device(padded_4B))
        return captured

    def _allocate(self, size: int) -> _Buffers:
        from lm_engine.triton.codes import CodeBuffers
        from lm_engine.triton.step import DecodeBuffers

        decode, config = DecodeBuffers.allocate(size, self._table), self._model.config.decoder
        row_1W = self._model.closing_rows()[:1]
        return _Buffers(
            decode,
            CodeBuffers.allocate(decode.packed_4R, config.vocab_size),
            row_1W.new_zeros(size, row_1W.shape[1]),
            row_1W.new_zeros(size, config.hidden_size),
        )

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        buffers = self._allocate(size)
        frames = self._record(lambda: self._run_frames(buffers))
        draws = self._record(lambda: self._run_draws(buffers))
        captured = self._captured[size] = _Captured(buffers, frames, draws)
        logger.info("captured the frame of %d sequences", size)
        return captured

    def _run_frames(self, buffers: _Buffers) -> Tensor:
        from lm_engine.triton.step import prepare_inputs

        model, decode = self._model, buffers.decode
        prepare_inputs(decode, self._table)
        slots_R = self._slots(buffers)
        rows_RW = buffers.rows_RW + model.frame_rows(self._last_frame[slots_R])
        hidden_RH = model.forward(rows_RW, decode.positions_AR, self._kv, model.attention, decode.metadata)
        return self._finish(buffers, hidden_RH, slots_R)

    def _run_draws(self, buffers: _Buffers) -> Tensor:
        return self._finish(buffers, buffers.hidden_RH, self._slots(buffers))

    def _slots(self, buffers: _Buffers) -> Tensor:
        slots_R = buffers.decode.packed_4R[0]
        return torch.where(slots_R < 0, self._table.max_sequences, slots_R).long()

    def _finish(self, buffers: _Buffers, hidden_RH: Tensor, slots_R: Tensor) -> Tensor:
        from lm_engine.triton.codes import draw_first, draw_residual

        model, table, codes = self._model, self._table, buffers.codes

        def draw(logits_RV: Tensor, group: int) -> Tensor:
            seed = signed_seed(group * GROUP_SEED)
            return draw_residual(logits_RV, codes, table, model.config.residual, seed)

        first_R = draw_first(model.logits(hidden_RH), self._suppressed_V, codes, table)
        codes_RQ = model.complete(hidden_RH, first_R, draw)
        self._last_frame[slots_R] = codes_RQ
        return torch.cat([codes_RQ, codes.valid_R.long()[:, None]], dim=1)
