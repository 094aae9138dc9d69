"""Attention over the paged KV cache in Triton: mixed steps in one launch, decodes with their keys split.

Shapes: T tokens of the step, N query heads, G KV heads, D head size, P = D/2, X = N + 2G heads of D, R
sequences, S splits, H heads of a group, E parts of a projection's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lm_engine.attention.mixed import (
    LOG2_E,
    MIXED_PROGRAMS,
    MixedParts,
    MixedTile,
    attend_whole,
    choose_mixed_tile,
    choose_part_tile,
    exponents,
)
from lm_engine.attention.reference import write_kv
from lm_engine.layers.kernels import HeadShape, QKNorm
from lm_engine.model import AttentionMetadata, KVDtype, PagedKV
from lm_engine.triton.jit.attention import decode_attention
from lm_engine.triton.jit.elementwise import rope_heads
from lm_engine.triton.launch import (
    dot_precision,
    has_fp8,
    interpreted,
    launch,
    launch_options,
    next_power,
    num_multiprocessors,
)

if TYPE_CHECKING:
    from lm_engine.attention.walks import Walks

_MAX_PAIRS = 1 << 16  # sequences times KV heads of a decode step
_MAX_SPLITS = 64
_PROGRAMS = 264  # wanted of a step: about two for each multiprocessor
_FEW_PAIRS = 32  # up to here no more than those, beyond no fewer
_WIDE_PAIRS = 16  # up to here four warps a tile, beyond two
_WIDEST_PAIRS = 2  # up to here eight


class TritonAttention:
    """One step at a time on one stream: arrival counters are shared, and zero between launches."""

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        *,
        mixed_programs: int | None = MIXED_PROGRAMS,
        mixed_at_once: bool = True,
        choose_mixed: Callable[[HeadShape], MixedTile] = choose_mixed_tile,
        choose_part: Callable[[HeadShape], MixedTile] = choose_part_tile,
        choose_decode: Callable[[int, int, int], DecodeTile] | None = None,
        walks: Walks | None = None,
    ) -> None:
        """`mixed_programs`: so many share the keys of a mixed step, or about so many without `mixed_at_once`.
        None: one for each tile of queries. Tiles are chosen as measured, by `choose_mixed_tile` (whole),
        `choose_part_tile` and `choose_tile` (decodes), unless told otherwise. `walks`: takes mixed steps."""
        self._choose_mixed, self._choose_part = choose_mixed, choose_part
        self._choose_decode = choose_decode or choose_tile
        self._parts = None if mixed_programs is None else MixedParts(mixed_programs, mixed_at_once)
        self._walks = walks
        self.kv_dtypes: tuple[KVDtype, ...] = ("auto", "fp8") if has_fp8(device) else ("auto",)
        self._arrivals = torch.zeros(_MAX_PAIRS, dtype=torch.int32, device=device)

    def walk(self) -> None:
        """Mixed steps, from now on: for `choose_mixed`, which knows whether that is possible."""
        from lm_engine.attention.walks import Walks

        self._walks = Walks(num_multiprocessors(self._arrivals.device))

    @property
    def walks(self) -> bool:
        return self._walks is not None

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_heads, head_dim = q_TND.shape[1:]
        heads, q_TX = HeadShape(num_heads, kv.keys.shape[3], head_dim), q_TND.contiguous().flatten(1)
        self._plan(q_TX, heads, layer, metadata)
        write_kv(k_TGD, v_TGD, kv, layer, metadata)
        return self._attend_mixed(q_TX, heads, kv, layer, metadata).view(q_TND.shape)

    def rotate(
        self, qkv_TX: Tensor, heads: HeadShape, cos_TP: Tensor, sin_TP: Tensor, norm: QKNorm | None
    ) -> None:
        """Norm and rotation of queries and keys, in place."""
        _rope_heads(qkv_TX, heads, cos_TP, sin_TP, norm, None, 0, None)

    def rotate_and_attend(
        self,
        qkv_TX: Tensor,
        heads: HeadShape,
        cos_TP: Tensor,
        sin_TP: Tensor,
        norm: QKNorm | None,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """From the fused projection's rows to [T, N·D]. Spends `qkv_TX`; writes the cache."""
        if metadata.max_query_length == 1:
            dtype = qkv_TX.dtype
            return self.attend_decodes(qkv_TX[None], dtype, heads, cos_TP, sin_TP, norm, kv, layer, metadata)
        self._plan(qkv_TX, heads, layer, metadata)
        _rope_heads(qkv_TX, heads, cos_TP, sin_TP, norm, kv, layer, metadata)
        return self._attend_mixed(qkv_TX, heads, kv, layer, metadata)

    def _plan(self, q_TX: Tensor, heads: HeadShape, layer: int, metadata: AttentionMetadata) -> None:
        """In front of what is in front of `_attend_mixed`."""
        if self._walks is not None:
            self._walks.plan(q_TX.shape[0], heads, layer, metadata)

    def _attend_mixed(
        self, q_TX: Tensor, heads: HeadShape, kv: PagedKV, layer: int, metadata: AttentionMetadata
    ) -> Tensor:
        """The first N·D values of each row of `q_TX` are its rotated query; the cache holds all keys."""
        out_TX = q_TX.new_empty(q_TX.shape[0], heads.num_heads * heads.head_dim)
        part, parts = self._choose_part(heads), self._parts
        if self._walks is not None:
            self._walks.attend(q_TX, out_TX, heads, kv, layer, metadata)
        # A window is short: its keys are not split, whose plan would be another one than the other layers'.
        elif parts and kv.window(layer) is None and parts.takes(q_TX.shape[0], heads, part, metadata):
            parts.attend(q_TX, out_TX, heads, part, kv, layer, metadata)
        else:
            attend_whole(q_TX, out_TX, heads, self._choose_mixed(heads), kv, layer, metadata)
        return out_TX

    def attend_decodes(
        self,
        qkv_ERX: Tensor,
        dtype: torch.dtype,
        heads: HeadShape,
        cos_RP: Tensor,
        sin_RP: Tensor,
        norm: QKNorm | None,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`rotate_and_attend` for a query of each sequence, whose row is the sum of E parts, rounded to
        `dtype`."""
        num_parts, num_rows, _ = qkv_ERX.shape
        num_groups, head_dim = heads.num_kv_heads, heads.head_dim
        assert qkv_ERX.shape[2] == heads.width
        assert qkv_ERX.is_contiguous()
        assert cos_RP.shape == sin_RP.shape == (num_rows, head_dim // 2)
        assert cos_RP.is_contiguous()
        assert sin_RP.is_contiguous()
        assert num_rows * num_groups <= _MAX_PAIRS
        per_group = heads.num_heads // num_groups
        part_h = next_power(per_group)
        window, longest = kv.window(layer) or 0, metadata.max_sequence_length
        longest = min(longest, window) if window else longest
        tile = self._choose_decode(num_rows * num_groups, longest, head_dim)
        num_splits = tile.splits
        parts = (num_rows, num_groups, num_splits, part_h)
        sums = torch.empty(*parts, head_dim, dtype=torch.float32, device=qkv_ERX.device)
        stats = torch.empty(*parts, 2, dtype=torch.float32, device=qkv_ERX.device)
        out_RX = qkv_ERX.new_empty(num_rows, heads.num_heads * head_dim, dtype=dtype)
        launch(
            decode_attention,
            (num_rows, num_groups, num_splits),
            qkv_ERX,
            cos_RP,
            sin_RP,
            None if norm is None else norm.query_weight_D,
            None if norm is None else norm.key_weight_D,
            kv.keys[layer],
            kv.values[layer],
            *exponents(kv, layer),
            metadata.block_tables,
            metadata.sequence_lengths,
            metadata.slot_mapping,
            sums,
            stats,
            self._arrivals,
            out_RX,
            metadata.block_tables.stride(0),
            0.0 if norm is None else norm.eps,
            head_dim**-0.5 * LOG2_E,
            H=per_group,
            BLOCK_H=max(part_h, 16),
            PART_H=part_h,
            G=num_groups,
            D=head_dim,
            BLOCK_D=max(next_power(head_dim), 16),
            BLOCK_P=max(next_power(head_dim // 2), 16),
            BLOCK_L=tile.keys,
            BLOCK_SIZE=kv.block_size,
            NUM_SPLITS=num_splits,
            CHUNK_S=max(1, 64 // (part_h * max(head_dim // 128, 1))),
            PARTS=num_parts,
            NORM=norm is not None,
            QUANTISED=kv.is_quantised,
            WINDOW=window,
            PRECISION=dot_precision(dtype),
            num_warps=tile.num_warps,
            num_stages=2,
            **launch_options(qkv_ERX.device),
        )
        return out_RX


@dataclass(frozen=True)
class DecodeTile:
    """`splits` is the most parts of a sequence's keys; those that it is too short for end at once."""

    keys: int
    splits: int
    num_warps: int


def choose_tile(num_pairs: int, max_length: int, head_dim: int) -> DecodeTile:
    """As measured on an H200 in whole layers. Few warps, unless most multiprocessors have no tile: its work
    is small, and warps wait for each other.

    Tiles stay below 48 KB of shared memory: Triton gives a kernel that wants more all there is, at the cost
    of the cache through which the linears of few rows read. With one row those take half as long again.
    """
    wanted = next_power(max(1, -(-_PROGRAMS // num_pairs)))
    if num_pairs <= _FEW_PAIRS and wanted * num_pairs > _PROGRAMS:
        wanted //= 2
    if wanted == 1:
        tile = DecodeTile(128, 1, 8)
    else:
        warps = 8 if num_pairs <= _WIDEST_PAIRS else 4 if num_pairs <= _WIDE_PAIRS else 2
        tile = DecodeTile(64, wanted, warps)
    keys = tile.keys // 2 if head_dim > 128 else tile.keys
    if interpreted():
        keys = 32
    longest = -(-max_length // keys)
    return replace(tile, keys=keys, splits=min(tile.splits, next_power(longest), _MAX_SPLITS))


def _rope_heads(
    qkv_TX: Tensor,
    heads: HeadShape,
    cos_TP: Tensor,
    sin_TP: Tensor,
    norm: QKNorm | None,
    kv: PagedKV | None,
    layer: int,
    metadata: AttentionMetadata | None,
) -> None:
    """With a cache: keys and values are written there too."""
    num_tokens, half = qkv_TX.shape[0], heads.head_dim // 2
    assert qkv_TX.is_contiguous()
    assert qkv_TX.shape == (num_tokens, heads.width)
    assert cos_TP.shape == sin_TP.shape == (num_tokens, half)
    assert cos_TP.is_contiguous()
    assert sin_TP.is_contiguous()
    assert (kv is None) == (metadata is None)
    launch(
        rope_heads,
        (num_tokens,),
        qkv_TX,
        cos_TP,
        sin_TP,
        None if norm is None else norm.query_weight_D,
        None if norm is None else norm.key_weight_D,
        None if kv is None else kv.keys[layer],
        None if kv is None else kv.values[layer],
        *exponents(kv, layer),
        None if metadata is None else metadata.slot_mapping,
        0.0 if norm is None else norm.eps,
        N=heads.num_heads,
        G=heads.num_kv_heads,
        D=heads.head_dim,
        BLOCK_X=next_power(heads.num_heads + 2 * heads.num_kv_heads),
        BLOCK_P=next_power(half),
        NORM=norm is not None,
        WRITE=kv is not None,
        QUANTISED=kv is not None and kv.is_quantised,
        **launch_options(qkv_TX.device),
    )
