"""Which program walks through which keys of a mixed step, planned on the device; their sums merged.

Shapes: H heads of a group, G groups, D head size, R sequences, T tokens or tiles, W programs, Q queries of a
tile, I items (a tile's queries with the heads of a group, over some of its keys), C parts merged at a time.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors

# Written out in the kernels, here and in `hopper.py`: what they read from a module changes their names in
# Triton's cache.
ITEM_FIELDS = 16  # of them ten are used
# Of a block of keys, of one that few queries meet, and of a tile beside its keys: as measured on an H200.
CHUNK_COST, NARROW_COST, TILE_COST = 5, 3, 15
SLACK = 16


@triton.jit
def _load_tiles(
    starts_ptr,
    lengths_ptr,
    tile_T,
    num_sequences,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Sequence i owns the tiles from `starts[i] // BLOCK_Q + i` on: enough for a last, partial one. What a
    tile has none of is zero."""
    row_T = tl.full([BLOCK_T], -1, tl.int32)
    for first in tl.range(0, num_sequences, BLOCK_R):
        rows_R = first + tl.arange(0, BLOCK_R)
        start_R = tl.load(starts_ptr + rows_R, mask=rows_R < num_sequences, other=0)
        begins_TR = (start_R // BLOCK_Q + rows_R)[None, :] <= tile_T[:, None]
        row_T += tl.sum((begins_TR & (rows_R < num_sequences)[None, :]).to(tl.int32), axis=1)
    begin_T = tl.load(starts_ptr + row_T)
    count_T = tl.load(starts_ptr + row_T + 1) - begin_T
    offset_T = (tile_T - begin_T // BLOCK_Q - row_T) * BLOCK_Q
    queries_T = tl.maximum(tl.minimum(count_T - offset_T, BLOCK_Q), 0)
    seen_T = tl.load(lengths_ptr + row_T) - count_T + offset_T
    blocks_T = tl.where(queries_T > 0, tl.cdiv(seen_T + queries_T, BLOCK_L), 0)
    each_T = tl.where(queries_T <= NARROW, 3, 5)
    cost_T = tl.where(queries_T > 0, blocks_T * each_T + 15, 0)
    return row_T, begin_T + offset_T, queries_T, seen_T, seen_T - offset_T, blocks_T, each_T, cost_T


@triton.jit
def _cut(start_T, blocks_T, each_T, share):
    """First program of a tile, and how many share it, each at least a block; a program may take on, or be
    spared, a part of a tile that would be no more than a sixteenth of its share."""
    slack = share // 16 + 5
    first_T = (start_T + slack) // share
    last_T = tl.maximum((start_T + blocks_T * each_T - 1 - slack) // share, first_T)
    return first_T, tl.where(blocks_T > 0, last_T - first_T + 1, 0)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "num_tiles", "num_programs"])
def plan_walks(
    starts_ptr,
    lengths_ptr,
    items_ptr,
    ranges_ptr,
    tokens_ptr,
    num_sequences,
    num_tokens,
    num_tiles,
    num_programs,
    BLOCK_W: tl.constexpr,
    G: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NARROW: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (BLOCK_T tiles): their items and where the parts of their tokens lie. The first also writes
    `ranges` and what belongs to no sequence.

    All work stands in a row, tile by tile and in it group by group, and each of so many programs, of at most
    BLOCK_W, takes an equal share of it, of at least LEAST. NARROW: queries up to which a tile's items are
    walked by two groups of warps, a block in turn, which leave a part each.
    `items` is [I, 16]: sequence, first token, queries, position of the first, group, first key, end of keys,
    parts of its tile, place of the first query's part, keys of earlier steps. `ranges` is [W+1]: first item
    of each program. `tokens` is [3, G, T]: place of the first part, distance to the next, how many.
    """
    after_predecessors(PDL)
    program = tl.program_id(0)
    total = 0
    for first in tl.range(0, num_tiles, BLOCK_T):
        _, _, _, _, _, _, _, cost_T = _load_tiles(
            starts_ptr, lengths_ptr, first + tl.arange(0, BLOCK_T), num_sequences, BLOCK_T, BLOCK_R, BLOCK_Q,
            BLOCK_L, NARROW,
        )  # fmt: skip
        total += tl.sum(cost_T, axis=0) * G
    share = tl.maximum(tl.cdiv(total, num_programs), LEAST)
    programs_W = tl.arange(0, BLOCK_W)
    items_before_W = tl.zeros([BLOCK_W], tl.int32)
    start = 0
    item = 0
    place = 0
    for first in tl.range(0, num_tiles if program == 0 else (program + 1) * BLOCK_T, BLOCK_T):
        row_T, token_T, queries_T, seen_T, old_T, blocks_T, each_T, cost_T = _load_tiles(
            starts_ptr, lengths_ptr, first + tl.arange(0, BLOCK_T), num_sequences, BLOCK_T, BLOCK_R, BLOCK_Q,
            BLOCK_L, NARROW,
        )  # fmt: skip
        start_T = start + (tl.cumsum(cost_T, axis=0) - cost_T) * G
        ways_T = tl.where(queries_T <= NARROW, 2, 1)
        items_T = tl.zeros([BLOCK_T], tl.int32)
        rows_T = tl.zeros([BLOCK_T], tl.int32)
        for group in tl.range(0, G):
            program_T, cuts_T = _cut(start_T + group * cost_T, blocks_T, each_T, share)
            items_T += cuts_T
            rows_T += tl.where(cuts_T * ways_T > 1, cuts_T * ways_T * queries_T, 0)
            if program == 0:
                before_TW = tl.minimum(programs_W[None, :] - program_T[:, None], cuts_T[:, None])
                items_before_W += tl.sum(tl.maximum(before_TW, 0), axis=0)
        item_T = item + tl.cumsum(items_T, axis=0) - items_T
        place_T = place + tl.cumsum(rows_T, axis=0) - rows_T
        if first == program * BLOCK_T:
            for group in tl.range(0, G):
                offset_T = start_T + group * cost_T
                program_T, cuts_T = _cut(offset_T, blocks_T, each_T, share)
                parts_T = cuts_T * ways_T
                for cut in tl.range(0, tl.max(cuts_T, axis=0)):
                    inside_T = cut < cuts_T
                    # Blocks up to a program's end, as far as they start in front of it.
                    begin_T = tl.cdiv((program_T + cut) * share - offset_T, each_T)
                    end_T = tl.cdiv((program_T + cut + 1) * share - offset_T, each_T)
                    begin_T = tl.where(cut == 0, 0, tl.minimum(begin_T, blocks_T))
                    end_T = tl.where(cut == cuts_T - 1, blocks_T, tl.minimum(end_T, blocks_T))
                    fields = items_ptr + (item_T + cut) * 16
                    tl.store(fields, row_T, mask=inside_T)
                    tl.store(fields + 1, token_T, mask=inside_T)
                    tl.store(fields + 2, queries_T, mask=inside_T)
                    tl.store(fields + 3, seen_T, mask=inside_T)
                    tl.store(fields + 4, tl.full([BLOCK_T], group, tl.int32), mask=inside_T)
                    tl.store(fields + 5, begin_T * BLOCK_L, mask=inside_T)
                    last_T = tl.minimum(end_T * BLOCK_L, seen_T + queries_T)
                    tl.store(fields + 6, last_T, mask=inside_T)
                    tl.store(fields + 7, parts_T, mask=inside_T)
                    tl.store(fields + 8, place_T + cut * ways_T * queries_T, mask=inside_T)
                    tl.store(fields + 9, old_T, mask=inside_T)
                query_TQ = tl.arange(0, BLOCK_Q)[None, :]
                inside_TQ = query_TQ < queries_T[:, None]
                tokens_TQ = tokens_ptr + group * num_tokens + token_T[:, None] + query_TQ
                tl.store(tokens_TQ, place_T[:, None] + query_TQ, mask=inside_TQ)
                distance_TQ = queries_T[:, None] + tl.zeros_like(query_TQ)
                tl.store(tokens_TQ + G * num_tokens, distance_TQ, mask=inside_TQ)
                parts_TQ = parts_T[:, None] + tl.zeros_like(query_TQ)
                tl.store(tokens_TQ + 2 * G * num_tokens, parts_TQ, mask=inside_TQ)
                item_T += cuts_T
                place_T += tl.where(parts_T > 1, parts_T * queries_T, 0)
        start += tl.sum(cost_T, axis=0) * G
        item += tl.sum(items_T, axis=0)
        place += tl.sum(rows_T, axis=0)
    if program == 0:
        tl.store(ranges_ptr + programs_W, items_before_W, mask=programs_W < num_programs)
        tl.store(ranges_ptr + num_programs, item)
        for first in tl.range(tl.load(starts_ptr + num_sequences), num_tokens, BLOCK_T):
            tokens_T = first + tl.arange(0, BLOCK_T)
            none_T = tl.zeros([BLOCK_T], tl.int32)
            for group in tl.range(0, G):
                counts = tokens_ptr + (2 * G + group) * num_tokens + tokens_T
                tl.store(counts, none_T, mask=tokens_T < num_tokens)


@triton.jit
def _load_part(
    part_sums_ptr,
    part_stats_ptr,
    place,
    distance,
    num_parts,
    part,
    H: tl.constexpr,
    PART_H: tl.constexpr,
    D: tl.constexpr,
):
    """Nothing where there are no more."""
    heads_H = tl.arange(0, PART_H)
    inside_H = (heads_H < H) & (part < num_parts)
    row_H = (place + part * distance).to(tl.int64) * PART_H + heads_H
    sums_HD = part_sums_ptr + row_H[:, None] * D + tl.arange(0, D)[None, :]
    best_H = tl.load(part_stats_ptr + row_H * 2, mask=inside_H, other=-float("inf"))
    mass_H = tl.load(part_stats_ptr + row_H * 2 + 1, mask=inside_H, other=0.0)
    return best_H, mass_H, tl.load(sums_HD, mask=inside_H[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_walks(
    tokens_ptr,
    part_sums_ptr,
    part_stats_ptr,
    out_ptr,
    num_tokens,
    H: tl.constexpr,
    PART_H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, group): adds its parts up, if it has several; zeros for one of no sequence."""
    token = tl.program_id(0)
    group = tl.program_id(1)
    # Of the plan, which is older than the direct predecessor.
    field = tokens_ptr + group * num_tokens + token
    place = tl.load(field)
    distance = tl.load(field + G * num_tokens)
    num_parts = tl.load(field + 2 * G * num_tokens)
    after_predecessors(PDL)
    if num_parts == 1:
        return
    best_H = tl.full([PART_H], -float("inf"), tl.float32)
    mass_H = tl.zeros([PART_H], tl.float32)
    sum_HD = tl.zeros([PART_H, D], tl.float32)
    for first in tl.range(0, num_parts, 4):
        # Loads first: each waits as long as one memory access, none for another.
        best0_H, mass0_H, sum0_HD = _load_part(
            part_sums_ptr, part_stats_ptr, place, distance, num_parts, first, H, PART_H, D
        )
        best1_H, mass1_H, sum1_HD = _load_part(
            part_sums_ptr, part_stats_ptr, place, distance, num_parts, first + 1, H, PART_H, D
        )
        best2_H, mass2_H, sum2_HD = _load_part(
            part_sums_ptr, part_stats_ptr, place, distance, num_parts, first + 2, H, PART_H, D
        )
        best3_H, mass3_H, sum3_HD = _load_part(
            part_sums_ptr, part_stats_ptr, place, distance, num_parts, first + 3, H, PART_H, D
        )
        new_best_H = tl.maximum(tl.maximum(best0_H, best1_H), tl.maximum(best2_H, best3_H))
        # The first part has key 0, which every query sees; heads beyond the last have none.
        new_best_H = tl.maximum(tl.maximum(best_H, new_best_H), -1e30)
        shrink_H = tl.exp2(best_H - new_best_H)
        weight0_H = tl.exp2(best0_H - new_best_H)
        weight1_H = tl.exp2(best1_H - new_best_H)
        weight2_H = tl.exp2(best2_H - new_best_H)
        weight3_H = tl.exp2(best3_H - new_best_H)
        mass_H = mass_H * shrink_H + mass0_H * weight0_H + mass1_H * weight1_H
        mass_H += mass2_H * weight2_H + mass3_H * weight3_H
        sum_HD = sum_HD * shrink_H[:, None] + sum0_HD * weight0_H[:, None] + sum1_HD * weight1_H[:, None]
        sum_HD += sum2_HD * weight2_H[:, None] + sum3_HD * weight3_H[:, None]
        best_H = new_best_H
    mass_H = tl.where(mass_H > 0, mass_H, 1.0)
    heads_H = tl.arange(0, PART_H)
    columns_HD = (group * H + heads_H)[:, None] * D + tl.arange(0, D)[None, :]
    out_ptrs = out_ptr + token.to(tl.int64) * (G * H * D) + columns_HD
    out_HD = (sum_HD / mass_H[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out_HD, mask=(heads_H < H)[:, None])
