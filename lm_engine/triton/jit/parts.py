"""The parts of keys that tiles of a mixed step walk through: planned on the device, and merged.

Shapes: H heads of a group, L keys of a tile, D head size, R sequences, T tokens or items, I items (tiles
times splits), C splits merged at a time.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors


@triton.jit
def _splits_of(count, length, blocks_per_split, AT_ONCE: tl.constexpr, BLOCK_L: tl.constexpr):
    """Of each tile of a sequence. A decode's blocks of keys weigh half: a tile of one query. Not so AT_ONCE:
    programs wait for keys rather than compute then."""
    weight = 1 if AT_ONCE else tl.where(count == 1, 2, 1)
    return tl.cdiv(tl.cdiv(length, BLOCK_L), weight * blocks_per_split)


@triton.jit
def _load_rows(starts_ptr, lengths_ptr, rows_R, num_sequences, BLOCK_Q: tl.constexpr):
    """Queries, tiles, and keys of sequences; none of those without queries."""
    inside_R = rows_R < num_sequences
    begin_R = tl.load(starts_ptr + rows_R, mask=inside_R, other=0)
    end_R = tl.load(starts_ptr + rows_R + 1, mask=inside_R, other=0)
    count_R = end_R - begin_R
    length_R = tl.load(lengths_ptr + rows_R, mask=inside_R & (count_R > 0), other=0)
    return count_R, tl.cdiv(count_R, BLOCK_Q), length_R


@triton.jit
def _parts_of(tile_T, count, length, splits, BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr):
    """Keys that tiles see, the blocks of a part of them, and how many parts are not empty."""
    end_T = tl.minimum(length, length - count + (tile_T + 1) * BLOCK_Q)
    blocks_T = tl.cdiv(end_T, BLOCK_L)
    each_T = tl.cdiv(blocks_T, splits)
    return end_T, each_T, tl.cdiv(blocks_T, each_T)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "num_items"])
def plan_parts(
    query_starts_ptr,
    lengths_ptr,
    items_ptr,
    tokens_ptr,
    num_sequences,
    num_tokens,
    num_items,
    TARGET: tl.constexpr,
    LEAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sequence): its items, and where each of its tokens' parts lie. A last program marks what is
    left of both as empty.

    A part has as many blocks of keys, at least LEAST, as make all of them about TARGET more than there are
    tiles; AT_ONCE: no more than TARGET, if there are no more tiles.
    `items` is [6, I]: sequence (-1: none), first query, first key, end of keys, parts of its tile,
    place of the first query's part. `tokens` is [3, T]: place of the first part, distance to the next, how
    many.
    """
    after_predecessors(PDL)
    row = tl.program_id(0)
    work = 0  # of blocks, doubled
    longest = 0
    for first in tl.range(0, num_sequences, BLOCK_R):
        rows_R = first + tl.arange(0, BLOCK_R)
        count_R, tiles_R, length_R = _load_rows(query_starts_ptr, lengths_ptr, rows_R, num_sequences, BLOCK_Q)
        weight_R = 2 if AT_ONCE else tl.where(count_R == 1, 1, 2)
        work += tl.sum(tiles_R * tl.cdiv(length_R, BLOCK_L) * weight_R, axis=0)
        longest = tl.maximum(longest, tl.max(length_R, axis=0))
    blocks_per_split = tl.maximum(tl.cdiv(work, 2 * TARGET), LEAST)
    if AT_ONCE:
        num_items_planned = TARGET + 1
        while (num_items_planned > TARGET) & (blocks_per_split * BLOCK_L < longest):
            num_items_planned = 0
            for first in tl.range(0, num_sequences, BLOCK_R):
                rows_R = first + tl.arange(0, BLOCK_R)
                count_R, tiles_R, length_R = _load_rows(
                    query_starts_ptr, lengths_ptr, rows_R, num_sequences, BLOCK_Q
                )
                splits_R = _splits_of(count_R, length_R, blocks_per_split, AT_ONCE, BLOCK_L)
                num_items_planned += tl.sum(tiles_R * splits_R, axis=0)
            if num_items_planned > TARGET:
                blocks_per_split += tl.cdiv(blocks_per_split, 8)
    item = 0
    part = 0
    for first in tl.range(0, num_sequences, BLOCK_R):
        rows_R = first + tl.arange(0, BLOCK_R)
        count_R, tiles_R, length_R = _load_rows(query_starts_ptr, lengths_ptr, rows_R, num_sequences, BLOCK_Q)
        splits_R = tl.where(
            rows_R < row, _splits_of(count_R, length_R, blocks_per_split, AT_ONCE, BLOCK_L), 0
        )
        item += tl.sum(tiles_R * splits_R, axis=0)
        part += tl.sum(count_R * splits_R, axis=0)
    if row == num_sequences:
        for first in tl.range(item, num_items, BLOCK_T):
            items_T = first + tl.arange(0, BLOCK_T)
            tl.store(items_ptr + items_T, tl.full([BLOCK_T], -1, tl.int32), mask=items_T < num_items)
        for first in tl.range(tl.load(query_starts_ptr + row), num_tokens, BLOCK_T):
            tokens_T = first + tl.arange(0, BLOCK_T)
            none_T = tl.zeros([BLOCK_T], tl.int32)
            tl.store(tokens_ptr + 2 * num_tokens + tokens_T, none_T, mask=tokens_T < num_tokens)
        return
    begin = tl.load(query_starts_ptr + row)
    count = tl.load(query_starts_ptr + row + 1) - begin
    if count == 0:
        return
    length = tl.load(lengths_ptr + row)
    splits = _splits_of(count, length, blocks_per_split, AT_ONCE, BLOCK_L)
    own_items = tl.cdiv(count, BLOCK_Q) * splits
    for first in tl.range(0, own_items, BLOCK_T):
        index_T = first + tl.arange(0, BLOCK_T)
        inside_T = index_T < own_items
        tile_T = index_T // splits
        split_T = index_T % splits
        end_T, each_T, num_T = _parts_of(tile_T, count, length, splits, BLOCK_Q, BLOCK_L)
        key_T = split_T * each_T * BLOCK_L
        queries_T = tl.minimum(count - tile_T * BLOCK_Q, BLOCK_Q)
        place_T = part + tile_T * BLOCK_Q * splits + split_T * queries_T
        fields = items_ptr + item + index_T
        tl.store(fields, tl.where(split_T < num_T, row, -1), mask=inside_T)
        tl.store(fields + num_items, tile_T * BLOCK_Q, mask=inside_T)
        tl.store(fields + 2 * num_items, key_T, mask=inside_T)
        tl.store(fields + 3 * num_items, tl.minimum(key_T + each_T * BLOCK_L, end_T), mask=inside_T)
        tl.store(fields + 4 * num_items, num_T, mask=inside_T)
        tl.store(fields + 5 * num_items, place_T, mask=inside_T)
    for first in tl.range(0, count, BLOCK_T):
        query_T = first + tl.arange(0, BLOCK_T)
        inside_T = query_T < count
        tile_T = query_T // BLOCK_Q
        _, _, num_T = _parts_of(tile_T, count, length, splits, BLOCK_Q, BLOCK_L)
        queries_T = tl.minimum(count - tile_T * BLOCK_Q, BLOCK_Q)
        place_T = part + tile_T * BLOCK_Q * splits + query_T % BLOCK_Q
        fields = tokens_ptr + begin + query_T
        tl.store(fields, place_T, mask=inside_T)
        tl.store(fields + num_tokens, queries_T, mask=inside_T)
        tl.store(fields + 2 * num_tokens, num_T, mask=inside_T)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_parts(
    tokens_ptr,
    part_sums_ptr,
    part_stats_ptr,
    out_ptr,
    num_tokens,
    H: tl.constexpr,
    PART_H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, group): adds its parts up, if it has several; zeros for one of no sequence."""
    after_predecessors(PDL)
    token = tl.program_id(0)
    group = tl.program_id(1)
    place = tl.load(tokens_ptr + token)
    distance = tl.load(tokens_ptr + num_tokens + token)
    num_parts = tl.load(tokens_ptr + 2 * num_tokens + token)
    if num_parts == 1:
        return
    heads_H = tl.arange(0, PART_H)
    dims_D = tl.arange(0, BLOCK_D)
    inside_H = heads_H < H
    inside_HD = inside_H[:, None] & (dims_D < D)[None, :]
    best_H = tl.full([PART_H], -float("inf"), tl.float32)
    mass_H = tl.zeros([PART_H], tl.float32)
    sum_HD = tl.zeros([PART_H, BLOCK_D], tl.float32)
    for first in tl.range(0, num_parts, BLOCK_C):
        parts_C = first + tl.arange(0, BLOCK_C)
        inside_CH = (parts_C < num_parts)[:, None] & inside_H[None, :]
        part_C = ((place + parts_C * distance).to(tl.int64) * G + group) * PART_H
        part_CH = part_C[:, None] + heads_H[None, :]
        best_CH = tl.load(part_stats_ptr + part_CH * 2, mask=inside_CH, other=-float("inf"))
        mass_CH = tl.load(part_stats_ptr + part_CH * 2 + 1, mask=inside_CH, other=0.0)
        sum_CHD = tl.load(
            part_sums_ptr + part_CH[:, :, None] * D + dims_D[None, None, :],
            mask=inside_CH[:, :, None] & (dims_D < D)[None, None, :],
            other=0.0,
        )
        # The first part has key 0, which every query sees.
        new_best_H = tl.where(inside_H, tl.maximum(best_H, tl.max(best_CH, axis=0)), 0.0)
        shrink_H = tl.exp2(best_H - new_best_H)
        weight_CH = tl.exp2(best_CH - new_best_H[None, :])
        mass_H = mass_H * shrink_H + tl.sum(mass_CH * weight_CH, axis=0)
        sum_HD = sum_HD * shrink_H[:, None] + tl.sum(sum_CHD * weight_CH[:, :, None], axis=0)
        best_H = new_best_H
    mass_H = tl.where(mass_H > 0, mass_H, 1.0)
    out_HD = (sum_HD / mass_H[:, None]).to(out_ptr.dtype.element_ty)
    columns_HD = (group * H + heads_H)[:, None] * D + dims_D[None, :]
    tl.store(out_ptr + token.to(tl.int64) * (G * H * D) + columns_HD, out_HD, mask=inside_HD)
