"""Launches what a mixed step does with the request table: a launch and a copy each, where torch takes dozens.

Shapes: T tokens of the step, R sequences in it, S of them sampling, A position axes, M blocks of a sequence,
C chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from torch import Tensor

from lm_engine.model import AttentionMetadata
from lm_engine.plan import Admission
from lm_engine.random import signed_seed
from lm_engine.request_table import (
    FLOATS,
    NEVER,
    HostStep,
    RequestTable,
    SampledRows,
    StepInputs,
    float_params,
)
from lm_engine.table_kernels import Appended, Int32, place_rows
from lm_engine.triton.jit.table import gather_inputs, pad_inputs, place_spans, write_rows, write_tokens
from lm_engine.triton.launch import launch, next_power

if TYPE_CHECKING:
    from lm_engine.passes import PaddedInputs

_ROW_BLOCK = 1024  # tokens of a row that a program writes
_TOKEN_BLOCK = 128  # tokens of a step that a program gathers
_TABLE_BLOCK = 1024
_DRAWN_BLOCK = 128

# In words of four bytes, which `write_rows` counts.
_HEADER = np.dtype(
    [
        ("slot", np.int32),
        ("num_tokens", np.int32),
        ("num_prompt", np.int32),
        ("num_blocks", np.int32),
        ("first_column", np.int32),
        ("data", np.int32),  # where the item's data begin, in words
        ("gated_from", np.int32),
        ("position_delta", np.float32),
        ("seed", np.int64),
        ("top_k", np.int64),
        ("floats", np.float32, len(FLOATS)),
    ]
)
_HEADER_WORDS = _HEADER.itemsize // 4
_NO_FLOATS = (0.0,) * len(FLOATS)


class TritonTable:
    """`TableKernels`. Launched without programmatic dependence: what they wrote is complete when the next
    kernel starts."""

    def write(
        self,
        table: RequestTable,
        admissions: Sequence[Admission],
        tokens: Sequence[Int32],
        appended: Sequence[Appended],
    ) -> None:
        num_items = len(admissions) + len(appended)
        longest = max([*map(len, tokens), *(len(entry.block_ids) for entry in appended)])
        _launch_rows(table, _pack_rows(admissions, tokens, appended), num_items, longest)

    def gather(self, table: RequestTable, step: HostStep) -> StepInputs:
        num_rows, num_tokens = len(step.slots_R), int(step.query_starts[-1])
        num_samples, num_blocks = int(step.samples_R.sum()), step.most_blocks(table.block_size)
        chunks_C5 = _chunks(step)
        # Sections that kernels read begin at multiples of 16 bytes, as tensors of their own would.
        sampled_3S = np.zeros((3, _whole(num_samples, 2)), dtype=np.int64)
        sampled_3S[:, :num_samples] = step.slots_R[step.samples_R], step.last_rows_S, step.next_index_S
        starts_end = _whole(num_rows + 1, 4)
        words = np.zeros(_whole(starts_end + num_rows + chunks_C5.size, 4), dtype=np.int32)
        words[: num_rows + 1] = step.query_starts
        words[starts_end : starts_end + num_rows] = step.lengths_R
        words[starts_end + num_rows :][: chunks_C5.size] = chunks_C5.ravel()
        packed = table.to_device(np.concatenate([sampled_3S.ravel(), words.view(np.int64)]))
        slots_S, last_rows_S, next_index_S = packed[: sampled_3S.size].view(3, -1)[:, :num_samples].unbind(0)
        packed_words = packed[sampled_3S.size :].view(torch.int32)
        token_ids_T, slot_mapping_T = (packed.new_empty(num_tokens) for _ in range(2))
        positions_AT = table.positions.new_empty(table.positions.shape[0], num_tokens)
        block_tables_RM = table.block_tables.new_empty(num_rows, num_blocks)
        gate_T1 = None if table.gated_from is None else table.positions.new_empty(num_tokens, 1)
        launch(
            gather_inputs,
            (len(chunks_C5),),
            packed_words,
            table.token_ids,
            table.positions,
            table.num_prompt,
            table.position_delta,
            table.gated_from,
            table.block_tables,
            token_ids_T,
            positions_AT,
            slot_mapping_T,
            gate_T1,
            block_tables_RM,
            starts_end + num_rows,
            num_tokens,
            num_blocks,
            *_strides(table),
            A=table.positions.shape[0],
            BLOCK_SIZE=table.block_size,
            BLOCK_T=_TOKEN_BLOCK,
            BLOCK_M=_table_block(table),
        )
        return step.inputs(
            token_ids_T=token_ids_T,
            positions_AT=positions_AT,
            query_starts=packed_words[: num_rows + 1],
            sequence_lengths=packed_words[starts_end : starts_end + num_rows],
            block_tables=block_tables_RM,
            slot_mapping=slot_mapping_T,
            slots_S=slots_S,
            last_rows_S=last_rows_S,
            next_index_S=next_index_S,
            gate_T1=gate_T1 if step.is_gated else None,
        )

    def write_sampled(self, table: RequestTable, rows: SampledRows, token_S: Tensor) -> None:
        num_rows = token_S.shape[0]
        launch(
            write_tokens,
            (max(1, triton.cdiv(num_rows, _DRAWN_BLOCK)),),
            token_S,
            rows.slots_S,
            rows.next_index_S,
            table.token_ids,
            num_rows,
            token_S.stride(0),
            table.token_ids.stride(0),
            BLOCK_R=_DRAWN_BLOCK,
        )

    def place(
        self,
        table: RequestTable,
        pieces: Sequence[tuple[int, Tensor]],
        hidden_TH: Tensor,
        deepstack_KTH: Tensor | None,
    ) -> None:
        levels, width = 0 if deepstack_KTH is None else deepstack_KTH.shape[0], hidden_TH.shape[1]
        assert hidden_TH.is_contiguous()
        assert deepstack_KTH is None or deepstack_KTH.is_contiguous()
        if any(rows_LW.data_ptr() % 16 or rows_LW.stride(1) != 1 for _, rows_LW in pieces):
            place_rows(pieces, hidden_TH, deepstack_KTH)
            return
        packed = [
            (rows_LW.data_ptr(), rows_LW.stride(0), len(rows_LW), first, int(rows_LW.shape[1] > width))
            for first, rows_LW in pieces
        ]
        packed = packed or [(0, 0, 0, 0, 0)]
        launch(
            place_spans,
            (len(packed), max(1, *(length for _, _, length, *_ in packed))),
            table.to_device(np.array(packed, dtype=np.int64)),
            hidden_TH,
            deepstack_KTH,
            hidden_TH.shape[0],
            H=width,
            LEVELS=levels,
            BLOCK_H=next_power(width),
        )

    def rehearse(self, table: RequestTable) -> None:
        """Launches all of these for no row, so that no step waits for a kernel to be compiled or loaded."""
        _launch_rows(table, np.zeros(1, dtype=_HEADER).view(np.int32), 1, 1)
        one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        inputs = self.gather(table, HostStep(none, none, one, np.array([0, 1]), np.zeros(1, dtype=np.bool_)))
        self.write_sampled(table, inputs, inputs.token_ids_T[:0])

    def pad(
        self,
        inputs: PaddedInputs,
        hidden_TH: Tensor,
        positions_AT: Tensor,
        metadata: AttentionMetadata,
        num_tokens: int,
    ) -> None:
        """`PaddedInputs.write`."""
        num_used, width = hidden_TH.shape
        hidden_TH = hidden_TH.to(inputs.hidden_TH.dtype).contiguous()
        num_rows, num_blocks = metadata.block_tables.shape
        max_rows = inputs.lengths_R.shape[0]
        assert num_used <= num_tokens
        assert num_rows <= max_rows
        assert positions_AT.stride(1) == metadata.block_tables.stride(1) == 1
        launch(
            pad_inputs,
            (max(num_tokens, max_rows + 1),),
            hidden_TH,
            positions_AT,
            metadata.slot_mapping,
            metadata.query_starts,
            metadata.sequence_lengths,
            metadata.block_tables,
            metadata.gate_T1,
            inputs.hidden_TH,
            inputs.positions_AT,
            inputs.slots_T,
            inputs.starts_R,
            inputs.lengths_R,
            inputs.tables_RM,
            None if metadata.gate_T1 is None else inputs.gate_T1,
            num_used,
            num_tokens,
            num_rows,
            num_blocks,
            positions_AT.stride(0),
            metadata.block_tables.stride(0),
            max_rows,
            inputs.positions_AT.stride(0),
            inputs.tables_RM.stride(0),
            A=positions_AT.shape[0],
            H=width,
            BLOCK_H=next_power(width),
            BLOCK_M=min(_TABLE_BLOCK, next_power(inputs.tables_RM.shape[1])),
        )


def _launch_rows(table: RequestTable, packed: Int32, num_items: int, longest: int) -> None:
    """`longest`: the most tokens or blocks of an item."""
    launch(
        write_rows,
        (num_items, triton.cdiv(longest, _ROW_BLOCK)),
        table.to_device(packed),
        table.token_ids,
        table.positions,
        table.block_tables,
        table.num_prompt,
        table.top_k,
        table.seed,
        table.position_delta,
        table.floats,
        table.gated_from,
        *_strides(table),
        A=table.positions.shape[0],
        NUM_FLOATS=len(FLOATS),
        HEADER=_HEADER_WORDS,
        BLOCK_T=_ROW_BLOCK,
    )


def _pack_rows(
    admissions: Sequence[Admission], tokens: Sequence[Int32], appended: Sequence[Appended]
) -> Int32:
    """All headers, then the data of each: tokens, positions [A, prompt], blocks."""
    headers, data = [], []
    at = _HEADER_WORDS * (len(admissions) + len(appended))
    for admission, token_ids in zip(admissions, tokens, strict=True):
        positions = np.ascontiguousarray(admission.positions_AL, dtype=np.float32)
        headers.append(
            (
                admission.slot,
                len(token_ids),
                admission.num_prompt_tokens,
                0,
                0,
                at,
                NEVER if admission.gated_from is None else admission.gated_from,
                admission.position_delta,
                signed_seed(admission.seed),
                admission.sampling.top_k,
                float_params(admission.sampling),
            )
        )
        data += [token_ids, positions.reshape(-1).view(np.int32)]
        at += len(token_ids) + positions.size
    for slot, first_column, block_ids in appended:
        headers.append((slot, 0, 0, len(block_ids), first_column, at, *(0,) * 4, _NO_FLOATS))
        data.append(np.array(block_ids, dtype=np.int32))
        at += len(block_ids)
    return np.concatenate([np.array(headers, dtype=_HEADER).view(np.int32), *data])


def _chunks(step: HostStep) -> Int32:
    """[C, 5], as `gather_inputs` reads them."""
    num_chunks_R = -(-step.counts_R // _TOKEN_BLOCK)
    row_C = np.repeat(np.arange(len(num_chunks_R)), num_chunks_R)
    offset_C = (np.arange(len(row_C)) - (num_chunks_R.cumsum() - num_chunks_R)[row_C]) * _TOKEN_BLOCK
    chunks_C5 = np.empty((len(row_C), 5), dtype=np.int32)
    chunks_C5[:, 0] = step.slots_R[row_C]
    chunks_C5[:, 1] = step.starts_R[row_C] + offset_C
    chunks_C5[:, 2] = step.query_starts[row_C] + offset_C
    chunks_C5[:, 3] = np.minimum(step.counts_R[row_C] - offset_C, _TOKEN_BLOCK)
    chunks_C5[:, 4] = np.where(offset_C == 0, row_C, -1)
    return chunks_C5


def _strides(table: RequestTable) -> tuple[int, int, int, int]:
    positions = table.positions
    return table.token_ids.stride(0), positions.stride(1), positions.stride(0), table.block_tables.stride(0)


def _table_block(table: RequestTable) -> int:
    return min(_TABLE_BLOCK, next_power(table.block_tables.shape[1]))


def _whole(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
