"""Attention over the paged KV cache in torch operations: one sequence at a time, and batched.

Shapes: T tokens of the step, N query heads, G KV heads, D head size, R sequences, Q query rows, L keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.model import AttentionMetadata, PagedKV

MAX_BATCHED_QUERIES = 16  # longest chunk whose padding is cheaper than a launch of its own


def write_kv(k_TGD: Tensor, v_TGD: Tensor, kv: PagedKV, layer: int, metadata: AttentionMetadata) -> None:
    """Stores the step's keys and values at `slot_mapping`."""
    kv.keys[layer].flatten(0, 1).index_copy_(0, metadata.slot_mapping, k_TGD.to(kv.keys.dtype))
    kv.values[layer].flatten(0, 1).index_copy_(0, metadata.slot_mapping, v_TGD.to(kv.values.dtype))


class SequenceAttention:
    """The plain path: gathers one sequence's blocks, attends, goes on to the next."""

    name = "reference"

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        write_kv(k_TGD, v_TGD, kv, layer, metadata)
        out_TND = torch.empty_like(q_TND)
        starts = metadata.host_query_starts
        for row, length in enumerate(metadata.host_sequence_lengths):
            queries = slice(starts[row], starts[row + 1])
            out_TND[queries] = _attend_one(q_TND[queries], kv, layer, metadata.block_tables[row], length)
        return out_TND


class BatchedAttention:
    """Short chunks (decodes above all) of all sequences in one padded call, long chunks one by one."""

    name = "batched"

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        write_kv(k_TGD, v_TGD, kv, layer, metadata)
        starts = metadata.host_query_starts
        out_TND = torch.empty_like(q_TND)
        short: list[int] = []
        for row, length in enumerate(metadata.host_sequence_lengths):
            if starts[row + 1] - starts[row] <= MAX_BATCHED_QUERIES:
                short.append(row)
                continue
            queries = slice(starts[row], starts[row + 1])
            out_TND[queries] = _attend_one(q_TND[queries], kv, layer, metadata.block_tables[row], length)
        if short:
            _attend_padded(q_TND, out_TND, kv, layer, metadata, short)
        return out_TND


def _attend_one(q_QND: Tensor, kv: PagedKV, layer: int, blocks_M: Tensor, length: int) -> Tensor:
    num_queries, num_blocks = q_QND.shape[0], -(-length // kv.block_size)
    blocks = blocks_M[:num_blocks]
    k_GLD, v_GLD = (
        cache[layer].index_select(0, blocks).flatten(0, 1)[:length].to(q_QND.dtype).transpose(0, 1)
        for cache in (kv.keys, kv.values)
    )
    # The last query sees every key, the one before it one less.
    key_L = torch.arange(length, device=q_QND.device)
    last_visible_Q = torch.arange(length - num_queries, length, device=q_QND.device)
    out_NQD = functional.scaled_dot_product_attention(
        q_QND.transpose(0, 1).unsqueeze(0),
        k_GLD.unsqueeze(0),
        v_GLD.unsqueeze(0),
        attn_mask=key_L <= last_visible_Q[:, None],
        enable_gqa=q_QND.shape[1] != k_GLD.shape[0],
    )[0]
    return out_NQD.transpose(0, 1)


def _attend_padded(
    q_TND: Tensor, out_TND: Tensor, kv: PagedKV, layer: int, metadata: AttentionMetadata, rows: list[int]
) -> None:
    """Writes the outputs of `rows` into `out_TND`. Sequences are padded to the longest of them."""
    device, starts = q_TND.device, metadata.host_query_starts
    num_queries = max(starts[row + 1] - starts[row] for row in rows)
    num_keys = max(metadata.host_sequence_lengths[row] for row in rows)
    num_blocks = -(-num_keys // kv.block_size)
    row_R = torch.tensor(rows, device=device)
    blocks_RM = metadata.block_tables[row_R, :num_blocks]
    k_RGLD, v_RGLD = (
        cache[layer][blocks_RM].flatten(1, 2)[:, :num_keys].to(q_TND.dtype).transpose(1, 2)
        for cache in (kv.keys, kv.values)
    )
    first_R, count_R = metadata.query_starts[row_R], metadata.query_starts.diff()[row_R]
    query_Q = torch.arange(num_queries, device=device)
    # Padding queries repeat the sequence's last one; it is written again with the same value.
    query_RQ = torch.minimum(query_Q, count_R[:, None] - 1)
    token_RQ = (first_R[:, None] + query_RQ).long()
    last_visible_RQ = metadata.sequence_lengths[row_R, None] - count_R[:, None] + query_RQ
    mask_RQL = torch.arange(num_keys, device=device) <= last_visible_RQ[..., None]
    out_RNQD = functional.scaled_dot_product_attention(
        q_TND[token_RQ].transpose(1, 2),
        k_RGLD,
        v_RGLD,
        attn_mask=mask_RQL[:, None],
        enable_gqa=q_TND.shape[1] != k_RGLD.shape[1],
    )
    out_TND[token_RQ.flatten()] = out_RNQD.transpose(1, 2).flatten(0, 1)
