"""Launches of attention for mixed steps on Hopper: a program for each multiprocessor, with an equal share of
all keys. To be imported where `launch.has_gluon` alone.

Shapes: as `attention/mixed.py`; W programs, F fields of an item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lm_engine.attention.mixed import LOG2_E
from lm_engine.layers.kernels import HeadShape
from lm_engine.model import AttentionMetadata, DecoderConfig, KVDtype, PagedKV
from lm_engine.triton.jit.hopper import attend_walks
from lm_engine.triton.jit.walks import CHUNK_COST, ITEM_FIELDS, merge_walks, plan_walks
from lm_engine.triton.launch import launch, launch_options, next_power

MAX_PROGRAMS = 256
_ROWS = 128  # queries times heads of a tile
_PANEL = 64  # dims that the copy engine swizzles together
_LEAST_PAGE = 8  # rows that it swizzles together
_PLANNED_TILES, _PLANNED_ROWS = 64, 64  # that a planning program looks at together


def why_not(config: DecoderConfig, dtype: torch.dtype, block_size: int, kv_dtype: KVDtype) -> str | None:
    """Why these cannot be walked. Panels of a head are whole, the sums of a tile fit into registers, pages
    make up a block of keys."""
    heads_per_group, keys = config.num_heads // config.num_kv_heads, WalkTile().keys
    if config.has_windows:
        return "they read all keys, and layers of this model have a sliding window"
    if dtype.itemsize != 2 or kv_dtype != "auto":
        return f"they read 16-bit values, not {dtype} with kv_dtype = '{kv_dtype}'"
    if config.head_dim not in (_PANEL, 2 * _PANEL):
        return f"they have heads of 64 or 128, not {config.head_dim}"
    if next_power(heads_per_group) > _ROWS // 2:
        return f"they have at most {_ROWS // 2} query heads of a key head, not {heads_per_group}"
    if block_size < _LEAST_PAGE or keys % block_size:
        return f"they read block_size 8, 16, 32 or 64, not {block_size}"
    return None


@dataclass(frozen=True)
class WalkTile:
    """As measured on an H200. `least_blocks`: of keys that a program takes."""

    keys: int = 64
    num_stages: int = 4
    least_blocks: int = 4


@dataclass(frozen=True)
class Plan:
    """Of one step, made by its first layer."""

    metadata: AttentionMetadata
    layer: int
    items_IF: Tensor
    ranges_W: Tensor
    tokens_3GT: Tensor
    num_part_rows: int


class Walks:
    """One step at a time on one stream."""

    def __init__(self, num_programs: int, tile: WalkTile | None = None) -> None:
        assert num_programs <= MAX_PROGRAMS
        self._num_programs, self._tile = num_programs, tile or WalkTile()
        self._plan: Plan | None = None

    def plan(self, num_tokens: int, heads: HeadShape, layer: int, metadata: AttentionMetadata) -> Plan:
        """A layer that is not behind the one before begins a pass, whose lengths may be new. `attend` reads
        plans before it waits: to be called in front of the launch that is in front of it."""
        last = self._plan
        if last is None or last.metadata is not metadata or layer <= last.layer:
            plan = self._make_plan(num_tokens, heads, layer, metadata)
        else:
            plan = Plan(metadata, layer, last.items_IF, last.ranges_W, last.tokens_3GT, last.num_part_rows)
        self._plan = plan
        return plan

    def attend(
        self,
        q_TX: Tensor,
        out_TX: Tensor,
        heads: HeadShape,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> None:
        """By the layer's plan."""
        plan = self._plan
        assert q_TX.itemsize == 2
        assert not kv.is_quantised
        assert kv.window(layer) is None
        assert self._tile.keys % kv.block_size == 0
        assert plan is not None
        assert plan.metadata is metadata
        assert plan.layer == layer
        num_groups, head_dim = heads.num_kv_heads, heads.head_dim
        block_h = next_power(heads.num_heads // num_groups)
        sums = torch.empty(plan.num_part_rows, block_h, head_dim, dtype=torch.float32, device=q_TX.device)
        stats = torch.empty(plan.num_part_rows, block_h, 2, dtype=torch.float32, device=q_TX.device)
        launch(
            attend_walks,
            (self._num_programs,),
            _queries(q_TX, head_dim, _ROWS // 2 // block_h, block_h),
            _pages(kv.keys[layer]),
            _pages(kv.values[layer]),
            metadata.block_tables,
            plan.items_IF,
            plan.ranges_W,
            sums,
            stats,
            out_TX,
            metadata.block_tables.stride(0),
            head_dim**-0.5 * LOG2_E,
            H=heads.num_heads // num_groups,
            BLOCK_H=block_h,
            G=num_groups,
            D=head_dim,
            BLOCK_Q=_ROWS // block_h,
            BLOCK_L=self._tile.keys,
            BLOCK_SIZE=kv.block_size,
            STAGES=self._tile.num_stages,
            num_warps=4,
            **launch_options(q_TX.device),
        )
        self.merge(plan, sums, stats, out_TX, heads)

    def merge(self, plan: Plan, sums: Tensor, stats: Tensor, out_TX: Tensor, heads: HeadShape) -> None:
        """Adds parts up; zeros where there is no sequence."""
        num_groups, num_tokens = heads.num_kv_heads, out_TX.shape[0]
        assert plan.tokens_3GT.shape == (3, num_groups, num_tokens)
        launch(
            merge_walks,
            (num_tokens, num_groups),
            plan.tokens_3GT,
            sums,
            stats,
            out_TX,
            num_tokens,
            H=heads.num_heads // num_groups,
            PART_H=sums.shape[1],
            G=num_groups,
            D=heads.head_dim,
            num_warps=4,
            **launch_options(out_TX.device),
        )

    def _make_plan(self, num_tokens: int, heads: HeadShape, layer: int, metadata: AttentionMetadata) -> Plan:
        device, num_groups = metadata.query_starts.device, heads.num_kv_heads
        num_sequences, num_programs = metadata.sequence_lengths.shape[0], self._num_programs
        queries = _ROWS // next_power(heads.num_heads // num_groups)
        num_tiles = num_tokens // queries + num_sequences
        num_items = (num_tokens // queries + min(num_sequences, num_tokens)) * num_groups + num_programs
        items_IF = torch.empty(num_items, ITEM_FIELDS, dtype=torch.int32, device=device)
        ranges_W = torch.empty(num_programs + 1, dtype=torch.int32, device=device)
        tokens_3GT = torch.empty(3, num_groups, num_tokens, dtype=torch.int32, device=device)
        launch(
            plan_walks,
            (-(-num_tiles // _PLANNED_TILES),),
            metadata.query_starts,
            metadata.sequence_lengths,
            items_IF,
            ranges_W,
            tokens_3GT,
            num_sequences,
            num_tokens,
            num_tiles,
            num_programs,
            BLOCK_W=MAX_PROGRAMS,
            G=num_groups,
            BLOCK_Q=queries,
            BLOCK_L=self._tile.keys,
            BLOCK_T=_PLANNED_TILES,
            BLOCK_R=_PLANNED_ROWS,
            NARROW=queries // 2,
            LEAST=self._tile.least_blocks * CHUNK_COST,
            num_warps=8,
            **launch_options(device),
        )
        # A narrow tile, one of a sequence, leaves two parts of its rows, a wide one none if no program ends
        # in it; wherever one does, a tile's rows are left once more.
        cut_rows, narrow_rows = queries * num_programs, min(num_tokens, num_sequences * queries // 2)
        num_part_rows = min(2 * num_tokens * num_groups, 2 * narrow_rows * num_groups + cut_rows) + cut_rows
        return Plan(metadata, layer, items_IF, ranges_W, tokens_3GT, num_part_rows)


def _queries(q_TX: Tensor, head_dim: int, queries: int, heads: int) -> TensorDescriptor:
    shape = [q_TX.shape[0], q_TX.shape[1] // head_dim, head_dim]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(q_TX, shape, [q_TX.stride(0), head_dim, 1], [queries, heads, _PANEL], layout)


def _pages(cache_BSGD: Tensor) -> TensorDescriptor:
    num_blocks, block_size, num_groups, head_dim = cache_BSGD.shape
    shape = [num_blocks * block_size, num_groups * head_dim]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache_BSGD, shape, [shape[1], 1], [block_size, _PANEL], layout)
