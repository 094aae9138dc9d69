"""Attention of mixed steps over the paged cache for Hopper: a warp brings queries, keys and values through
the copy engine, two groups of warps compute, each for half of a tile's rows, or for each second block of
keys where the rows of one half are all there are.

Shapes: M = query rows of half a tile (queries x heads of a group), H heads of a group, L keys of a block, D
head size, I items. Softmax in base 2; `scale` holds log2(e).

    buffers   queries: a half for each group of warps; keys, values: STAGES blocks each. In panels of 64 dims,
              which the copy engine swizzles; a page of any size fills its rows of each panel
    ready     it is there: one arrival, of the copies, by their bytes
    empty     it has been read: an arrival of each group that computes
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def _bring_block(
    keys,
    values,
    k_panels,
    v_panels,
    k_barriers,
    v_barriers,
    table_ptr,
    column,
    block,
    page,
    last_page,
    D: gl.constexpr,
    BLOCK_L: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Keys beyond the last page are masked: any will do."""
    k_ready, k_empty = k_barriers
    v_ready, v_empty = v_barriers
    PAGES: gl.constexpr = BLOCK_L // BLOCK_SIZE
    PANELS: gl.constexpr = D // 64
    stage = block % STAGES
    was_full = ((block // STAGES) & 1) ^ 1
    mbarrier.wait(k_empty.index(stage), was_full)
    mbarrier.expect(k_ready.index(stage), BLOCK_L * D * 2)
    for j in gl.static_range(PAGES):
        place = gl.load(table_ptr + gl.minimum(page + j, last_page)) * BLOCK_SIZE
        for panel in gl.static_range(PANELS):
            buffer = k_panels.index((stage * PANELS + panel) * PAGES + j)
            tma.async_copy_global_to_shared(keys, [place, column + panel * 64], k_ready.index(stage), buffer)
    mbarrier.wait(v_empty.index(stage), was_full)
    mbarrier.expect(v_ready.index(stage), BLOCK_L * D * 2)
    for j in gl.static_range(PAGES):
        place = gl.load(table_ptr + gl.minimum(page + j, last_page)) * BLOCK_SIZE
        for panel in gl.static_range(PANELS):
            buffer = v_panels.index((stage * PANELS + panel) * PAGES + j)
            tma.async_copy_global_to_shared(
                values, [place, column + panel * 64], v_ready.index(stage), buffer
            )


@gluon.jit
def _bring(
    queries,
    keys,
    values,
    q_panels,
    k_panels,
    v_panels,
    q_barriers,
    k_barriers,
    v_barriers,
    tables_ptr,
    items_ptr,
    first_item,
    end_item,
    table_stride,
    H: gl.constexpr,
    D: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_L: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Older keys are under way before the queries are known."""
    q_ready, q_empty = q_barriers
    PAGES: gl.constexpr = BLOCK_L // BLOCK_SIZE
    PANELS: gl.constexpr = D // 64
    if PDL and first_item == end_item:
        gdc_wait()
    block = 0
    for item in range(first_item, end_item):
        fields = items_ptr + item * 16
        row = gl.load(fields)
        token = gl.load(fields + 1)
        num_queries = gl.load(fields + 2)
        group = gl.load(fields + 4)
        first = gl.load(fields + 5)
        end = gl.load(fields + 6)
        num_old = gl.load(fields + 9)
        table_ptr = tables_ptr + row.to(gl.int64) * table_stride
        last_page = (end - 1) // BLOCK_SIZE
        num_blocks = (end - first + BLOCK_L - 1) // BLOCK_L
        early = 0
        if PDL and item == first_item:
            early = gl.minimum(gl.maximum(gl.minimum(num_old, end) - first, 0) // BLOCK_L, STAGES)
            for i in range(0, early):
                _bring_block(
                    keys, values, k_panels, v_panels, k_barriers, v_barriers, table_ptr, group * D, i,
                    first // BLOCK_SIZE + i * PAGES, last_page, D, BLOCK_L, BLOCK_SIZE, STAGES,
                )  # fmt: skip
            gdc_wait()
            gdc_launch_dependents()
        mbarrier.wait(q_empty, ((item - first_item) & 1) ^ 1)
        mbarrier.expect(q_ready, 2 * HALF * BLOCK_H * D * 2)
        for half in gl.static_range(2):
            half_token = token + half * gl.where(num_queries > HALF, HALF, 0)
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    queries,
                    [half_token, group * H, panel * 64],
                    q_ready,
                    q_panels.index(half * PANELS + panel),
                )
        for i in range(early, num_blocks):
            _bring_block(
                keys, values, k_panels, v_panels, k_barriers, v_barriers, table_ptr, group * D, block + i,
                first // BLOCK_SIZE + i * PAGES, last_page, D, BLOCK_L, BLOCK_SIZE, STAGES,
            )  # fmt: skip
        block += num_blocks


@gluon.jit
def _soften(scores_ML, seen_M, best_M, mass_M, index_L, scale, MASKED: gl.constexpr):
    """Weights of a block's keys, and best score, mass and what older sums shrink to with them. Not MASKED:
    every row sees them all."""
    if MASKED:
        scores_ML = gl.where(index_L[None, :] <= seen_M[:, None], scores_ML, -float("inf"))
    # The scale is positive: it is applied once a row, and in the exponent, where it costs nothing.
    new_best_M = gl.maximum(best_M, gl.max(scores_ML, axis=1) * scale)
    origin_M = new_best_M
    if MASKED:
        origin_M = gl.where(new_best_M == -float("inf"), 0.0, new_best_M)
    weights_ML = gl.exp2(scores_ML * scale - origin_M[:, None])
    shrink_M = gl.exp2(best_M - origin_M)
    return weights_ML, new_best_M, mass_M * shrink_M + gl.sum(weights_ML, axis=1), shrink_M


@gluon.jit
def _pass_over(block, k_barriers, v_barriers, STAGES: gl.constexpr):
    """A block that the other group reads: a phase ends with the arrivals of both."""
    k_ready, k_empty = k_barriers
    v_ready, v_empty = v_barriers
    stage, phase = block % STAGES, (block // STAGES) & 1
    mbarrier.wait(k_ready.index(stage), phase)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.wait(v_ready.index(stage), phase)
    mbarrier.arrive(v_empty.index(stage), count=1)


@gluon.jit
def _step(
    block,
    stride,
    next_block,
    q_buffer,
    k_blocks,
    v_blocks,
    k_barriers,
    v_barriers,
    sum_MD,
    weights_ML,
    best_M,
    mass_M,
    seen_M,
    index_L,
    scale,
    no_scores_ML,
    SUMS: gl.constexpr,
    WEIGHTS: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Scores of a block and their weights, while those of the block before meet its values."""
    k_ready, k_empty = k_barriers
    v_ready, v_empty = v_barriers
    if stride == 2:
        _pass_over(block - 1, k_barriers, v_barriers, STAGES)
    stage, before = block % STAGES, (block - stride) % STAGES
    mbarrier.wait(k_ready.index(stage), (block // STAGES) & 1)
    scores = warpgroup_mma(
        q_buffer, k_blocks.index(stage).permute((1, 0)), no_scores_ML, use_acc=False, is_async=True
    )
    mbarrier.wait(v_ready.index(before), ((block - stride) // STAGES) & 1)
    sums = warpgroup_mma(weights_ML, v_blocks.index(before), sum_MD, is_async=True)
    scores_ML = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    softened_ML, best_M, mass_M, shrink_M = _soften(scores_ML, seen_M, best_M, mass_M, index_L, scale, MASKED)
    softened_ML = gl.convert_layout(softened_ML.to(weights_ML.dtype), WEIGHTS)
    # A branch in front of what waits for the sums: the assembler moves the weights behind it otherwise. Not
    # for a block that may only be brought when values are empty for which the other group waits.
    next_stage, next_phase = next_block % STAGES, (next_block // STAGES) & 1
    mbarrier.wait(k_ready.index(next_stage), next_phase, pred=next_block > block)
    sum_MD, weights_ML = warpgroup_mma_wait(0, deps=(sums, softened_ML))
    mbarrier.arrive(v_empty.index(before), count=1)
    sum_MD = sum_MD * gl.convert_layout(shrink_M, gl.SliceLayout(1, SUMS))[:, None]
    return sum_MD, weights_ML, best_M, mass_M


@gluon.jit
def _store_result(
    sum_MD,
    mass_M,
    out_ptr,
    token,
    num_queries,
    group,
    H: gl.constexpr,
    BLOCK_H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    M: gl.constexpr,
    SUMS: gl.constexpr,
):
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    mass = gl.convert_layout(gl.where(mass_M > 0, mass_M, 1.0), gl.SliceLayout(1, SUMS))
    out_MD = gl.convert_layout((sum_MD / mass[:, None]).to(out_ptr.dtype.element_ty), ROWS)
    row_M = gl.arange(0, M, layout=gl.SliceLayout(1, ROWS))
    dims_D = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))
    query_M = row_M // BLOCK_H
    head_M = row_M % BLOCK_H
    place_M = (token + query_M).to(gl.int64) * (G * H * D) + (group * H + head_M) * D
    fits_M = (query_M < num_queries) & (head_M < H)
    gl.store(out_ptr + place_M[:, None] + dims_D[None, :], out_MD, mask=fits_M[:, None])


@gluon.jit
def _store_part(
    sum_MD,
    best_M,
    mass_M,
    part_sums_ptr,
    part_stats_ptr,
    place,
    num_queries,
    H: gl.constexpr,
    BLOCK_H: gl.constexpr,
    D: gl.constexpr,
    M: gl.constexpr,
    SUMS: gl.constexpr,
):
    """As the products lie: a thread's two values fill a sector with its neighbours'."""
    row_M = gl.arange(0, M, layout=gl.SliceLayout(1, SUMS))
    dims_D = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    query_M = row_M // BLOCK_H
    head_M = row_M % BLOCK_H
    fits_M = (query_M < num_queries) & (head_M < H)
    part_M = (place + query_M).to(gl.int64) * BLOCK_H + head_M
    gl.store(part_sums_ptr + part_M[:, None] * D + dims_D[None, :], sum_MD, mask=fits_M[:, None])
    gl.store(part_stats_ptr + part_M * 2, gl.convert_layout(best_M, gl.SliceLayout(1, SUMS)), mask=fits_M)
    gl.store(part_stats_ptr + part_M * 2 + 1, gl.convert_layout(mass_M, gl.SliceLayout(1, SUMS)), mask=fits_M)


@gluon.jit
def _compute(
    q_buffer,
    k_blocks,
    v_blocks,
    q_barriers,
    k_barriers,
    v_barriers,
    items_ptr,
    first_item,
    end_item,
    part_sums_ptr,
    part_stats_ptr,
    out_ptr,
    scale,
    H: gl.constexpr,
    BLOCK_H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    WHICH: gl.constexpr,
):
    """The group of warps WHICH of two."""
    q_ready, q_empty = q_barriers
    k_ready, k_empty = k_barriers
    v_ready, v_empty = v_barriers
    M: gl.constexpr = HALF * BLOCK_H
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_L, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty

    block = 0
    for item in range(first_item, end_item):
        fields = items_ptr + item * 16
        token = gl.load(fields + 1)
        num_queries = gl.load(fields + 2)
        first_seen = gl.load(fields + 3)
        group = gl.load(fields + 4)
        first = gl.load(fields + 5)
        end = gl.load(fields + 6)
        num_parts = gl.load(fields + 7)
        place = gl.load(fields + 8)
        is_narrow = num_queries <= HALF
        stride = gl.where(is_narrow, 2, 1)
        num_blocks = (end - first + BLOCK_L - 1) // BLOCK_L
        offset = gl.where(is_narrow, 0, WHICH * HALF)
        # A narrow item of one block is read by both, and seen by one.
        own = gl.minimum(gl.where(is_narrow, WHICH, 0), num_blocks - 1)
        sees = (own == WHICH) | (not is_narrow)

        row_M = gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
        seen_M = gl.where(sees, first_seen + offset + row_M // BLOCK_H, -1)
        index_L = first + gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, SCORES))
        best_M = gl.full([M], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        mass_M = gl.full([M], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
        sum_MD = gl.full([M, D], 0.0, gl.float32, layout=SUMS)
        no_scores_ML = gl.full([M, BLOCK_L], 0.0, gl.float32, layout=SCORES)

        if own == 1:
            _pass_over(block, k_barriers, v_barriers, STAGES)
        mbarrier.wait(q_ready, (item - first_item) & 1)
        stage = (block + own) % STAGES
        mbarrier.wait(k_ready.index(stage), ((block + own) // STAGES) & 1)
        scores = warpgroup_mma(
            q_buffer, k_blocks.index(stage).permute((1, 0)), no_scores_ML, use_acc=False, is_async=True
        )
        scores_ML = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        softened_ML, best_M, mass_M, _ = _soften(
            scores_ML, seen_M, best_M, mass_M, index_L + own * BLOCK_L, scale, True
        )
        weights_ML = gl.convert_layout(softened_ML.to(DTYPE), WEIGHTS)

        seen_by_all = gl.minimum(end, first_seen + offset + 1) - first
        whole = gl.maximum(seen_by_all // BLOCK_L, own + 1)
        for i in range(own + stride, whole, stride):
            next_i = gl.where((i + 1 < num_blocks) & (stride == 1), i + 1, i)
            sum_MD, weights_ML, best_M, mass_M = _step(
                block + i, stride, block + next_i, q_buffer, k_blocks, v_blocks, k_barriers, v_barriers,
                sum_MD, weights_ML, best_M, mass_M, seen_M, index_L, scale, no_scores_ML, SUMS,
                WEIGHTS, STAGES, False,
            )  # fmt: skip
        masked = own + gl.maximum((whole - own + stride - 1) // stride, 1) * stride
        for i in range(masked, num_blocks, stride):
            next_i = gl.where((i + 1 < num_blocks) & (stride == 1), i + 1, i)
            sum_MD, weights_ML, best_M, mass_M = _step(
                block + i, stride, block + next_i, q_buffer, k_blocks, v_blocks, k_barriers, v_barriers,
                sum_MD, weights_ML, best_M, mass_M, seen_M, index_L + i * BLOCK_L, scale, no_scores_ML, SUMS,
                WEIGHTS, STAGES, True,
            )  # fmt: skip
        mbarrier.arrive(q_empty, count=1)
        last = own + (num_blocks - 1 - own) // stride * stride
        stage = (block + last) % STAGES
        mbarrier.wait(v_ready.index(stage), ((block + last) // STAGES) & 1)
        sums = warpgroup_mma(weights_ML, v_blocks.index(stage), sum_MD, is_async=True)
        sum_MD = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        if last + 1 < num_blocks:
            _pass_over(block + last + 1, k_barriers, v_barriers, STAGES)
        block += num_blocks

        if num_parts == 1:
            _store_result(
                sum_MD,
                mass_M,
                out_ptr,
                token + offset,
                num_queries - offset,
                group,
                H,
                BLOCK_H,
                G,
                D,
                M,
                SUMS,
            )
        else:
            own_place = place + gl.where(is_narrow, WHICH * num_queries, offset)
            _store_part(
                sum_MD, best_M, mass_M, part_sums_ptr, part_stats_ptr, own_place, num_queries - offset, H,
                BLOCK_H, D, M, SUMS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["table_stride"])
def attend_walks(
    queries,
    keys,
    values,
    tables_ptr,
    items_ptr,
    ranges_ptr,
    part_sums_ptr,
    part_stats_ptr,
    out_ptr,
    table_stride,
    scale,
    H: gl.constexpr,
    BLOCK_H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_L: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program: its items, one after the other. All keys of a tile give the result itself, others what is to
    be merged."""
    # The plan is older than the direct predecessor.
    program = gl.program_id(0)
    first_item = gl.load(ranges_ptr + program)
    end_item = gl.load(ranges_ptr + program + 1)

    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    HALF: gl.constexpr = BLOCK_Q // 2
    PANELS: gl.constexpr = D // 64
    PAGES: gl.constexpr = STAGES * PANELS * (BLOCK_L // BLOCK_SIZE)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_halves = gl.allocate_shared_memory(DTYPE, [2, HALF * BLOCK_H, D], BLOCK)
    k_blocks = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_L, D], BLOCK)
    v_blocks = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_L, D], BLOCK)
    q_panels = q_halves._reinterpret(DTYPE, [2 * PANELS, HALF, BLOCK_H, 64], queries.layout)
    k_panels = k_blocks._reinterpret(DTYPE, [PAGES, BLOCK_SIZE, 64], keys.layout)
    v_panels = v_blocks._reinterpret(DTYPE, [PAGES, BLOCK_SIZE, 64], values.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    q_barriers = (q_ready, q_empty)
    k_barriers = (k_ready, k_empty)
    v_barriers = (v_ready, v_empty)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q_halves.index(0), k_blocks, v_blocks, q_barriers, k_barriers, v_barriers, items_ptr,
                    first_item, end_item, part_sums_ptr, part_stats_ptr, out_ptr, scale, H,
                    BLOCK_H, G, D, HALF, BLOCK_L, STAGES, 0,
                ),
            ),
            (
                _compute,
                (
                    q_halves.index(1), k_blocks, v_blocks, q_barriers, k_barriers, v_barriers, items_ptr,
                    first_item, end_item, part_sums_ptr, part_stats_ptr, out_ptr, scale, H,
                    BLOCK_H, G, D, HALF, BLOCK_L, STAGES, 1,
                ),
            ),
            (
                _bring,
                (
                    queries, keys, values, q_panels, k_panels, v_panels, q_barriers, k_barriers, v_barriers,
                    tables_ptr, items_ptr, first_item, end_item, table_stride, H, D, HALF, BLOCK_H, BLOCK_L,
                    BLOCK_SIZE, STAGES, PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
