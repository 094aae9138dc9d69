/* Packed linear layers: weights stored in panels of 16 output columns, y = x W^T + b. */
#include "kernels.h"

#include <string.h>
#include <sys/mman.h>

enum { MAX_BLOCK_ROWS = 192, BLOCK_BYTES = 256 * 1024, TASKS_PER_THREAD = 8, FEW_ROWS = 2 * TILE_ROWS };

/* Column c of a panel row: bfloat16 panels interleave columns j and j + 8 so that one load gives both vectors. */
INLINE int panel_column(enum dtype dtype, int c) {
    return dtype == F32 ? c : (c < 8 ? 2 * c : 2 * (c - 8) + 1);
}

struct packing {
    const char *weight;
    char *panels;
    int64_t stride, outputs, inputs;
    enum dtype dtype;
};

static void pack_panel(const void *context, int64_t p) {
    const struct packing *job = context;
    const size_t size = job->dtype == F32 ? 4 : 2;
    char *panel = job->panels + p * PANEL * job->inputs * size;
    for (int c = 0; c < PANEL; c++) {
        const int64_t row = p * PANEL + c, column = panel_column(job->dtype, c);
        const char *source = job->weight + row * job->stride * size;
        for (int64_t i = 0; i < job->inputs; i++) {
            char *target = panel + (i * PANEL + column) * size;
            if (row >= job->outputs) memset(target, 0, size);
            else memcpy(target, source + i * size, size);
        }
    }
}

/* Asks for large pages: a step reads all weights once, and with small ones walks a page table every 4 KiB. Before the
 * memory is first touched. */
EXPORT void advise_large_pages(void *memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t large = 2 << 20, begin = ((uintptr_t)memory + large - 1) / large * large;
    const uintptr_t end = ((uintptr_t)memory + bytes) / large * large;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* advice only: failure is harmless */
#endif
}

/* weight: [outputs, inputs] rows of `stride` elements. Fills `panels` (ceil(outputs / 16) * 16 * inputs elements). */
EXPORT void pack_linear(const void *weight, int64_t stride, void *panels, int32_t dtype, int64_t outputs,
                        int64_t inputs, int32_t threads) {
    const struct packing job = {weight, panels, stride, outputs, inputs, dtype};
    const int64_t count = ceil_div(outputs, PANEL);
    run_tasks(threads, count, pack_panel, &job);
}

struct gathering {
    const struct linear *linear;
    const int64_t *ids;
    void *y;
    enum dtype y_dtype;
};

static void gather_row(const void *context, int64_t t) {
    const struct gathering *job = context;
    const struct linear *linear = job->linear;
    const int64_t inputs = linear->inputs;
    const int column = panel_column(linear->dtype, job->ids[t] % PANEL);
    const void *panel = offset(linear->panels, linear->dtype, job->ids[t] / PANEL * PANEL * inputs);
    for (int64_t i = 0; i < inputs; i++)
        store_one(job->y, job->y_dtype, t * inputs + i, load_one(panel, linear->dtype, i * PANEL + column));
}

/* Row ids[t] of the weight to y[t]: an embedding table that is also the output projection is kept once.
 * Ids outside [0, outputs) are refused: returns the position of the first one, -1 when all is well. */
EXPORT int64_t gather_rows(const struct linear *linear, const int64_t *ids, int64_t count, void *y, int32_t y_dtype,
                           int32_t threads) {
    for (int64_t t = 0; t < count; t++)
        if (ids[t] < 0 || ids[t] >= linear->outputs) return t;
    const struct gathering job = {linear, ids, y, y_dtype};
    run_tasks(threads_for(count * linear->inputs, threads), count, gather_row, &job);
    return -1;
}

struct product {
    const struct linear *linear;
    const void *x; /* rows of ldx */
    float *packed; /* the same tile by tile, a tile [inputs][its rows]; NULL: few rows, multiplied as they are */
    void *y;
    int64_t ldx, ldy, rows, block_rows, block_inputs, panels_per_task;
    enum dtype x_dtype, y_dtype;
};

static void store_panel(const struct product *job, int64_t row, int64_t rows, int64_t column, const float *acc) {
    const struct linear *linear = job->linear;
    const enum dtype dtype = job->y_dtype;
    float bias[PANEL] = {0};
    const int64_t columns = min64(PANEL, linear->outputs - column);
    if (linear->bias) memcpy(bias, linear->bias + column, columns * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (row + r) * job->ldy + column;
        const float *sum = acc + r * PANEL;
        if (columns == PANEL) {
            store8(job->y, dtype, at, *(const f32x8 *)sum + *(const f32x8 *)bias);
            store8(job->y, dtype, at + 8, *(const f32x8 *)(sum + 8) + *(const f32x8 *)(bias + 8));
        } else {
            for (int c = 0; c < columns; c++) store_one(job->y, dtype, at + c, sum[c] + bias[c]);
        }
    }
}

/* One panel for one block of rows. Inputs are taken in blocks that stay in the first-level cache while all row tiles
 * use them; meanwhile the next block is fetched. */
static void multiply_panel(const struct product *job, int64_t row, int64_t rows, int64_t panel) {
    const struct linear *linear = job->linear;
    const int64_t inputs = linear->inputs, tiles = ceil_div(rows, TILE_ROWS);
    const int64_t line_step = (linear->dtype == F32 ? 128 : 64);
    float acc[MAX_BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t begin = 0; begin < inputs; begin += job->block_inputs) {
        const int64_t k = min64(job->block_inputs, inputs - begin);
        const void *w = offset(linear->panels, linear->dtype, (panel * inputs + begin) * PANEL);
        const char *ahead = (const char *)w + (tiles == 1 ? 4096 : line_step / 2 * k);
        const int64_t ahead_step = line_step / tiles;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = tile * rows / tiles, last = (tile + 1) * rows / tiles;
            const int count = last - first;
            float *sums = acc + first * PANEL;
            if (job->packed) {
                const float *x = job->packed + (row + first) * inputs + begin * count;
                tile_multiply_packed(count, x, w, linear->dtype, k, sums, begin > 0, ahead, ahead_step);
            } else {
                const float *x = (const float *)job->x + (row + first) * job->ldx + begin;
                tile_multiply_rows(count, x, job->ldx, w, linear->dtype, k, sums, begin > 0, ahead, ahead_step);
            }
            ahead += k / 2 * ahead_step;
        }
    }
    store_panel(job, row, rows, panel * PANEL, acc);
}

INLINE int64_t num_panels(const struct linear *linear) { return ceil_div(linear->outputs, PANEL); }

static void plan_blocks(struct product *job, int32_t threads) {
    const struct linear *linear = job->linear;
    const int64_t panels = num_panels(linear);
    int64_t rows = BLOCK_BYTES / (int64_t)sizeof(float) / max64(linear->inputs, 1) / TILE_ROWS * TILE_ROWS;
    rows = min64(max64(rows, 4 * TILE_ROWS), MAX_BLOCK_ROWS);
    const int64_t wanted = ceil_div(4 * threads, panels); /* row blocks, so that every thread has work */
    rows = min64(rows, ceil_div(ceil_div(job->rows, wanted), TILE_ROWS) * TILE_ROWS);
    job->block_rows = ceil_div(job->rows, ceil_div(job->rows, rows));
    if (job->block_rows <= TILE_ROWS) job->block_inputs = linear->inputs;
    else if (job->block_rows <= FEW_ROWS) job->block_inputs = ceil_div(linear->inputs, ceil_div(linear->inputs, 288));
    else if (job->block_rows <= 4 * TILE_ROWS) job->block_inputs = 192;
    else job->block_inputs = linear->dtype == F32 ? 128 : 256;
}

INLINE void pack_tile(const struct product *job, int64_t row, int64_t rows) {
    const int64_t inputs = job->linear->inputs;
    float *target = job->packed + row * inputs;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inputs; i++)
            target[i * rows + r] = load_one(job->x, job->x_dtype, (row + r) * job->ldx + i);
}

/* One block of rows, in the tiles that multiply_panel takes. */
static void pack_block(const void *context, int64_t block) {
    const struct product *job = context;
    const int64_t row = block * job->block_rows, rows = min64(job->block_rows, job->rows - row);
    const int64_t tiles = ceil_div(rows, TILE_ROWS);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = tile * rows / tiles, last = (tile + 1) * rows / tiles;
        switch (last - first) { /* a constant number of rows lets the compiler transpose in registers */
            case 4: pack_tile(job, row + first, 4); break;
            case 5: pack_tile(job, row + first, 5); break;
            case 6: pack_tile(job, row + first, 6); break;
            default: pack_tile(job, row + first, last - first);
        }
    }
}

static void multiply_span(const void *context, int64_t task) {
    const struct product *job = context;
    const int64_t panels = num_panels(job->linear), spans = ceil_div(panels, job->panels_per_task);
    const int64_t row = task / spans * job->block_rows, first = task % spans * job->panels_per_task;
    const int64_t rows = min64(job->block_rows, job->rows - row);
    for (int64_t panel = first; panel < min64(first + job->panels_per_task, panels); panel++)
        multiply_panel(job, row, rows, panel);
}

/* y[rows, outputs] = x[rows, inputs] W^T + b. Returns 0, or 1 when out of memory. */
EXPORT int32_t linear_forward(const struct linear *linear, const void *x, int32_t x_dtype, int64_t ldx, void *y,
                              int32_t y_dtype, int64_t ldy, int64_t rows, int32_t threads) {
    if (rows == 0) return 0;
    struct product job = {.linear = linear, .x = x, .x_dtype = x_dtype, .y = y, .y_dtype = y_dtype};
    job.ldx = ldx;
    job.ldy = ldy;
    job.rows = rows;
    plan_blocks(&job, threads);
    const int64_t inputs = linear->inputs, panels = num_panels(linear), blocks = ceil_div(rows, job.block_rows);
    if (rows > FEW_ROWS || x_dtype != F32) {
        job.packed = scratch(SCRATCH_ACTIVATIONS, rows * inputs * sizeof(float));
        if (!job.packed) return 1;
        run_tasks(threads_for(rows * inputs, threads), blocks, pack_block, &job);
    }
    job.panels_per_task = max64(1, panels * blocks / (threads * TASKS_PER_THREAD));
    run_tasks(threads, blocks * ceil_div(panels, job.panels_per_task), multiply_span, &job);
    return 0;
}
