"""Log-probabilities of drawn tokens and of the largest beside them, in one launch.

Shapes: V vocabulary, C chunks of it, Q rows that want them, N largest, T candidates for them.
"""

import triton
import triton.language as tl

from lm_engine.triton.jit.order import after_predecessors


@triton.jit(do_not_specialize=["num_rows", "num_changes", "num_top"])
def score_tokens(
    logits_ptr,
    packed_ptr,
    tokens_ptr,
    parts_ptr,
    ranks_ptr,
    keys_ptr,
    arrivals_ptr,
    scores_ptr,
    ids_ptr,
    num_rows,
    num_changes,
    num_top,
    min_logprob,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """`sampler.log_probabilities` of rows that want them, program (one of Q, chunk). `packed`: as in
    sampling.py. `scores` is float32 [Q, 1 + N]: the drawn token's, then the N = `num_top` largest; `ids`
    int64 [Q, 1 + N]: its rank, then their tokens, of equals the first. A chunk hands in its own N largest."""
    after_predecessors(PDL)
    wanted = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(packed_ptr + 4 * num_rows + 3 * num_changes + wanted).to(tl.int64)
    row_ptr = logits_ptr + row * V
    drawn = tl.load(row_ptr + tl.load(tokens_ptr + row))
    tokens_V = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_V = tokens_V < V
    logits_V = tl.load(row_ptr + tokens_V, mask=inside_V, other=-float("inf"))
    is_nan = tl.max((logits_V != logits_V).to(tl.int32), axis=0)
    best = tl.max(tl.where(logits_V == logits_V, logits_V, -float("inf")), axis=0)
    best = tl.where(is_nan > 0, float("inf"), best)
    base = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    part = wanted * NUM_CHUNKS + chunk
    tl.store(parts_ptr + part * 2, best)
    tl.store(parts_ptr + part * 2 + 1, tl.sum(tl.exp(tl.minimum(logits_V - base, 0.0)), axis=0))
    tl.store(ranks_ptr + part, tl.sum((logits_V > drawn).to(tl.int32), axis=0))
    # Larger value, then smaller token: no two keys are equal.
    bits_V = logits_V.to(tl.int32, bitcast=True)
    high_V = (bits_V ^ ((bits_V >> 31) & 0x7FFFFFFF)).to(tl.int64)
    none = tl.full([BLOCK_V], -(2**62) * 2, tl.int64)
    key_V = tl.where(inside_V, (high_V << 32) | (0x7FFFFFFF - tokens_V).to(tl.int64), none)
    for i in tl.range(0, num_top):
        largest = tl.max(key_V, axis=0)
        tl.store(keys_ptr + part * num_top + i, largest)
        key_V = tl.where(key_V == largest, none, key_V)
    tl.debug_barrier()  # all parts are out before one thread says so
    if tl.atomic_add(arrivals_ptr + wanted, 1, sem="acq_rel") != NUM_CHUNKS - 1:
        return
    tl.store(arrivals_ptr + wanted, 0)
    chunks_C = tl.arange(0, BLOCK_C)
    inside_C = chunks_C < NUM_CHUNKS
    part_C = wanted * NUM_CHUNKS + chunks_C
    best_C = tl.load(parts_ptr + part_C * 2, mask=inside_C, other=-float("inf"), cache_modifier=".cg")
    sum_C = tl.load(parts_ptr + part_C * 2 + 1, mask=inside_C, other=0.0, cache_modifier=".cg")
    best = tl.max(best_C, axis=0)
    is_finite = tl.abs(best) < float("inf")
    base = tl.where(is_finite, best, 0.0)
    sum_C = tl.where(best_C > -float("inf"), sum_C * tl.exp(tl.minimum(best_C - base, 0.0)), 0.0)
    log_total = tl.log(tl.where(is_finite, tl.sum(sum_C, axis=0), 1.0))
    score = tl.where(is_finite, tl.maximum(drawn - base - log_total, min_logprob), min_logprob)
    rank = tl.sum(tl.load(ranks_ptr + part_C, mask=inside_C, other=0, cache_modifier=".cg"), axis=0)
    # Whatever is raised to the least shares its rank.
    if score <= min_logprob:
        rank = tl.full([], 0, tl.int32)
        if is_finite:
            for start in tl.range(0, V, BLOCK_V):
                tokens_V = start + tl.arange(0, BLOCK_V)
                logits_V = tl.load(row_ptr + tokens_V, mask=tokens_V < V, other=-float("inf"))
                rank += tl.sum((logits_V - base - log_total > min_logprob).to(tl.int32), axis=0)
    scores_ptr += wanted * (1 + num_top)
    ids_ptr += wanted * (1 + num_top)
    tl.store(scores_ptr, score)
    tl.store(ids_ptr, (rank + 1).to(tl.int64))
    parts_T = tl.arange(0, BLOCK_T)
    none = tl.full([BLOCK_T], -(2**62) * 2, tl.int64)
    key_T = tl.load(
        keys_ptr + wanted * NUM_CHUNKS * num_top + parts_T,
        mask=parts_T < NUM_CHUNKS * num_top,
        other=0,
        cache_modifier=".cg",
    )
    key_T = tl.where(parts_T < NUM_CHUNKS * num_top, key_T, none)
    for i in tl.range(0, num_top):
        largest = tl.max(key_T, axis=0)
        high = (largest >> 32).to(tl.int32)
        value = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        value = tl.where(is_finite, tl.maximum(value - base - log_total, min_logprob), min_logprob)
        tl.store(scores_ptr + 1 + i, value)
        tl.store(ids_ptr + 1 + i, 0x7FFFFFFF - (largest & 0x7FFFFFFF))
        key_T = tl.where(key_T == largest, none, key_T)
