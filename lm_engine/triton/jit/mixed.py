"""Attention of chunks of any length over the paged cache: a program for each tile of queries, or for each
part of the keys that a tile sees (`jit/parts.py` plans and merges them).

Shapes: M = query rows of a tile (queries x heads of a group), H heads of a group, L keys of a tile, D head
size, R sequences, T tokens, I items (tiles times splits), C splits merged at a time. Softmax in base 2;
`scale` holds log2(e).
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.attention import slots
from lm_engine.triton.jit.order import after_predecessors
from lm_engine.triton.jit.quantised import load_powers, widen


@triton.jit
def _sequence_of_tile(tile, query_starts_ptr, num_sequences, BLOCK_Q: tl.constexpr):
    """Sequence i owns the tiles from `query_starts[i] // BLOCK_Q + i` on: enough for a last, partial one."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _load_queries(
    q_ptr,
    q_stride,
    first_query,
    num_queries,
    offset,
    group,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    rows_M = tl.arange(0, BLOCK_Q * BLOCK_H)
    query_M = offset + rows_M // BLOCK_H
    head_M = rows_M % BLOCK_H
    dims_D = tl.arange(0, BLOCK_D)
    inside_MD = ((query_M < num_queries) & (head_M < H))[:, None] & (dims_D < D)[None, :]
    token_M = (first_query + query_M).to(tl.int64)
    column_MD = ((group * H + head_M) * D)[:, None] + dims_D[None, :]
    q_MD = tl.load(q_ptr + token_M[:, None] * q_stride + column_MD, mask=inside_MD, other=0.0)
    return q_MD, query_M, head_M, token_M, column_MD, inside_MD


@triton.jit
def _add_keys(
    q_MD,
    seen_M,
    best_M,
    mass_M,
    sum_MD,
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    table_ptr,
    group,
    start,
    end,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    ALL_SEEN: tl.constexpr,
):
    """BLOCK_L keys more. ALL_SEEN: none is beyond `end`, and every row sees them all."""
    dims_D = tl.arange(0, BLOCK_D)
    index_L = start + tl.arange(0, BLOCK_L)
    inside_L = index_L < (start + BLOCK_L if ALL_SEEN else end)
    heads_L = slots(table_ptr, index_L, inside_L, BLOCK_SIZE) * G + group
    places_LD = (heads_L * D)[:, None] + dims_D[None, :]
    if ALL_SEEN and D == BLOCK_D:
        k_LD = widen(tl.load(keys_ptr + places_LD), q_MD.dtype)
        v_LD = widen(tl.load(values_ptr + places_LD), q_MD.dtype)
    else:
        inside_LD = inside_L[:, None] & (dims_D < D)[None, :]
        k_LD = widen(tl.load(keys_ptr + places_LD, mask=inside_LD, other=0.0), q_MD.dtype)
        v_LD = widen(tl.load(values_ptr + places_LD, mask=inside_LD, other=0.0), q_MD.dtype)
    scores_ML = tl.dot(q_MD, tl.trans(k_LD), input_precision=PRECISION)
    if QUANTISED:
        scores_ML *= load_powers(key_exponents_ptr + heads_L, inside_L)[None, :]
    if ALL_SEEN:
        # The scale is positive: it is applied once a row, and in the exponent, where it costs nothing.
        new_best_M = tl.maximum(best_M, tl.max(scores_ML, axis=1) * scale)
        origin_M = new_best_M
    else:
        visible_ML = (index_L[None, :] <= seen_M[:, None]) & inside_L[None, :]
        if WINDOW:
            visible_ML &= index_L[None, :] > seen_M[:, None] - WINDOW
        scores_ML = tl.where(visible_ML, scores_ML, -float("inf"))
        new_best_M = tl.maximum(best_M, tl.max(scores_ML, axis=1) * scale)
        origin_M = tl.where(new_best_M == -float("inf"), 0.0, new_best_M)
    weights_ML = tl.exp2(scores_ML * scale - origin_M[:, None])
    shrink_M = tl.exp2(best_M - origin_M)
    mass_M = mass_M * shrink_M + tl.sum(weights_ML, axis=1)
    sum_MD = sum_MD * shrink_M[:, None]
    if QUANTISED:
        weights_ML *= load_powers(value_exponents_ptr + heads_L, inside_L)[None, :]
    sum_MD = tl.dot(weights_ML.to(q_MD.dtype), v_LD, sum_MD, input_precision=PRECISION)
    return new_best_M, mass_M, sum_MD


@triton.jit
def _walk(
    q_MD,
    seen_M,
    first_seen,
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    table_ptr,
    group,
    first,
    end,
    scale,
    M: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Best score, mass and weighted sum over keys `first` to `end`, of which a row sees those up to its
    `seen`, none of them fewer than up to `first_seen`; a row that sees none of them has a best of -inf and
    nothing else. WINDOW: of those, a row sees no more than its last so many, and the last row's `seen` is the
    key before `end`; 0: all. Blocks that all rows see whole go without a mask: the first ones, but for those
    in which windows begin."""
    best_M = tl.full([M], -float("inf"), tl.float32)
    mass_M = tl.zeros([M], tl.float32)
    sum_MD = tl.zeros([M, BLOCK_D], tl.float32)
    head = first
    if WINDOW:
        head = first + tl.cdiv(tl.maximum(end - WINDOW - first, 0), BLOCK_L) * BLOCK_L
    whole = head + tl.maximum(tl.minimum(end, first_seen + 1) - head, 0) // BLOCK_L * BLOCK_L
    for stretch in tl.static_range(0 if WINDOW else 1, 3):
        begin = first if stretch == 0 else head if stretch == 1 else whole
        until = head if stretch == 0 else whole if stretch == 1 else end
        for start in tl.range(begin, until, BLOCK_L):
            best_M, mass_M, sum_MD = _add_keys(
                q_MD,
                seen_M,
                best_M,
                mass_M,
                sum_MD,
                keys_ptr,
                values_ptr,
                key_exponents_ptr,
                value_exponents_ptr,
                table_ptr,
                group,
                start,
                end,
                scale,
                G,
                D,
                BLOCK_D,
                BLOCK_L,
                BLOCK_SIZE,
                QUANTISED,
                WINDOW,
                PRECISION,
                stretch == 1,
            )
    return best_M, mass_M, sum_MD


# Numbers that differ from step to step: a variant for each kind would be compiled while requests wait.
@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def mixed_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    tables_ptr,
    query_starts_ptr,
    lengths_ptr,
    out_ptr,
    num_sequences,
    table_stride,
    q_stride,
    scale,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, group): BLOCK_Q queries of one sequence with the group's heads, over all they see."""
    after_predecessors(PDL)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    row = _sequence_of_tile(tile, query_starts_ptr, num_sequences, BLOCK_Q)
    first_query = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - first_query
    offset = (tile - first_query // BLOCK_Q - row) * BLOCK_Q
    if offset >= num_queries:
        return
    length = tl.load(lengths_ptr + row)
    context = length - num_queries
    q_MD, query_M, _, token_M, column_MD, inside_MD = _load_queries(
        q_ptr, q_stride, first_query, num_queries, offset, group, H, BLOCK_H, D, BLOCK_D, BLOCK_Q
    )
    _, mass_M, sum_MD = _walk(
        q_MD,
        context + query_M,
        context + offset,
        keys_ptr,
        values_ptr,
        key_exponents_ptr,
        value_exponents_ptr,
        tables_ptr + row.to(tl.int64) * table_stride,
        group,
        tl.maximum(context + offset + 1 - WINDOW, 0) if WINDOW else 0,
        tl.minimum(length, context + offset + BLOCK_Q),
        scale,
        BLOCK_Q * BLOCK_H,
        G,
        D,
        BLOCK_D,
        BLOCK_L,
        BLOCK_SIZE,
        QUANTISED,
        WINDOW,
        PRECISION,
    )
    if WINDOW:  # rows behind the last query, whose window is behind the last key
        mass_M = tl.where(mass_M > 0, mass_M, 1.0)
    out_MD = (sum_MD / mass_M[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token_M[:, None] * (G * H * D) + column_MD, out_MD, mask=inside_MD)


@triton.jit
def _attend_item(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    table_ptr,
    part_sums_ptr,
    part_stats_ptr,
    out_ptr,
    q_stride,
    scale,
    group,
    first_query,
    num_queries,
    offset,
    context,
    first_key,
    end_key,
    num_parts,
    place,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PART_H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    q_MD, query_M, head_M, token_M, column_MD, inside_MD = _load_queries(
        q_ptr, q_stride, first_query, num_queries, offset, group, H, BLOCK_H, D, BLOCK_D, BLOCK_Q
    )
    best_M, mass_M, sum_MD = _walk(
        q_MD,
        context + query_M,
        context + offset,
        keys_ptr,
        values_ptr,
        key_exponents_ptr,
        value_exponents_ptr,
        table_ptr,
        group,
        first_key,
        end_key,
        scale,
        BLOCK_Q * BLOCK_H,
        G,
        D,
        BLOCK_D,
        BLOCK_L,
        BLOCK_SIZE,
        QUANTISED,
        0,  # no window: layers with one are not split
        PRECISION,
    )
    if num_parts == 1:
        out_MD = (sum_MD / mass_M[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token_M[:, None] * (G * H * D) + column_MD, out_MD, mask=inside_MD)
    else:
        inside_M = (query_M < num_queries) & (head_M < H)
        part_M = ((place + query_M - offset).to(tl.int64) * G + group) * PART_H + head_M
        dims_D = tl.arange(0, BLOCK_D)
        tl.store(part_sums_ptr + part_M[:, None] * D + dims_D[None, :], sum_MD, mask=inside_MD)
        tl.store(part_stats_ptr + part_M * 2, best_M, mask=inside_M)
        tl.store(part_stats_ptr + part_M * 2 + 1, mass_M, mask=inside_M)


@triton.jit(do_not_specialize=["num_items", "table_stride"])
def attend_parts(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    tables_ptr,
    query_starts_ptr,
    lengths_ptr,
    items_ptr,
    part_sums_ptr,
    part_stats_ptr,
    out_ptr,
    num_items,
    table_stride,
    q_stride,
    scale,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (item, group): a tile's queries over one part of the keys. All of them give the result itself,
    others what is to be merged. A decode is a tile of its own size."""
    after_predecessors(PDL)
    item = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.load(items_ptr + item)
    offset = tl.load(items_ptr + num_items + item)
    first_key = tl.load(items_ptr + 2 * num_items + item)
    end_key = tl.load(items_ptr + 3 * num_items + item)
    num_parts = tl.load(items_ptr + 4 * num_items + item)
    place = tl.load(items_ptr + 5 * num_items + item)
    if row < 0:
        return
    first_query = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - first_query
    context = tl.load(lengths_ptr + row) - num_queries
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    if num_queries == 1:
        _attend_item(
            q_ptr,
            keys_ptr,
            values_ptr,
            key_exponents_ptr,
            value_exponents_ptr,
            table_ptr,
            part_sums_ptr,
            part_stats_ptr,
            out_ptr,
            q_stride,
            scale,
            group,
            first_query,
            num_queries,
            offset,
            context,
            first_key,
            end_key,
            num_parts,
            place,
            H,
            16 if BLOCK_H < 16 else BLOCK_H,
            BLOCK_H,
            G,
            D,
            BLOCK_D,
            1,
            BLOCK_L,
            BLOCK_SIZE,
            QUANTISED,
            PRECISION,
        )
    else:
        _attend_item(
            q_ptr,
            keys_ptr,
            values_ptr,
            key_exponents_ptr,
            value_exponents_ptr,
            table_ptr,
            part_sums_ptr,
            part_stats_ptr,
            out_ptr,
            q_stride,
            scale,
            group,
            first_query,
            num_queries,
            offset,
            context,
            first_key,
            end_key,
            num_parts,
            place,
            H,
            BLOCK_H,
            BLOCK_H,
            G,
            D,
            BLOCK_D,
            BLOCK_Q,
            BLOCK_L,
            BLOCK_SIZE,
            QUANTISED,
            PRECISION,
        )
