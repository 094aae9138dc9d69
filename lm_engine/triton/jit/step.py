"""The two ends of a decode step: inputs from the request table, and the next token back into it.

Shapes: R rows, A position axes, M blocks of a sequence, V vocabulary, C chunks of it.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors


@triton.jit(do_not_specialize=["num_rows"])
def decode_inputs(
    packed_ptr,
    token_table_ptr,
    positions_ptr,
    num_prompt_ptr,
    position_delta_ptr,
    block_tables_ptr,
    token_ids_ptr,
    step_positions_ptr,
    lengths_ptr,
    slot_mapping_ptr,
    step_tables_ptr,
    num_rows,
    token_stride,
    position_stride,
    axis_stride,
    table_stride,
    A: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A row a program. `packed` is [4, R]: slot (-1: padding), index of the token to compute, a block to
    append (0: none) and its column. A padding row computes one token into the scratch block."""
    row = tl.program_id(0)
    slot = tl.load(packed_ptr + row).to(tl.int64)
    index = tl.load(packed_ptr + num_rows + row)
    new_block = tl.load(packed_ptr + 2 * num_rows + row)
    new_column = tl.load(packed_ptr + 3 * num_rows + row)
    pads = slot < 0
    slot = tl.where(pads, 0, slot)
    token = tl.load(token_table_ptr + slot * token_stride + index)
    tl.store(token_ids_ptr + row, tl.where(pads, 0, token).to(tl.int64))
    generated = index >= tl.load(num_prompt_ptr + slot)
    moved = index.to(tl.float32) + tl.load(position_delta_ptr + slot)
    for axis in tl.static_range(A):
        known = tl.load(positions_ptr + axis * axis_stride + slot * position_stride + index)
        tl.store(step_positions_ptr + axis * num_rows + row, tl.where(generated, moved, known))
    tl.store(lengths_ptr + row, index + 1)
    table_ptr = block_tables_ptr + slot * table_stride
    own = index // BLOCK_SIZE
    block = tl.load(table_ptr + own)
    appends = (new_block > 0) & (pads == 0)
    block = tl.where(appends & (own == new_column), new_block, block)
    block = tl.where(pads, 0, block).to(tl.int64)
    tl.store(slot_mapping_ptr + row, block * BLOCK_SIZE + index % BLOCK_SIZE)
    if appends:
        tl.store(table_ptr + new_column, new_block)
    for start in tl.range(0, own + 1, BLOCK_M):
        columns_M = start + tl.arange(0, BLOCK_M)
        blocks_M = tl.load(table_ptr + columns_M, mask=columns_M <= own, other=0)
        blocks_M = tl.where(appends & (columns_M == new_column), new_block, blocks_M)
        tl.store(
            step_tables_ptr + row.to(tl.int64) * table_stride + columns_M, blocks_M, mask=columns_M <= own
        )


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, tokens_V):
    """As lm_engine/random.py, bit for bit up to the logarithms."""
    key = _mix64(_mix64(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    hash_V = _mix32(_mix32(tokens_V.to(tl.uint32) + low) ^ high)
    uniform_V = ((hash_V >> 1).to(tl.int32).to(tl.float32) + 0.5) * (0.5**31)
    uniform_V = tl.minimum(uniform_V, 1 - 0.5**24)
    # -log1p(-u), exact to a few units: the rounding of 1 - u divides out (Kahan).
    rest_V = 1 - uniform_V
    quotient_V = tl.div_rn(uniform_V, tl.where(rest_V == 1, 1.0, 1 - rest_V))
    exponential_V = tl.where(rest_V == 1, uniform_V, -tl.log(rest_V) * quotient_V)
    return -tl.log(exponential_V)


@triton.jit(do_not_specialize=["num_rows"])
def draw_tokens(
    logits_ptr,
    packed_ptr,
    floats_ptr,
    seeds_ptr,
    token_table_ptr,
    part_values_ptr,
    part_tokens_ptr,
    arrivals_ptr,
    floors_ptr,
    results_ptr,
    num_rows,
    float_stride,
    token_stride,
    min_temperature,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, chunk): greedy or by temperature, among the scaled logits at or above the row's floor
    (None: among all). The chunk that arrives last picks the row's token and writes it to the table. `results`
    is [2, R]: token, and whether the row's best logit was finite."""
    after_predecessors(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(packed_ptr + row).to(tl.int64)
    next_index = tl.load(packed_ptr + num_rows + row).to(tl.int64) + 1
    pads = slot < 0
    slot = tl.where(pads, 0, slot)
    temperature = tl.load(floats_ptr + slot * float_stride)
    tokens_V = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    logits_V = tl.load(logits_ptr + row.to(tl.int64) * V + tokens_V, mask=tokens_V < V, other=-float("inf"))
    is_nan = tl.max((logits_V != logits_V).to(tl.int32), axis=0)
    best = tl.max(tl.where(logits_V == logits_V, logits_V, -float("inf")), axis=0)
    scores_V = logits_V
    if temperature > 0:
        scores_V = tl.div_rn(logits_V, tl.maximum(temperature, min_temperature))
        noise_V = _gumbel(tl.load(seeds_ptr + slot), next_index, tokens_V)
        if floors_ptr is None:
            scores_V += noise_V
        else:
            survives_V = scores_V >= tl.load(floors_ptr + row)
            scores_V = tl.where(survives_V, scores_V + noise_V, -float("inf"))
    scores_V = tl.where(logits_V == logits_V, scores_V, -float("inf"))
    part = row * NUM_CHUNKS + chunk
    tl.store(part_tokens_ptr + part, chunk * BLOCK_V + tl.argmax(scores_V, axis=0))
    tl.store(part_values_ptr + part * 2, tl.max(scores_V, axis=0))
    tl.store(part_values_ptr + part * 2 + 1, tl.where(is_nan > 0, float("inf"), best))
    tl.debug_barrier()  # all threads' parts are out before one of them says so
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") != NUM_CHUNKS - 1:
        return
    tl.store(arrivals_ptr + row, 0)
    chunks_C = tl.arange(0, BLOCK_C)
    inside_C = chunks_C < NUM_CHUNKS
    parts_C = row * NUM_CHUNKS + chunks_C
    value_C = tl.load(part_values_ptr + parts_C * 2, mask=inside_C, other=-float("inf"))
    best_C = tl.load(part_values_ptr + parts_C * 2 + 1, mask=inside_C, other=-float("inf"))
    winner = tl.argmax(value_C, axis=0)
    token = tl.load(part_tokens_ptr + row * NUM_CHUNKS + winner)
    valid = tl.abs(tl.max(best_C, axis=0)) < float("inf")
    token = tl.where(valid, token, 0)
    tl.store(results_ptr + row, token)
    tl.store(results_ptr + num_rows + row, valid.to(tl.int32))
    if pads == 0:
        tl.store(token_table_ptr + slot * token_stride + next_index, token)
