"""Decode steps that are queued to a thread of the C library: between two of them no interpreter is asked.

Shapes: R rows of the step, V vocabulary, H hidden, N positions, P = D/2 rotated pairs.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.errors import EngineError
from lm_engine.decoder import Decoder
from lm_engine.layers.rope import position_axes
from lm_engine.model import AttentionBackend, DecoderModel, PagedKV
from lm_engine.native.fused import PassDescriber, runs_in_one_call
from lm_engine.native.kernels import NativeKernels
from lm_engine.native.library import CDecode, CRequestTable, check, dtype_code
from lm_engine.native.linear import NativeLinear
from lm_engine.plan import SequenceStep, StepPlan
from lm_engine.request_table import RequestTable
from lm_engine.sampler import Adjustments, Sampled

MAX_PENDING = 4  # steps; fewer than QUEUE_LENGTH in decode.c
MAX_TURNS = 32768  # positions whose turns are kept; later ones are computed by the decoder


def make_decodes(
    model: DecoderModel, attention: AttentionBackend, kv: PagedKV, table: RequestTable
) -> NativeDecodes | None:
    """None where a step is not all the C library's: other kernels, sparse layers, several ranks, hidden
    states to keep."""
    if not isinstance(model, Decoder) or not isinstance(model.kernels, NativeKernels):
        return None
    if attention is not model.kernels.attention or model.config.kept_hidden_layer is not None:
        return None
    assert model.embedding_VH.is_contiguous()
    if not isinstance(model.head, NativeLinear) or not runs_in_one_call(model.layers):
        return None
    return NativeDecodes(model, model.kernels, model.head, kv, table)


class QueuedDecode:
    """A step under way. Everything that C reads or writes is kept alive here."""

    def __init__(self, library: ctypes.CDLL, queue: int, call: CDecode, kept: Sequence[object]) -> None:
        self._library, self._queue = library, queue
        self._call, self._kept = call, kept
        self._number: int = library.queue_submit(queue, ctypes.addressof(call))

    def wait(self) -> None:
        self._library.queue_wait(self._queue, self._number)

    def synchronize(self) -> None:
        """Its results are there. Raises EngineError when it failed."""
        self.wait()
        check(self._call.status)


@dataclass(frozen=True)
class _Buffers:
    """Working memory of steps of up to `num_rows`, which share it, one after the other; and what C is told
    of every such step."""

    num_rows: int
    tensors: tuple[Tensor, ...]
    template: CDecode


class NativeDecodes:
    """Borrows model, cache and table; their memory must stay where it is. While steps are queued, nobody but
    they may write to the cache, or to the table's rows that they compute. All but `close` come from one
    thread."""

    def __init__(
        self, model: Decoder, kernels: NativeKernels, head: NativeLinear, kv: PagedKV, table: RequestTable
    ) -> None:
        self._model, self._head, self._kv, self._table = model, head, kv, table
        self._library = kernels.library
        self._describer = PassDescriber(model.layers, model.heads, model.config.rms_norm_eps)
        self._cos_NP, self._sin_NP = _turn_tables(model, min(table.max_length, MAX_TURNS))
        axes = position_axes(model.config.rope) or [0] * self._cos_NP.shape[1]
        self._axis_P = torch.tensor(axes, dtype=torch.int32)
        self._buffers: _Buffers | None = None
        self._pending: deque[QueuedDecode] = deque()
        self._queue: int | None = None

    def takes(self, plan: StepPlan) -> bool:
        """Whether the plan is nothing but decodes, drawn greedily, at positions whose turns are known."""
        if plan.admissions or plan.block_copies or plan.span_pieces or not plan.sequences:
            return False
        if plan.hidden_reads or plan.alignment_reads:
            return False
        return all(map(self._takes_row, plan.sequences))

    def _takes_row(self, step: SequenceStep) -> bool:
        row, num_turns = self._table.rows[step.slot], len(self._cos_NP)
        if not (step.samples and step.num_tokens == 1 and len(step.new_block_ids) <= 1):
            return False
        return row.draws_greedily and max(step.start, row.last_position) < num_turns

    def submit(self, packed_4R: np.ndarray, adjustments: Adjustments | None) -> tuple[Sampled, QueuedDecode]:
        """Runs the step of `RequestTable.pack_decodes` when its turn has come: until then the table need not
        know its tokens. What is drawn is there once the step is done."""
        if self._queue is None:
            self._queue = self._library.queue_open()
            if not self._queue:
                raise EngineError("native kernels: no thread for decode steps")
        num_rows = packed_4R.shape[1]
        buffers = self._room_for(num_rows)
        token_R = torch.empty(num_rows, dtype=torch.int64)
        valid_R = torch.empty(num_rows, dtype=torch.bool)
        call = CDecode.from_buffer_copy(buffers.template)
        call.layers_pass.rows = num_rows
        call.packed = packed_4R.ctypes.data
        call.drawn, call.valid = token_R.data_ptr(), valid_R.data_ptr()
        call.threads = torch.get_num_threads()
        if adjustments is not None:
            call.num_adjustments = len(adjustments.rows)
            call.adjusted_rows = adjustments.rows.data_ptr()
            call.adjusted_tokens = adjustments.tokens.data_ptr()
            call.adjustments = adjustments.values.data_ptr()
        kept = (packed_4R, adjustments, token_R, valid_R, buffers)
        step = QueuedDecode(self._library, self._queue, call, kept)
        self._pending.append(step)
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft().wait()
        return Sampled(token_R, valid_R, None), step

    def settle(self) -> None:
        """Waits until nothing is queued."""
        while self._pending:
            self._pending.popleft().wait()

    def close(self) -> None:
        """Runs what is queued, then ends the thread. Nobody else uses this any more."""
        self.settle()
        if self._queue is not None:
            self._library.queue_close(self._queue)
        self._queue = None

    def _room_for(self, num_rows: int) -> _Buffers:
        """Larger buffers when they are too small: steps that are queued keep theirs."""
        if self._buffers is None or self._buffers.num_rows < num_rows:
            self._buffers = self._allocate(num_rows)
        return self._buffers

    def _allocate(self, num_rows: int) -> _Buffers:
        model = self._model
        residual_RH = torch.empty(num_rows, model.config.hidden_size)
        logits_RV = torch.empty(num_rows, self._head.out_features)
        workspace = self._describer.workspace(num_rows)
        template = CDecode(
            self._describer.describe(self._kv, 0, num_rows, workspace),
            _describe_table(self._table),
            cos=self._cos_NP.data_ptr(),
            sin=self._sin_NP.data_ptr(),
            axes=self._axis_P.data_ptr(),
            embedding=model.embedding_VH.data_ptr(),
            final_norm=model.norm_H.data_ptr(),
            head=self._head.address,
            logits=logits_RV.data_ptr(),
            embedding_dtype=dtype_code(model.embedding_VH),
        )
        template.layers_pass.residual = residual_RH.data_ptr()
        return _Buffers(num_rows, (residual_RH, logits_RV, workspace), template)


def _turn_tables(model: Decoder, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of whole positions, the same on every axis: to the bit what the decoder computes."""
    position_N = torch.arange(num_positions, dtype=torch.float32)
    return model.turns(position_N.expand(model.config.num_position_axes, -1))


def _describe_table(table: RequestTable) -> CRequestTable:
    tensors = (table.token_ids, table.block_tables, table.positions, table.position_delta, table.num_prompt)
    assert all(tensor.is_contiguous() for tensor in tensors)
    return CRequestTable(
        *(tensor.data_ptr() for tensor in tensors),
        None if table.gated_from is None else table.gated_from.data_ptr(),
        slots=table.max_sequences,
        tokens_stride=table.token_ids.shape[1],
        blocks_stride=table.block_tables.shape[1],
        positions_stride=table.positions.shape[2],
    )
