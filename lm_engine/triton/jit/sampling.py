"""What rows may ask for beyond a plain temperature: changed logits and filters.

A filter is a threshold on the scaled logit (`sampler.filter_floor`), found without sorting:

    change_logits    single logits are biased or forbidden     \\ where a row asks
    count_tokens     what its sequence holds, token by token   /
    prepare_rows     penalties; the best logit; a floor that min-p sets, and a lower bound of that of top-k
    bracket_nuclei   of rows with top-p alone: two values between which the floor lies; then two closer ones
    find_floors      the values that are left become a list, among which the last program of a row finds it
    draw_tokens      (in jit/step.py) the draw above the floor
    score_tokens     (in jit/scores.py) log-probabilities

Programs are (row, chunk); the last of a row to arrive concludes. Masses are exp(x - best) in fixed point, so
no sum hangs on the order of arrival.

`packed` is int32: [4, S] slot (-1: padding), index before the one to draw, row of `counts` (-1: no
penalties), bits of float32 log(min_p) (-inf: none); [3, E] row, token and float32 bits of changes; [Q] rows
with log-probabilities.
`states` is float32 [5, S]: floor, best, bound below the floor, bound above it, min-p's own floor.

Shapes: S rows, V vocabulary, C chunks of it, G groups of it, L history, E changes, K values, F of them few.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.codes import _ordered, _threshold
from lm_engine.triton.jit.order import after_predecessors


@triton.jit
def _unordered(key):
    """The float32 whose `_ordered` it is; -inf for 0."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return tl.where(key == 0, -float("inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _fixed_mass(scaled_V, best, unit):
    """exp(x - best) in units; 0 for -inf."""
    return (tl.exp(scaled_V - best) * unit).to(tl.int64)


@triton.jit
def _needed_mass(total, top_p):
    return tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)


@triton.jit
def _row_params(packed_ptr, floats_ptr, top_k_ptr, row, float_stride, min_temperature):
    """Temperature, top_p (1: off) and top_k (0: off); off for greedy rows."""
    slot = tl.maximum(tl.load(packed_ptr + row), 0).to(tl.int64)
    temperature = tl.load(floats_ptr + slot * float_stride)
    is_drawn = temperature > 0
    top_p = tl.where(is_drawn, tl.load(floats_ptr + slot * float_stride + 1), 1.0)
    top_k = tl.where(is_drawn, tl.load(top_k_ptr + slot), 0)
    return tl.maximum(temperature, min_temperature), top_p, top_k


@triton.jit
def _scaled(logits_V, temperature):
    return tl.div_rn(tl.where(logits_V == logits_V, logits_V, -float("inf")), temperature)


@triton.jit(do_not_specialize=["num_rows", "num_changes"])
def change_logits(
    logits_ptr, packed_ptr, num_rows, num_changes, V: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """Adds each change's value to its logit."""
    after_predecessors(PDL)
    change_E = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside_E = change_E < num_changes
    change_ptr = packed_ptr + 4 * num_rows
    row_E = tl.load(change_ptr + change_E, mask=inside_E, other=0).to(tl.int64)
    token_E = tl.load(change_ptr + num_changes + change_E, mask=inside_E, other=0)
    bits_E = tl.load(change_ptr + 2 * num_changes + change_E, mask=inside_E, other=0)
    value_E = bits_E.to(tl.float32, bitcast=True)
    tl.atomic_add(logits_ptr + row_E * V + token_E, value_E, mask=inside_E, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def count_tokens(
    packed_ptr,
    token_table_ptr,
    num_prompt_ptr,
    counts_ptr,
    num_rows,
    token_stride,
    V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part of its history). A count is twice the occurrences in the output, plus one for a
    token of the prompt."""
    after_predecessors(PDL)
    row = tl.program_id(0)
    counted = tl.load(packed_ptr + 2 * num_rows + row).to(tl.int64)
    length = tl.load(packed_ptr + num_rows + row) + 1
    start = tl.program_id(1) * BLOCK_L
    if (counted < 0) | (start >= length):
        return
    slot = tl.maximum(tl.load(packed_ptr + row), 0).to(tl.int64)
    num_prompt = tl.load(num_prompt_ptr + slot)
    index_L = start + tl.arange(0, BLOCK_L)
    inside_L = index_L < length
    token_L = tl.load(token_table_ptr + slot * token_stride + index_L, mask=inside_L, other=0)
    count_ptr_L = counts_ptr + counted * V + token_L
    one_L = tl.full([BLOCK_L], 1, tl.int32)
    tl.atomic_or(count_ptr_L, one_L, mask=inside_L & (index_L < num_prompt), sem="relaxed")
    tl.atomic_add(count_ptr_L, one_L + 1, mask=inside_L & (index_L >= num_prompt), sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def prepare_rows(
    logits_ptr,
    packed_ptr,
    floats_ptr,
    top_k_ptr,
    counts_ptr,
    groups_ptr,
    arrivals_ptr,
    states_ptr,
    num_rows,
    float_stride,
    min_temperature,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """Penalties as `sampler.penalise`, in place; leaves zeros in `counts`. Then, of rows with filters, all
    states. The k-th largest of the groups' maxima bounds the k-th largest logit from below."""
    after_predecessors(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature, top_p, top_k = _row_params(
        packed_ptr, floats_ptr, top_k_ptr, row, float_stride, min_temperature
    )
    log_min_p = tl.load(packed_ptr + 3 * num_rows + row).to(tl.float32, bitcast=True)
    tokens_V = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_V = tokens_V < V
    logit_ptr_V = logits_ptr + row.to(tl.int64) * V + tokens_V
    logits_V = tl.load(logit_ptr_V, mask=inside_V, other=-float("inf"))
    counted = tl.load(packed_ptr + 2 * num_rows + row).to(tl.int64)
    if counted >= 0:
        slot = tl.maximum(tl.load(packed_ptr + row), 0).to(tl.int64)
        count_ptr_V = counts_ptr + counted * V + tokens_V
        count_V = tl.load(count_ptr_V, mask=inside_V, other=0)
        tl.store(count_ptr_V, tl.zeros_like(count_V), mask=inside_V & (count_V != 0))
        presence = tl.load(floats_ptr + slot * float_stride + 3)
        frequency = tl.load(floats_ptr + slot * float_stride + 4)
        repetition = tl.load(floats_ptr + slot * float_stride + 5)
        output_V = count_V >> 1
        repeated_V = tl.where(logits_V > 0, tl.div_rn(logits_V, repetition), logits_V * repetition)
        logits_V = tl.where(count_V > 0, repeated_V, logits_V)
        logits_V = logits_V - frequency * output_V.to(tl.float32)
        logits_V = logits_V - tl.where(output_V > 0, presence, 0.0)
        tl.store(logit_ptr_V, logits_V, mask=inside_V & (count_V != 0))
    filters = (top_k > 0) | (top_p < 1) | (log_min_p > -float("inf"))
    if filters == 0:
        tl.store(states_ptr + row, -float("inf"))
        return
    scaled_V = _scaled(logits_V, temperature)
    largest_G = tl.max(tl.reshape(scaled_V, [GROUPS, BLOCK_V // GROUPS]), axis=1)
    row_groups_ptr = groups_ptr + row * (NUM_CHUNKS * GROUPS)
    tl.store(row_groups_ptr + chunk * GROUPS + tl.arange(0, GROUPS), largest_G)
    tl.debug_barrier()  # all threads' groups are out before one of them says so
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") != NUM_CHUNKS - 1:
        return
    tl.store(arrivals_ptr + row, 0)
    groups_G = tl.arange(0, BLOCK_G)
    groups_G = tl.load(
        row_groups_ptr + groups_G,
        mask=groups_G < NUM_CHUNKS * GROUPS,
        other=-float("inf"),
        cache_modifier=".cg",
    )
    best = tl.max(groups_G, axis=0)
    has_min_p = log_min_p > -float("inf")
    own_floor = tl.where(has_min_p, best + tl.where(has_min_p, log_min_p, 0.0), -float("inf"))
    lower = own_floor
    if top_k > 0:
        ones_G = tl.full([BLOCK_G], 1.0, tl.float32)
        # Half of the bits: a bound a little lower than it could be, after half of the sums.
        bound = _threshold(_ordered(groups_G), ones_G, top_k.to(tl.float32), 16)
        lower = tl.maximum(lower, _unordered(bound))
    elif top_p < 1:
        # Less than 1 - p of the mass lies further below the best, which has a mass of 1 itself.
        lower = tl.maximum(lower, best - tl.log(V / (1 - top_p)) - 0.1)
    tl.store(states_ptr + row, own_floor)
    tl.store(states_ptr + num_rows + row, best)
    tl.store(states_ptr + 2 * num_rows + row, lower)
    tl.store(states_ptr + 3 * num_rows + row, float("inf"))
    tl.store(states_ptr + 4 * num_rows + row, own_floor)


@triton.jit(do_not_specialize=["num_rows"])
def bracket_nuclei(
    logits_ptr,
    packed_ptr,
    floats_ptr,
    top_k_ptr,
    parts_ptr,
    arrivals_ptr,
    states_ptr,
    masses_ptr,
    num_rows,
    float_stride,
    min_temperature,
    unit,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EDGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of rows with top-p and no top-k: brings the bounds EDGES times as close to each other. `masses` is
    int64 [2, S]: that at and above the upper bound, and that of all values which min-p keeps."""
    after_predecessors(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature, top_p, top_k = _row_params(
        packed_ptr, floats_ptr, top_k_ptr, row, float_stride, min_temperature
    )
    if (top_p >= 1) | (top_k > 0):
        return
    best = tl.load(states_ptr + num_rows + row)
    own_floor = tl.load(states_ptr + 4 * num_rows + row)
    if (tl.abs(best) < float("inf")) == 0:
        return
    lower = tl.load(states_ptr + 2 * num_rows + row)
    upper = tl.load(states_ptr + 3 * num_rows + row)
    highest = tl.minimum(upper, best)
    step = (highest - lower) / EDGES
    tokens_V = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    logits_V = tl.load(logits_ptr + row.to(tl.int64) * V + tokens_V, mask=tokens_V < V, other=-float("inf"))
    scaled_V = _scaled(logits_V, temperature)
    mass_V = tl.where(scaled_V >= own_floor, _fixed_mass(scaled_V, best, unit), 0)
    part_ptr = parts_ptr + (row * NUM_CHUNKS + chunk) * (EDGES + 1)
    for i in tl.range(0, EDGES):
        edge = tl.where(i == EDGES - 1, lower, highest - step * (i + 1))
        tl.store(part_ptr + i, tl.sum(tl.where(scaled_V >= edge, mass_V, 0), axis=0))
    tl.store(part_ptr + EDGES, tl.sum(mass_V, axis=0))
    tl.debug_barrier()  # all parts are out before one thread says so
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") != NUM_CHUNKS - 1:
        return
    tl.store(arrivals_ptr + row, 0)
    chunks_C = tl.arange(0, BLOCK_C)
    row_ptr_C = parts_ptr + (row * NUM_CHUNKS + chunks_C) * (EDGES + 1)
    inside_C = chunks_C < NUM_CHUNKS
    total = tl.sum(tl.load(row_ptr_C + EDGES, mask=inside_C, other=0, cache_modifier=".cg"), axis=0)
    needed = _needed_mass(total, top_p)
    above = tl.where(upper < float("inf"), tl.load(masses_ptr + row), 0)
    found = own_floor
    is_found = tl.full([], 0, tl.int32)
    for i in tl.range(0, EDGES):
        edge = tl.where(i == EDGES - 1, lower, highest - step * (i + 1))
        mass = tl.sum(tl.load(row_ptr_C + i, mask=inside_C, other=0, cache_modifier=".cg"), axis=0)
        reached = (mass >= needed).to(tl.int32)
        found = tl.where((is_found == 0) & (reached != 0), edge, found)
        is_found = is_found | reached
        above = tl.where(is_found != 0, above, mass)
        upper = tl.where(is_found != 0, upper, edge)
    tl.store(states_ptr + 2 * num_rows + row, found)
    tl.store(states_ptr + 3 * num_rows + row, upper)
    tl.store(masses_ptr + row, above)
    tl.store(masses_ptr + num_rows + row, total)


@triton.jit
def _row_amount(
    row_ptr, temperature, best, unit, key, BY_MASS: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr
):
    """How many of a row's values are at or above the key, or what their mass is."""
    amount_V = tl.zeros([BLOCK_V], tl.int64)
    for start in tl.range(0, V, BLOCK_V):
        tokens_V = start + tl.arange(0, BLOCK_V)
        logits_V = tl.load(row_ptr + tokens_V, mask=tokens_V < V, other=-float("inf"))
        scaled_V = _scaled(logits_V, temperature)
        keeps_V = (_ordered(scaled_V) >= key) & (scaled_V > -float("inf"))
        if BY_MASS:
            amount_V += tl.where(keeps_V, _fixed_mass(scaled_V, best, unit), 0)
        else:
            amount_V += keeps_V.to(tl.int64)
    return tl.sum(amount_V, axis=0)


@triton.jit
def _row_threshold(
    row_ptr,
    temperature,
    best,
    unit,
    least,
    end,
    needed,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """As `_threshold` over a whole row, where it is known to be from `least` on and below `end`."""
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in tl.range(0, 32):
        candidate = threshold | bit
        bit = bit >> 1
        reached = candidate <= least
        if (candidate > least) & (candidate < end):
            amount = _row_amount(row_ptr, temperature, best, unit, candidate, BY_MASS, V, BLOCK_V)
            reached = amount >= needed
        threshold = tl.where(reached, candidate, threshold)
    return tl.maximum(threshold, least)


@triton.jit
def _floor_of_few(values_ptr, num_values, best, unit, top_k, top_p, above, total, BLOCK_F: tl.constexpr):
    """Each value beside all others: it survives if fewer than k, and less than p of the mass, are larger."""
    index_F = tl.arange(0, BLOCK_F)
    keeps_F = index_F < num_values
    value_F = tl.load(values_ptr + index_F, mask=keeps_F, other=-float("inf"), cache_modifier=".cg")
    mass_F = _fixed_mass(value_F, best, unit)
    larger_FF = value_F[None, :] > value_F[:, None]
    if top_k > 0:
        keeps_F = keeps_F & (tl.sum(larger_FF.to(tl.int32), axis=1) < top_k)
        total = tl.sum(tl.where(keeps_F, mass_F, 0), axis=0)
    if top_p < 1:
        needed = _needed_mass(total, top_p) - above
        keeps_F = keeps_F & (tl.sum(tl.where(larger_FF, mass_F[None, :], 0), axis=1) < needed)
    return tl.min(tl.where(keeps_F, value_F, best), axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def find_floors(
    logits_ptr,
    packed_ptr,
    floats_ptr,
    top_k_ptr,
    values_ptr,
    num_values_ptr,
    arrivals_ptr,
    states_ptr,
    masses_ptr,
    num_rows,
    float_stride,
    min_temperature,
    unit,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """The floors of rows with top-k or top-p. `values` [S, K] takes what lies between a row's bounds, in the
    order of arrival. A few are compared with each other; more are searched bit by bit; more than K (thousands
    of equals, or a top-k of thousands) are looked up in the row again and again. `num_values` is zero before
    and after."""
    after_predecessors(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature, top_p, top_k = _row_params(
        packed_ptr, floats_ptr, top_k_ptr, row, float_stride, min_temperature
    )
    if (top_p >= 1) & (top_k == 0):
        return
    best = tl.load(states_ptr + num_rows + row)
    if (tl.abs(best) < float("inf")) == 0:
        return
    lower = tl.load(states_ptr + 2 * num_rows + row)
    upper = tl.load(states_ptr + 3 * num_rows + row)
    row_ptr = logits_ptr + row.to(tl.int64) * V
    tokens_V = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    logits_V = tl.load(row_ptr + tokens_V, mask=tokens_V < V, other=-float("inf"))
    scaled_V = _scaled(logits_V, temperature)
    listed_V = (scaled_V >= lower) & (scaled_V < upper) & (scaled_V > -float("inf"))
    row_values_ptr = values_ptr + row * BLOCK_K
    num_listed = tl.sum(listed_V.to(tl.int32), axis=0)
    if num_listed > 0:
        first = tl.atomic_add(num_values_ptr + row, num_listed, sem="relaxed")
        place_V = first + tl.cumsum(listed_V.to(tl.int32), axis=0) - 1
        tl.store(row_values_ptr + place_V, scaled_V, mask=listed_V & (place_V < BLOCK_K))
    tl.debug_barrier()  # all threads' values are out before one of them says so
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") != NUM_CHUNKS - 1:
        return
    tl.store(arrivals_ptr + row, 0)
    num_values = tl.load(num_values_ptr + row, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(num_values_ptr + row, 0)
    floor = _ordered(tl.load(states_ptr + 4 * num_rows + row))
    above = tl.full([], 0, tl.int64)
    total = tl.full([], 0, tl.int64)
    if top_k == 0:
        above = tl.load(masses_ptr + row)
        total = tl.load(masses_ptr + num_rows + row)
    if num_values <= BLOCK_F:
        floor = _ordered(
            _floor_of_few(row_values_ptr, num_values, best, unit, top_k, top_p, above, total, BLOCK_F)
        )
    elif num_values <= BLOCK_K:
        values_K = tl.arange(0, BLOCK_K)
        values_K = tl.load(
            row_values_ptr + values_K, mask=values_K < num_values, other=-float("inf"), cache_modifier=".cg"
        )
        keys_K = tl.where(values_K > -float("inf"), _ordered(values_K), 0)
        mass_K = _fixed_mass(values_K, best, unit)
        if top_k > 0:
            ones_K = tl.full([BLOCK_K], 1, tl.int32)
            floor = tl.maximum(floor, _threshold(keys_K, ones_K, top_k))
            total = tl.sum(tl.where(keys_K >= floor, mass_K, 0), axis=0)
        if top_p < 1:
            needed = _needed_mass(total, top_p) - above
            floor = tl.maximum(floor, _threshold(keys_K, mass_K, needed))
    else:
        # Lower and upper bound top-k's own floor, or that of all.
        least = tl.maximum(floor, _ordered(lower))
        end = _ordered(upper)
        if top_k > 0:
            floor = _row_threshold(row_ptr, temperature, best, unit, least, end, top_k, False, V, BLOCK_R)
            total = _row_amount(row_ptr, temperature, best, unit, floor, True, V, BLOCK_R)
            least = floor
        if top_p < 1:
            needed = _needed_mass(total, top_p)
            floor = _row_threshold(row_ptr, temperature, best, unit, least, end, needed, True, V, BLOCK_R)
    tl.store(states_ptr + row, _unordered(floor))
