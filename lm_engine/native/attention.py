"""Paged attention in C: an AttentionBackend for CPU tensors.

Shapes: T tokens, N query heads, G KV heads, D head size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.native.library import MAX_HEAD_DIM, MAX_QUERIES_PER_KV_HEAD, CAttention, check, dtype_code


class NativeAttention:
    """float32 arithmetic whatever the dtypes. A query's result depends on its own keys alone: chunked
    or whole, batched or alone, it is the same to the bit."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q_TND.shape
        num_kv_heads = k_TGD.shape[1]
        assert head_dim <= MAX_HEAD_DIM
        assert num_heads % num_kv_heads == 0
        assert num_heads // num_kv_heads <= MAX_QUERIES_PER_KV_HEAD
        assert q_TND.dtype == k_TGD.dtype == v_TGD.dtype
        keys, values = kv.keys[layer], kv.values[layer]
        assert keys.shape[2:] == (num_kv_heads, head_dim)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        _check_metadata(metadata, num_tokens)
        out_TND = torch.empty(num_tokens, num_heads, head_dim, dtype=q_TND.dtype)
        q_TND, k_TGD, v_TGD = (_rows(x, head_dim) for x in (q_TND, k_TGD, v_TGD))
        call = CAttention(
            q_TND.data_ptr(),
            k_TGD.data_ptr(),
            v_TGD.data_ptr(),
            out_TND.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            metadata.query_starts.data_ptr(),
            metadata.sequence_lengths.data_ptr(),
            metadata.block_tables.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            q_TND.stride(0),
            k_TGD.stride(0),
            v_TGD.stride(0),
            metadata.block_tables.stride(0),
            num_tokens,
            metadata.sequence_lengths.shape[0],
            num_heads,
            num_kv_heads,
            head_dim,
            keys.shape[1],
            dtype_code(out_TND),
            dtype_code(keys),
            head_dim**-0.5,
        )
        check(self._attend(ctypes.addressof(call), torch.get_num_threads()))
        return out_TND


def _rows(x_THD: Tensor, head_dim: int) -> Tensor:
    """Heads side by side within a token; tokens may lie apart (views of a fused projection)."""
    return x_THD if x_THD.stride(2) == 1 and x_THD.stride(1) == head_dim else x_THD.contiguous()


def _check_metadata(metadata: AttentionMetadata, num_tokens: int) -> None:
    assert metadata.query_starts.dtype == torch.int32
    assert metadata.sequence_lengths.dtype == torch.int32
    assert metadata.block_tables.dtype == torch.int32
    assert metadata.block_tables.stride(1) == 1
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.slot_mapping.is_contiguous()
    assert metadata.slot_mapping.shape[0] == num_tokens == metadata.host_query_starts[-1]
