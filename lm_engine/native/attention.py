"""Paged attention in C: an AttentionBackend for CPU tensors.

Shapes: T tokens, N query heads, G KV heads, D head size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from lm_engine.model import AttentionMetadata, KVDtype, PagedKV
from lm_engine.native.library import MAX_HEAD_DIM, MAX_QUERIES_PER_KV_HEAD, CAttention, check, dtype_code


class NativeAttention:
    """float32 arithmetic whatever the dtypes. A query's result depends on its own keys alone: chunked or
    whole, batched or alone, it is the same to the bit. For one thread at a time, as a model is."""

    name = "native"
    kv_dtypes: tuple[KVDtype, ...] = ("auto",)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend
        self._prepared: _Prepared | None = None

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        prepared = self._prepared
        if prepared is None or prepared.metadata is not metadata or prepared.kv is not kv:
            prepared = self._prepared = _prepare(q_TND, k_TGD, v_TGD, kv, metadata)
        assert q_TND.shape == prepared.query_shape
        assert k_TGD.shape == v_TGD.shape == prepared.key_shape
        assert q_TND.dtype == k_TGD.dtype == v_TGD.dtype == prepared.dtype
        assert 0 <= layer < kv.keys.shape[0]
        head_dim = prepared.query_shape[2]
        q_TND, k_TGD, v_TGD = _rows(q_TND, head_dim), _rows(k_TGD, head_dim), _rows(v_TGD, head_dim)
        out_TND = torch.empty(prepared.query_shape, dtype=prepared.dtype)
        call, skip_bytes = prepared.call, layer * prepared.layer_bytes
        call.q, call.k, call.v = q_TND.data_ptr(), k_TGD.data_ptr(), v_TGD.data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q_TND.stride(0), k_TGD.stride(0), v_TGD.stride(0)
        call.out = out_TND.data_ptr()
        call.window = kv.window(layer) or 0
        call.keys, call.values = prepared.keys + skip_bytes, prepared.values + skip_bytes
        check(self._attend(prepared.address, torch.get_num_threads()))
        return out_TND


@dataclass(frozen=True)
class _Prepared:
    """What stays the same over the layers of a step. Holds `metadata` and `kv`: `call` points into them."""

    metadata: AttentionMetadata
    kv: PagedKV
    query_shape: torch.Size
    key_shape: torch.Size
    dtype: torch.dtype
    keys: int
    values: int
    layer_bytes: int
    call: CAttention
    address: int


def _prepare(
    q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, kv: PagedKV, metadata: AttentionMetadata
) -> _Prepared:
    num_tokens, num_heads, head_dim = q_TND.shape
    call = describe_cache(num_heads, head_dim, dtype_code(q_TND), kv)
    describe_step(call, num_tokens, metadata)
    assert k_TGD.shape[1:] == kv.keys.shape[3:]
    return _Prepared(
        metadata,
        kv,
        q_TND.shape,
        k_TGD.shape,
        q_TND.dtype,
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
        layer_bytes(kv),
        call,
        ctypes.addressof(call),
    )


def layer_bytes(kv: PagedKV) -> int:
    """From one layer's keys to the next one's."""
    return kv.keys.stride(0) * kv.keys.dtype.itemsize


def describe_cache(num_heads: int, head_dim: int, dtype: int, kv: PagedKV) -> CAttention:
    """All that stays the same over the steps, with the first layer's cache; no window. Points into `kv`: keep
    it."""
    num_kv_heads = kv.keys.shape[3]
    assert head_dim <= MAX_HEAD_DIM
    assert num_heads % num_kv_heads == 0
    assert num_heads // num_kv_heads <= MAX_QUERIES_PER_KV_HEAD
    assert kv.keys.shape == kv.values.shape
    assert kv.keys.dtype == kv.values.dtype
    assert kv.keys.shape[4] == head_dim
    assert kv.keys.is_contiguous()
    assert kv.values.is_contiguous()
    return CAttention(
        keys=kv.keys.data_ptr(),
        values=kv.values.data_ptr(),
        heads=num_heads,
        kv_heads=num_kv_heads,
        head_size=head_dim,
        block_size=kv.block_size,
        dtype=dtype,
        cache_dtype=dtype_code(kv.keys),
        scale=head_dim**-0.5,
    )


def describe_step(call: CAttention, num_tokens: int, metadata: AttentionMetadata) -> None:
    """Adds the step's sequences. Points into `metadata`: keep it."""
    _check_metadata(metadata, num_tokens)
    call.query_starts = metadata.query_starts.data_ptr()
    call.lengths = metadata.sequence_lengths.data_ptr()
    call.blocks = metadata.block_tables.data_ptr()
    call.slots = metadata.slot_mapping.data_ptr()
    call.blocks_stride = metadata.block_tables.stride(0)
    call.tokens = num_tokens
    call.sequences = metadata.sequence_lengths.shape[0]


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
