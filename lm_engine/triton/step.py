"""The two ends of a decode step on the device: inputs from the request table, the next token back into it.

Shapes: R rows, A position axes, M blocks of a sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lm_engine.model import AttentionMetadata
from lm_engine.request_table import RequestTable
from lm_engine.sampler import MIN_TEMPERATURE
from lm_engine.triton.jit.step import decode_inputs, draw_tokens
from lm_engine.triton.launch import launch, launch_options, next_power

VOCABULARY_BLOCK = 2048
_TABLE_BLOCK = 1024


@dataclass(frozen=True)
class DecodeBuffers:
    """Memory of one batch size that outlives the step, so that a graph may name it."""

    packed_4R: Tensor  # int32: RequestTable.pack_decodes; slot -1 = padding
    token_ids_R: Tensor
    positions_AR: Tensor
    metadata: AttentionMetadata
    results_2R: Tensor  # int32: token, and whether its logits were finite

    @classmethod
    def allocate(cls, num_rows: int, table: RequestTable, *, gated: bool = False) -> DecodeBuffers:
        """`gated`: for steps in which the table's picture adapter takes part."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=table.device)

        packed_4R = zeros(4, num_rows)
        packed_4R[0] = -1
        gate_R1 = zeros(num_rows, 1, dtype=torch.float32) if gated else None
        metadata = AttentionMetadata(
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=table.device),
            sequence_lengths=zeros(num_rows),
            block_tables=zeros(num_rows, table.block_tables.shape[1]),
            slot_mapping=zeros(num_rows, dtype=torch.int64),
            max_query_length=1,
            max_sequence_length=table.max_length,
            host_query_starts=(),  # lengths are the device's alone
            host_sequence_lengths=(),
            gate_T1=gate_R1,
        )
        return cls(
            packed_4R=packed_4R,
            token_ids_R=zeros(num_rows, dtype=torch.int64),
            positions_AR=zeros(table.positions.shape[0], num_rows, dtype=torch.float32),
            metadata=metadata,
            results_2R=zeros(2, num_rows),
        )

    @property
    def num_rows(self) -> int:
        return self.packed_4R.shape[1]


def prepare_inputs(buffers: DecodeBuffers, table: RequestTable) -> None:
    """Fills the buffers from the table at the packed rows; appends their new blocks to the table."""
    metadata = buffers.metadata
    assert metadata.block_tables.stride(0) == table.block_tables.stride(0)
    launch(
        decode_inputs,
        (buffers.num_rows,),
        buffers.packed_4R,
        table.token_ids,
        table.positions,
        table.num_prompt,
        table.position_delta,
        table.block_tables,
        buffers.token_ids_R,
        buffers.positions_AR,
        metadata.sequence_lengths,
        metadata.slot_mapping,
        metadata.block_tables,
        buffers.num_rows,
        table.token_ids.stride(0),
        table.positions.stride(1),
        table.positions.stride(0),
        table.block_tables.stride(0),
        A=table.positions.shape[0],
        BLOCK_SIZE=table.block_size,
        BLOCK_M=min(_TABLE_BLOCK, next_power(table.block_tables.shape[1])),
    )
    if metadata.gate_T1 is not None:
        slot_R, index_R = buffers.packed_4R[0].clamp(min=0), buffers.packed_4R[1]
        metadata.gate_T1.copy_(table.gate(slot_R, index_R))


def draw(logits_RV: Tensor, buffers: DecodeBuffers, table: RequestTable, arrivals_R: Tensor) -> None:
    """Greedy or plain temperature, as `sampler.sample` draws, into `results_2R` and the table. `arrivals_R`:
    zeros before and after."""
    draw_above(None, logits_RV, buffers.packed_4R, buffers.results_2R, table, arrivals_R)


def draw_above(
    floors_R: Tensor | None,
    logits_RV: Tensor,
    packed_4R: Tensor,
    results_2R: Tensor,
    table: RequestTable,
    arrivals_R: Tensor,
) -> None:
    """As `draw`, among the scaled logits at or above each row's floor. Of `packed_4R` slots and indices are
    read; whatever else it holds, they are its first 2R numbers."""
    num_rows, vocabulary = logits_RV.shape
    assert logits_RV.dtype == torch.float32
    assert logits_RV.is_contiguous()
    assert num_rows == results_2R.shape[1] <= arrivals_R.shape[0]
    num_chunks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    values = torch.empty(num_rows, num_chunks, 2, dtype=torch.float32, device=table.device)
    tokens = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=table.device)
    launch(
        draw_tokens,
        (num_rows, num_chunks),
        logits_RV,
        packed_4R,
        table.floats,
        table.seed,
        table.token_ids,
        values,
        tokens,
        arrivals_R,
        floors_R,
        results_2R,
        num_rows,
        table.floats.stride(0),
        table.token_ids.stride(0),
        MIN_TEMPERATURE,
        V=vocabulary,
        BLOCK_V=min(VOCABULARY_BLOCK, next_power(vocabulary)),
        NUM_CHUNKS=num_chunks,
        BLOCK_C=next_power(num_chunks),
        **launch_options(table.device),
    )
