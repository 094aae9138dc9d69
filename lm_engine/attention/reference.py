"""Attention over the paged KV cache in torch operations: one sequence at a time, and batched.

Shapes: T tokens of the step, N query heads, G KV heads, H = N/G heads of a group, D head size, R sequences,
Q query rows, X = H · Q, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.attention.quantised import dequantise, quantise
from lm_engine.model import AttentionMetadata, KVDtype, PagedKV
from lm_engine.transfer import to_device

MAX_PADDED_QUERIES = 16  # longest chunk whose padding is cheaper than a call of its own


def write_kv(k_TGD: Tensor, v_TGD: Tensor, kv: PagedKV, layer: int, metadata: AttentionMetadata) -> None:
    """Stores the step's keys and values at `slot_mapping`."""
    new = [k_TGD.to(kv.keys.dtype), v_TGD.to(kv.values.dtype)]
    if kv.is_quantised:
        (keys, key_exponents), (values, value_exponents) = quantise(k_TGD), quantise(v_TGD)
        new = [keys.view(torch.uint8), values.view(torch.uint8), key_exponents, value_exponents]
    for cache, written in zip(kv.layered, new, strict=True):
        cache[layer].flatten(0, 1).index_copy_(0, metadata.slot_mapping, written)


class SequenceAttention:
    """The plain path: gathers one sequence's blocks, attends, goes on to the next."""

    name = "reference"
    kv_dtypes: tuple[KVDtype, ...] = ("auto", "fp8")

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


@dataclass(frozen=True)
class _Bucket:
    """Sequences with short chunks and similar lengths, padded to the longest of each."""

    token_RQ: Tensor  # step row of each query; padding repeats the sequence's last one
    blocks: Tensor  # flat block ids, R * M
    num_keys: int
    mask_R1QL: Tensor


@dataclass(frozen=True)
class _Schedule:
    """How a step is attended; made once for all layers of a window."""

    metadata: AttentionMetadata
    long_rows: tuple[int, ...]
    buckets: tuple[_Bucket, ...]


class BatchedAttention:
    """Short chunks (decodes above all) in padded calls over many sequences, long chunks one by one.

    Remembers the schedule of the latest step, so it serves one step at a time.
    """

    name = "batched"
    kv_dtypes: tuple[KVDtype, ...] = ("auto", "fp8")

    def __init__(self) -> None:
        self._schedules: dict[int | None, _Schedule] = {}  # by window

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
        window = kv.window(layer)
        schedule = self._schedules.get(window)
        if schedule is None or schedule.metadata is not metadata:
            schedule = self._schedules[window] = _make_schedule(metadata, kv.block_size, window)
        starts = metadata.host_query_starts
        out_TND = torch.empty_like(q_TND)
        for row in schedule.long_rows:
            queries, length = slice(starts[row], starts[row + 1]), metadata.host_sequence_lengths[row]
            out_TND[queries] = _attend_one(q_TND[queries], kv, layer, metadata.block_tables[row], length)
        for bucket in schedule.buckets:
            _attend_bucket(q_TND, out_TND, kv, layer, bucket)
        return out_TND


def _attend_one(q_QND: Tensor, kv: PagedKV, layer: int, blocks_M: Tensor, length: int) -> Tensor:
    num_queries, num_heads, head_dim = q_QND.shape
    window = kv.window(layer)
    # Blocks that lie before the first query's window are not read.
    first = 0 if window is None else max(0, length - num_queries + 1 - window) // kv.block_size
    blocks = blocks_M[first : -(-length // kv.block_size)]
    length -= first * kv.block_size
    k_LGD, v_LGD = _gather(kv, layer, blocks, q_QND.dtype)
    num_groups = k_LGD.shape[1]
    per_group = num_heads // num_groups
    q_GHQD = q_QND.view(num_queries, num_groups, per_group, head_dim).permute(1, 2, 0, 3)
    shared = (num_groups, per_group, length, head_dim)  # the heads of a group share its keys, uncopied
    k_GHLD, v_GHLD = (x[:length].transpose(0, 1).unsqueeze(1).expand(shared) for x in (k_LGD, v_LGD))
    # The last query sees every key, the one before it one less.
    last_visible_Q = torch.arange(length - num_queries, length, device=q_QND.device)
    mask_QL = _visible(last_visible_Q, length, window)
    out_GHQD = functional.scaled_dot_product_attention(q_GHQD, k_GHLD, v_GHLD, attn_mask=mask_QL)
    return out_GHQD.permute(2, 0, 1, 3).reshape(q_QND.shape)


def _visible(last_visible_X: Tensor, num_keys: int, window: int | None) -> Tensor:
    """[X, num_keys]: the keys up to each query's last, of a window's length at most."""
    key_L = torch.arange(num_keys, device=last_visible_X.device)
    last_X1 = last_visible_X[..., None]
    visible_XL = key_L <= last_X1
    return visible_XL if window is None else visible_XL & (key_L > last_X1 - window)


def _gather(kv: PagedKV, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of the blocks, in order, as [blocks · S, G, D]."""
    keys, values, *exponents = (cache[layer].index_select(0, blocks).flatten(0, 1) for cache in kv.layered)
    if kv.is_quantised:
        key_exponents, value_exponents = exponents
        keys = dequantise(keys.view(torch.float8_e4m3fn), key_exponents)
        values = dequantise(values.view(torch.float8_e4m3fn), value_exponents)
    return keys.to(dtype), values.to(dtype)


def _make_schedule(metadata: AttentionMetadata, block_size: int, window: int | None) -> _Schedule:
    """Buckets hold sequences whose block counts share a power of two, so padding at most doubles the work."""
    starts = metadata.host_query_starts
    long_rows: list[int] = []
    rows_of_bucket: dict[int, list[int]] = {}
    for row, length in enumerate(metadata.host_sequence_lengths):
        if starts[row + 1] - starts[row] > MAX_PADDED_QUERIES:
            long_rows.append(row)
        else:
            exponent = (-(-length // block_size) - 1).bit_length()
            rows_of_bucket.setdefault(exponent, []).append(row)
    buckets = tuple(_make_bucket(metadata, block_size, rows, window) for rows in rows_of_bucket.values())
    return _Schedule(metadata, tuple(long_rows), buckets)


def _make_bucket(
    metadata: AttentionMetadata, block_size: int, rows: list[int], window: int | None
) -> _Bucket:
    starts, device = metadata.host_query_starts, metadata.block_tables.device
    num_queries = max(starts[row + 1] - starts[row] for row in rows)
    num_keys = max(metadata.host_sequence_lengths[row] for row in rows)
    columns = [(row, starts[row], starts[row + 1] - 1, metadata.host_sequence_lengths[row]) for row in rows]
    row_R, *bounds = to_device(np.array(columns, dtype=np.int64).T.copy(), device).unbind(0)
    first_R1, last_R1, length_R1 = (bound_R.unsqueeze(-1) for bound_R in bounds)
    token_RQ = torch.minimum(first_R1 + torch.arange(num_queries, device=device), last_R1)
    last_visible_RQ = length_R1 - 1 - (last_R1 - token_RQ)
    mask_RQL = _visible(last_visible_RQ, num_keys, window)
    blocks_RM = metadata.block_tables[row_R, : -(-num_keys // block_size)]
    return _Bucket(token_RQ, blocks_RM.flatten(), num_keys, mask_RQL.unsqueeze(1))


def _attend_bucket(q_TND: Tensor, out_TND: Tensor, kv: PagedKV, layer: int, bucket: _Bucket) -> None:
    """Writes the outputs of the bucket's tokens into `out_TND`; a token written twice gets the same value.

    The query heads of a group stand beside each other as queries, so that its keys are read once.
    """
    (num_rows, num_queries), num_keys = bucket.token_RQ.shape, bucket.num_keys
    k_FGD, v_FGD = _gather(kv, layer, bucket.blocks, q_TND.dtype)
    num_heads, head_dim = q_TND.shape[1:]
    num_groups = k_FGD.shape[1]
    per_group = num_heads // num_groups
    k_RGLD, v_RGLD = (
        x.view(num_rows, -1, num_groups, head_dim)[:, :num_keys].transpose(1, 2) for x in (k_FGD, v_FGD)
    )
    q_RQGHD = q_TND[bucket.token_RQ].view(num_rows, num_queries, num_groups, per_group, head_dim)
    q_RGXD = q_RQGHD.permute(0, 2, 3, 1, 4).reshape(num_rows, num_groups, per_group * num_queries, head_dim)
    mask_R1XL = bucket.mask_R1QL.repeat(1, 1, per_group, 1)
    out_RGXD = functional.scaled_dot_product_attention(q_RGXD, k_RGLD, v_RGLD, attn_mask=mask_R1XL)
    out_RGHQD = out_RGXD.reshape(num_rows, num_groups, per_group, num_queries, head_dim)
    out_TND[bucket.token_RQ.flatten()] = out_RGHQD.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)
