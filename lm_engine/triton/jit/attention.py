"""Attention of decodes over the paged cache, their keys split.

Shapes: H heads of a group, L keys of a tile, D head size, P = D/2, S splits. Softmax in base 2; `scale` holds
log2(e).
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors
from lm_engine.triton.jit.quantised import head_exponent, load_powers, quantise, widen


@triton.jit
def slots(table_ptr, index_L, inside_L, BLOCK_SIZE: tl.constexpr):
    block_L = tl.load(table_ptr + index_L // BLOCK_SIZE, mask=inside_L, other=0).to(tl.int64)
    return block_L * BLOCK_SIZE + index_L % BLOCK_SIZE


@triton.jit
def _load_halves(ptr, inside, P: tl.constexpr):
    a = tl.load(ptr, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(ptr + P, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _load_sum(ptr, stride, inside, P: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Halves of heads whose values are sums of PARTS, rounded as if the sums had been stored."""
    a, b = _load_halves(ptr, inside, P)
    for part in tl.static_range(1, PARTS):
        part_a, part_b = _load_halves(ptr + part * stride, inside, P)
        a += part_a
        b += part_b
    return a.to(DTYPE).to(tl.float32), b.to(DTYPE).to(tl.float32)


@triton.jit
def _turn(
    a_XP,
    b_XP,
    cos_1P,
    sin_1P,
    norm_ptr,
    pairs_1P,
    eps,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and rotation of heads given as halves; rounded where the plain kernels round."""
    if NORM:
        norm_a_1P, norm_b_1P = _load_halves(norm_ptr + pairs_1P, pairs_1P < P, P)
        scale_X1 = (1.0 / tl.sqrt_rn(tl.sum(a_XP * a_XP + b_XP * b_XP, axis=1) / (2 * P) + eps))[:, None]
        a_XP = (a_XP * scale_X1 * norm_a_1P).to(DTYPE).to(tl.float32)
        b_XP = (b_XP * scale_X1 * norm_b_1P).to(DTYPE).to(tl.float32)
    return (a_XP * cos_1P - b_XP * sin_1P).to(DTYPE), (b_XP * cos_1P + a_XP * sin_1P).to(DTYPE)


@triton.jit
def _load_tile(
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    table_ptr,
    group,
    start,
    end,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys `start` to `end`, as halves, and their values; zeros beyond. And what both are to be multiplied
    by, if QUANTISED."""
    P: tl.constexpr = D // 2
    index_L = start + tl.arange(0, BLOCK_L)
    inside_L = index_L < end
    heads_L = slots(table_ptr, index_L, inside_L, BLOCK_SIZE) * G + group
    places_L = heads_L * D
    pairs_P = tl.arange(0, BLOCK_P)
    dims_D = tl.arange(0, BLOCK_D)
    inside_LP = inside_L[:, None] & (pairs_P < P)[None, :]
    halves_LP = keys_ptr + places_L[:, None] + pairs_P[None, :]
    key_a_LP = widen(tl.load(halves_LP, mask=inside_LP, other=0.0), DTYPE)
    key_b_LP = widen(tl.load(halves_LP + P, mask=inside_LP, other=0.0), DTYPE)
    inside_LD = inside_L[:, None] & (dims_D < D)[None, :]
    v_LD = tl.load(values_ptr + places_L[:, None] + dims_D[None, :], mask=inside_LD, other=0.0)
    v_LD = widen(v_LD, DTYPE)
    key_power_L = tl.full([BLOCK_L], 1.0, tl.float32)
    value_power_L = key_power_L
    if QUANTISED:
        key_power_L = load_powers(key_exponents_ptr + heads_L, inside_L)
        value_power_L = load_powers(value_exponents_ptr + heads_L, inside_L)
    return key_a_LP, key_b_LP, v_LD, key_power_L, value_power_L, inside_L


@triton.jit
def _attend_tile(
    a_HP,
    b_HP,
    key_a_LP,
    key_b_LP,
    v_LD,
    key_power_L,
    value_power_L,
    inside_L,
    best_H,
    mass_H,
    sum_HD,
    scale,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    scores_HL = tl.dot(a_HP, tl.trans(key_a_LP), input_precision=PRECISION)
    scores_HL = tl.dot(b_HP, tl.trans(key_b_LP), scores_HL, input_precision=PRECISION) * scale
    if QUANTISED:
        scores_HL *= key_power_L[None, :]
    scores_HL = tl.where(inside_L[None, :], scores_HL, -float("inf"))
    new_best_H = tl.maximum(best_H, tl.max(scores_HL, axis=1))
    weights_HL = tl.exp2(scores_HL - new_best_H[:, None])
    shrink_H = tl.exp2(best_H - new_best_H)
    mass_H = mass_H * shrink_H + tl.sum(weights_HL, axis=1)
    sum_HD = sum_HD * shrink_H[:, None]
    if QUANTISED:
        weights_HL *= value_power_L[None, :]
    sum_HD = tl.dot(weights_HL.to(v_LD.dtype), v_LD, sum_HD, input_precision=PRECISION)
    return new_best_H, mass_H, sum_HD


@triton.jit
def decode_attention(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    keys_ptr,
    values_ptr,
    key_exponents_ptr,
    value_exponents_ptr,
    tables_ptr,
    lengths_ptr,
    slot_mapping_ptr,
    part_sums_ptr,
    part_stats_ptr,
    arrivals_ptr,
    out_ptr,
    table_stride,
    eps,
    scale,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PART_H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK_S: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    QUANTISED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sequence, group, split): one query's heads of a group over one part of its keys. WINDOW: of
    the last so many keys, its own included; 0: of all.

    Takes the fused projection's row as it is, in one or PARTS to be added: rotates the query itself; the last
    split also rotates the new key and writes it and its value to the cache. The split that arrives last
    merges all.
    """
    P: tl.constexpr = D // 2
    X: tl.constexpr = G * H + 2 * G
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    # Written by the step's first kernel: older than the direct predecessor.
    last = tl.load(lengths_ptr + row) - 1
    begin = 0
    if WINDOW:
        begin = tl.maximum(last + 1 - WINDOW, 0)
    tiles_per_split = tl.cdiv(tl.cdiv(last + 1 - begin, BLOCK_L), tl.num_programs(2))
    first = begin + split * tiles_per_split * BLOCK_L
    if first > last:
        return
    num_active = tl.cdiv(last + 1 - begin, tiles_per_split * BLOCK_L)
    end = tl.minimum(first + tiles_per_split * BLOCK_L, last)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    slot = tl.load(slot_mapping_ptr + row)
    heads_H = tl.arange(0, BLOCK_H)
    pairs_1P = tl.arange(0, BLOCK_P)[None, :]
    dims_D = tl.arange(0, BLOCK_D)
    # The first tile of older keys is under way before the query is known.
    key_a_LP, key_b_LP, v_LD, key_power_L, value_power_L, inside_L = _load_tile(
        keys_ptr,
        values_ptr,
        key_exponents_ptr,
        value_exponents_ptr,
        table_ptr,
        group,
        first,
        end,
        G,
        D,
        BLOCK_D,
        BLOCK_P,
        BLOCK_L,
        BLOCK_SIZE,
        QUANTISED,
        DTYPE,
    )
    after_predecessors(PDL)

    token_ptr = qkv_ptr + row.to(tl.int64) * (X * D)
    cos_1P = tl.load(cos_ptr + row * P + pairs_1P, mask=pairs_1P < P, other=0.0)
    sin_1P = tl.load(sin_ptr + row * P + pairs_1P, mask=pairs_1P < P, other=0.0)
    inside_HP = (heads_H < H)[:, None] & (pairs_1P < P)
    stride = tl.num_programs(0).to(tl.int64) * (X * D)
    query_ptr = token_ptr + (group * H + heads_H)[:, None] * D + pairs_1P
    a_HP, b_HP = _load_sum(query_ptr, stride, inside_HP, P, PARTS, DTYPE)
    # Loaded beside the query, so that the last split waits no longer than the others.
    is_last = split == num_active - 1
    key_ptr = token_ptr + (G * H + group) * D
    own_1P = (pairs_1P < P) & is_last
    own_D = (dims_D < D) & is_last
    own_a_1P, own_b_1P = _load_sum(key_ptr + pairs_1P, stride, own_1P, P, PARTS, DTYPE)
    own_value_D = tl.load(key_ptr + G * D + dims_D, mask=own_D, other=0.0)
    for part in tl.static_range(1, PARTS):
        own_value_D += tl.load(key_ptr + part * stride + G * D + dims_D, mask=own_D, other=0.0)
    a_HP, b_HP = _turn(a_HP, b_HP, cos_1P, sin_1P, query_norm_ptr, pairs_1P, eps, DTYPE, P, NORM)

    # The new token's own key and value never come from the cache.
    best_H = tl.full([BLOCK_H], -float("inf"), tl.float32)
    mass_H = tl.zeros([BLOCK_H], tl.float32)
    sum_HD = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if is_last:
        key_a_1P, key_b_1P = _turn(
            own_a_1P, own_b_1P, cos_1P, sin_1P, key_norm_ptr, pairs_1P, eps, DTYPE, P, NORM
        )
        value_D = own_value_D.to(DTYPE)
        head = slot * G + group
        place = head * D
        if QUANTISED:  # what is attended is what is stored: a replay reads it from the cache
            key_most_1P = tl.maximum(tl.abs(key_a_1P.to(tl.float32)), tl.abs(key_b_1P.to(tl.float32)))
            key_exponent = head_exponent(tl.max(tl.max(key_most_1P, axis=1), axis=0))
            value_exponent = head_exponent(tl.max(tl.abs(value_D.to(tl.float32)), axis=0))
            tl.store(key_exponents_ptr + head, key_exponent.to(tl.int8))
            tl.store(value_exponents_ptr + head, value_exponent.to(tl.int8))
            key_a_1P, stored_a_1P = quantise(key_a_1P, key_exponent)
            key_b_1P, stored_b_1P = quantise(key_b_1P, key_exponent)
            value_D, stored_D = quantise(value_D, value_exponent)
        else:
            stored_a_1P = key_a_1P
            stored_b_1P = key_b_1P
            stored_D = value_D
        tl.store(keys_ptr + place + pairs_1P, stored_a_1P, mask=pairs_1P < P)
        tl.store(keys_ptr + place + P + pairs_1P, stored_b_1P, mask=pairs_1P < P)
        tl.store(values_ptr + place + dims_D, stored_D, mask=dims_D < D)
        products_HP = a_HP.to(tl.float32) * key_a_1P.to(tl.float32)
        products_HP += b_HP.to(tl.float32) * key_b_1P.to(tl.float32)
        best_H = tl.sum(products_HP, axis=1) * scale
        mass_H += 1.0
        sum_HD += value_D.to(tl.float32)[None, :]

    if first < end:
        best_H, mass_H, sum_HD = _attend_tile(
            a_HP,
            b_HP,
            key_a_LP,
            key_b_LP,
            v_LD,
            key_power_L,
            value_power_L,
            inside_L,
            best_H,
            mass_H,
            sum_HD,
            scale,
            QUANTISED,
            PRECISION,
        )
    for start in tl.range(first + BLOCK_L, end, BLOCK_L):
        key_a_LP, key_b_LP, v_LD, key_power_L, value_power_L, inside_L = _load_tile(
            keys_ptr,
            values_ptr,
            key_exponents_ptr,
            value_exponents_ptr,
            table_ptr,
            group,
            start,
            end,
            G,
            D,
            BLOCK_D,
            BLOCK_P,
            BLOCK_L,
            BLOCK_SIZE,
            QUANTISED,
            DTYPE,
        )
        best_H, mass_H, sum_HD = _attend_tile(
            a_HP,
            b_HP,
            key_a_LP,
            key_b_LP,
            v_LD,
            key_power_L,
            value_power_L,
            inside_L,
            best_H,
            mass_H,
            sum_HD,
            scale,
            QUANTISED,
            PRECISION,
        )

    out_ptr += row.to(tl.int64) * (G * H * D) + group * H * D
    inside_HD = (heads_H < H)[:, None] & (dims_D < D)[None, :]
    if num_active == 1:
        out_HD = (sum_HD / mass_H[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + heads_H[:, None] * D + dims_D[None, :], out_HD, mask=inside_HD)
        return
    pair = (row * G + group).to(tl.int64)
    part = (pair * NUM_SPLITS + split) * PART_H + heads_H
    tl.store(part_sums_ptr + part[:, None] * D + dims_D[None, :], sum_HD, mask=inside_HD)
    tl.store(part_stats_ptr + part * 2, best_H, mask=heads_H < H)
    tl.store(part_stats_ptr + part * 2 + 1, mass_H, mask=heads_H < H)
    tl.debug_barrier()  # all threads' parts are out before one of them says so
    if tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel") != num_active - 1:
        return
    tl.store(arrivals_ptr + pair, 0)
    _merge(
        part_sums_ptr + pair * (NUM_SPLITS * PART_H * D),
        part_stats_ptr + pair * (NUM_SPLITS * PART_H * 2),
        out_ptr,
        num_active,
        H,
        PART_H,
        D,
        BLOCK_D,
        NUM_SPLITS,
        CHUNK_S,
    )


@triton.jit
def _load_parts(
    sums_ptr,
    first,
    num_active,
    H: tl.constexpr,
    PART_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_S: tl.constexpr,
):
    splits_C = first + tl.arange(0, CHUNK_S)
    heads_H = tl.arange(0, PART_H)
    dims_D = tl.arange(0, BLOCK_D)
    inside_HC = (heads_H < H)[:, None] & (splits_C < num_active)[None, :]
    part_HC = heads_H[:, None] + splits_C[None, :] * PART_H
    return tl.load(
        sums_ptr + part_HC[:, :, None] * D + dims_D[None, None, :],
        mask=inside_HC[:, :, None] & (dims_D < D)[None, None, :],
        other=0.0,
    )


@triton.jit
def _load_stats(stats_ptr, first, num_active, H: tl.constexpr, PART_H: tl.constexpr, COUNT: tl.constexpr):
    splits_S = first + tl.arange(0, COUNT)
    heads_H = tl.arange(0, PART_H)
    inside_HS = (heads_H < H)[:, None] & (splits_S < num_active)[None, :]
    places_HS = stats_ptr + (heads_H[:, None] + splits_S[None, :] * PART_H) * 2
    best_HS = tl.load(places_HS, mask=inside_HS, other=-float("inf"))
    mass_HS = tl.load(places_HS + 1, mask=inside_HS, other=0.0)
    return best_HS, mass_HS


@triton.jit
def _merge(
    sums_ptr,
    stats_ptr,
    out_ptr,
    num_active,
    H: tl.constexpr,
    PART_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK_S: tl.constexpr,
):
    """Heads come first, for warps to share them: each adds its heads' parts up alone."""
    # Loads first: each waits as long as one memory access, none for another.
    all_best_HS, all_mass_HS = _load_stats(stats_ptr, 0, num_active, H, PART_H, NUM_SPLITS)
    best_HC, _ = _load_stats(stats_ptr, 0, num_active, H, PART_H, CHUNK_S)
    part_HCD = _load_parts(sums_ptr, 0, num_active, H, PART_H, D, BLOCK_D, CHUNK_S)
    heads_H = tl.arange(0, PART_H)
    dims_D = tl.arange(0, BLOCK_D)
    inside_H = heads_H < H
    best_H = tl.where(inside_H, tl.max(all_best_HS, axis=1), 0.0)
    mass_H = tl.sum(all_mass_HS * tl.exp2(all_best_HS - best_H[:, None]), axis=1)
    mass_H = tl.where(inside_H, mass_H, 1.0)
    sum_HD = tl.sum(part_HCD * tl.exp2(best_HC - best_H[:, None])[:, :, None], axis=1)
    for start in tl.range(CHUNK_S, num_active, CHUNK_S):
        best_HC, _ = _load_stats(stats_ptr, start, num_active, H, PART_H, CHUNK_S)
        part_HCD = _load_parts(sums_ptr, start, num_active, H, PART_H, D, BLOCK_D, CHUNK_S)
        sum_HD += tl.sum(part_HCD * tl.exp2(best_HC - best_H[:, None])[:, :, None], axis=1)
    out_HD = (sum_HD / mass_H[:, None]).to(out_ptr.dtype.element_ty)
    inside_HD = inside_H[:, None] & (dims_D < D)[None, :]
    tl.store(out_ptr + heads_H[:, None] * D + dims_D[None, :], out_HD, mask=inside_HD)
