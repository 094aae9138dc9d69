"""Launches of attention for steps with chunks: a program for each tile of queries, or for parts of its keys.

Shapes: T tokens of the step, N query heads, G KV heads, D head size, X = at least N heads of D, R sequences,
I items: tiles times parts of their keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lm_engine.layers.kernels import HeadShape
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.passes import MAX_SPLIT_TOKENS, SHORT_LENGTH
from lm_engine.triton.jit.mixed import attend_parts, mixed_attention
from lm_engine.triton.jit.parts import merge_parts, plan_parts
from lm_engine.triton.launch import Value, dot_precision, interpreted, launch, launch_options, next_power

LOG2_E = math.log2(math.e)
MIXED_PROGRAMS = 264  # two for each multiprocessor of an H200
_TILE_ROWS = 64  # queries times heads of a tile that walks alone: two or three on a multiprocessor
_PART_ROWS = 128  # of one whose keys are split; with as few registers as let two share a multiprocessor
_PART_REGISTERS = 128
_LEAST_BLOCKS = 4  # of keys in a part: fewer cost less than the merge
_PLANNED = 128  # sequences, items or tokens that a planning program looks at together
_MERGED_VALUES = 8192  # that a merging program holds


@dataclass(frozen=True)
class MixedTile:
    queries: int
    heads: int  # of a group, padded
    keys: int
    dims: int  # of a head, padded
    num_warps: int
    max_registers: int | None = None  # of a thread, for 16-bit values alone; None: as many as it asks for


def choose_mixed_tile(heads: HeadShape) -> MixedTile:
    """As measured on an H200, as is `choose_part_tile`."""
    return _tile(heads, _TILE_ROWS, None)


def choose_part_tile(heads: HeadShape) -> MixedTile:
    return _tile(heads, _PART_ROWS, _PART_REGISTERS)


def _tile(heads: HeadShape, rows: int, max_registers: int | None) -> MixedTile:
    block_h = next_power(heads.num_heads // heads.num_kv_heads)
    block_d = max(next_power(heads.head_dim), 16)
    if interpreted() or block_d > 128:
        rows = min(rows, 64)
    queries = max(rows // block_h, 1)
    num_warps = 8 if queries * block_h >= 128 else 4
    registers = max_registers if num_warps == 8 else None
    return MixedTile(queries, block_h, 64 if block_d <= 128 else 32, block_d, num_warps, registers)


def exponents(kv: PagedKV | None, layer: int) -> tuple[Tensor | None, Tensor | None]:
    if kv is None or kv.key_exponents is None or kv.value_exponents is None:
        return None, None
    return kv.key_exponents[layer], kv.value_exponents[layer]


def attend_whole(
    q_TX: Tensor,
    out_TX: Tensor,
    heads: HeadShape,
    tile: MixedTile,
    kv: PagedKV,
    layer: int,
    metadata: AttentionMetadata,
) -> None:
    """The plain path of `MixedParts`, and the only one of layers with a window: each tile of queries walks
    through all keys that it sees."""
    num_sequences = metadata.sequence_lengths.shape[0]
    if metadata.padded:
        out_TX.zero_()
    launch(
        mixed_attention,
        (q_TX.shape[0] // tile.queries + num_sequences, heads.num_kv_heads),
        q_TX,
        kv.keys[layer],
        kv.values[layer],
        *exponents(kv, layer),
        metadata.block_tables,
        metadata.query_starts,
        metadata.sequence_lengths,
        out_TX,
        num_sequences,
        metadata.block_tables.stride(0),
        q_TX.stride(0),
        heads.head_dim**-0.5 * LOG2_E,
        WINDOW=kv.window(layer) or 0,
        **_tile_options(heads, tile, kv, q_TX),
        num_stages=2,
        **launch_options(q_TX.device),
    )


@dataclass(frozen=True)
class _Plan:
    """Of one step, made by its first layer."""

    metadata: AttentionMetadata
    layer: int
    tile: MixedTile
    items_6I: Tensor
    tokens_3T: Tensor
    num_part_rows: int


class MixedParts:
    """Splits the keys of a step with few tiles of queries, as far as its lengths ask for, which the
    device alone may know: a plan is made there at the first layer, in buffers as large as any plan of so many
    tokens. One step at a time on one stream."""

    def __init__(self, num_programs: int, at_once: bool) -> None:
        """`at_once`: rather longer parts than more than `num_programs`, which then end together."""
        self._num_programs, self._at_once = num_programs, at_once
        self._plan: _Plan | None = None

    def takes(self, num_tokens: int, heads: HeadShape, tile: MixedTile, metadata: AttentionMetadata) -> bool:
        """Not where tiles are half of the programs, nor where all are so short that plan and merge cost
        more than the walk."""
        num_tiles = num_tokens // tile.queries * heads.num_kv_heads
        few = num_tiles < self._num_programs // 2 and num_tokens <= MAX_SPLIT_TOKENS
        return few and metadata.max_sequence_length > (tile.keys if interpreted() else SHORT_LENGTH)

    def attend(
        self,
        q_TX: Tensor,
        out_TX: Tensor,
        heads: HeadShape,
        tile: MixedTile,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> None:
        assert kv.window(layer) is None
        plan = self._plan_of(q_TX, heads, tile, layer, metadata)
        num_tokens, num_groups, head_dim = q_TX.shape[0], heads.num_kv_heads, heads.head_dim
        assert plan.tokens_3T.shape[1] == num_tokens
        parts = (plan.num_part_rows, num_groups, tile.heads)
        sums = torch.empty(*parts, head_dim, dtype=torch.float32, device=q_TX.device)
        stats = torch.empty(*parts, 2, dtype=torch.float32, device=q_TX.device)
        num_items = plan.items_6I.shape[1]
        launch(
            attend_parts,
            (num_items, num_groups),
            q_TX,
            kv.keys[layer],
            kv.values[layer],
            *exponents(kv, layer),
            metadata.block_tables,
            metadata.query_starts,
            metadata.sequence_lengths,
            plan.items_6I,
            sums,
            stats,
            out_TX,
            num_items,
            metadata.block_tables.stride(0),
            q_TX.stride(0),
            head_dim**-0.5 * LOG2_E,
            **_tile_options(heads, tile, kv, q_TX),
            num_stages=3 if q_TX.itemsize <= 2 else 2,
            **launch_options(q_TX.device),
        )
        launch(
            merge_parts,
            (num_tokens, num_groups),
            plan.tokens_3T,
            sums,
            stats,
            out_TX,
            num_tokens,
            H=heads.num_heads // num_groups,
            PART_H=tile.heads,
            G=num_groups,
            D=head_dim,
            BLOCK_D=tile.dims,
            BLOCK_C=max(1, min(8, _MERGED_VALUES // (tile.heads * tile.dims))),
            num_warps=4,
            **launch_options(q_TX.device),
        )

    def _plan_of(
        self, q_TX: Tensor, heads: HeadShape, tile: MixedTile, layer: int, metadata: AttentionMetadata
    ) -> _Plan:
        """A layer that is not behind the one before begins a pass, whose lengths may be new."""
        last = self._plan
        if last is None or last.metadata is not metadata or last.tile != tile or layer <= last.layer:
            plan = self._make_plan(q_TX, heads, tile, layer, metadata)
        else:
            plan = _Plan(metadata, layer, tile, last.items_6I, last.tokens_3T, last.num_part_rows)
        self._plan = plan
        return plan

    def _make_plan(
        self, q_TX: Tensor, heads: HeadShape, tile: MixedTile, layer: int, metadata: AttentionMetadata
    ) -> _Plan:
        num_tokens, num_sequences = q_TX.shape[0], metadata.sequence_lengths.shape[0]
        target = max(1, self._num_programs // heads.num_kv_heads)
        num_tiles = num_tokens // tile.queries + min(num_sequences, num_tokens)
        items_6I = torch.empty(6, num_tiles + target, dtype=torch.int32, device=q_TX.device)
        tokens_3T = torch.empty(3, num_tokens, dtype=torch.int32, device=q_TX.device)
        launch(
            plan_parts,
            (num_sequences + 1,),
            metadata.query_starts,
            metadata.sequence_lengths,
            items_6I,
            tokens_3T,
            num_sequences,
            num_tokens,
            items_6I.shape[1],
            TARGET=target,
            LEAST=_least_blocks(),
            AT_ONCE=self._at_once,
            BLOCK_Q=tile.queries,
            BLOCK_L=tile.keys,
            BLOCK_R=_PLANNED,
            BLOCK_T=_PLANNED,
            num_warps=4,
            **launch_options(q_TX.device),
        )
        return _Plan(metadata, layer, tile, items_6I, tokens_3T, num_tokens + tile.queries * target)


def _least_blocks() -> int:
    return 1 if interpreted() else _LEAST_BLOCKS


def _tile_options(heads: HeadShape, tile: MixedTile, kv: PagedKV, q_TX: Tensor) -> dict[str, Value]:
    limits: dict[str, Value] = {}
    if tile.max_registers is not None and q_TX.itemsize <= 2 and not kv.is_quantised:
        limits["maxnreg"] = tile.max_registers
    return {
        "H": heads.num_heads // heads.num_kv_heads,
        "BLOCK_H": tile.heads,
        "G": heads.num_kv_heads,
        "D": heads.head_dim,
        "BLOCK_D": tile.dims,
        "BLOCK_Q": tile.queries,
        "BLOCK_L": tile.keys,
        "BLOCK_SIZE": kv.block_size,
        "QUANTISED": kv.is_quantised,
        "PRECISION": dot_precision(q_TX.dtype),
        "num_warps": tile.num_warps,
        **limits,
    }
