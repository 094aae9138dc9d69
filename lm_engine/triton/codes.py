"""Draws a talker's codes on the device alone, as `row_sampler` and `sampler` do.

Shapes: R rows, V codes of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.request_table import RequestTable
from lm_engine.sampler import MIN_TEMPERATURE
from lm_engine.triton.jit.codes import draw_codes
from lm_engine.triton.launch import interpreted, launch, launch_options, next_power

MAX_CODES = 8192  # a program holds all of a row's logits
_HISTORY_BLOCK = 512


@dataclass(frozen=True)
class CodeBuffers:
    """Memory of one batch size that outlives the step, so that a graph may name it."""

    packed_4R: Tensor  # int32: slot (-1: padding) and sequence index before the one to draw; two rows unused
    valid_R: Tensor  # int32: whether all logits of the frame so far were finite
    counts_RV: Tensor  # int64, scratch

    @classmethod
    def allocate(cls, packed_4R: Tensor, num_codes: int) -> CodeBuffers:
        num_rows, device = packed_4R.shape[1], packed_4R.device
        return cls(
            packed_4R=packed_4R,
            valid_R=torch.zeros(num_rows, dtype=torch.int32, device=device),
            counts_RV=torch.zeros(num_rows, next_power(num_codes), dtype=torch.int64, device=device),
        )


def draw_first(logits_RV: Tensor, suppressed_V: Tensor, buffers: CodeBuffers, table: RequestTable) -> Tensor:
    """Codes int64 [R] by each request's own sampling; writes them to the table, and `valid_R`."""
    return _launch(logits_RV, suppressed_V, buffers, table, None, 0)


def draw_residual(
    logits_RV: Tensor, buffers: CodeBuffers, table: RequestTable, sampling: SamplingParams, seed: int
) -> Tensor:
    """Codes int64 [R] by `sampling`, or greedily for requests that are greedy; adds to `valid_R`. `seed` is
    added to the request's."""
    return _launch(logits_RV, None, buffers, table, sampling, seed)


def _launch(
    logits_RV: Tensor,
    suppressed_V: Tensor | None,
    buffers: CodeBuffers,
    table: RequestTable,
    fixed: SamplingParams | None,
    seed: int,
) -> Tensor:
    num_rows, num_codes = logits_RV.shape
    assert logits_RV.dtype == torch.float32
    assert logits_RV.is_contiguous()
    assert num_codes <= MAX_CODES
    assert num_rows == buffers.packed_4R.shape[1]
    codes_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    sampling = fixed or SamplingParams()
    launch(
        draw_codes,
        (num_rows,),
        logits_RV,
        suppressed_V,
        buffers.packed_4R,
        table.floats,
        table.top_k,
        table.seed,
        table.num_prompt,
        table.token_ids,
        buffers.counts_RV,
        codes_R,
        buffers.valid_R,
        num_rows,
        table.floats.stride(0),
        table.token_ids.stride(0),
        float(sampling.temperature),
        float(sampling.top_p),
        float(sampling.min_p),
        float(sampling.top_k),
        seed,
        MIN_TEMPERATURE,
        V=num_codes,
        BLOCK_V=next_power(num_codes),
        BLOCK_L=16 if interpreted() else _HISTORY_BLOCK,
        FIRST=fixed is None,
        num_warps=4 if num_codes <= 2048 else 8,
        **launch_options(logits_RV.device),
    )
    return codes_R
