/* Packed linear layers: weights stored in panels of 16 output columns, y = x W^T + b. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_BLOCK_ROWS = 192, BLOCK_BYTES = 256 * 1024, SERIAL_ELEMENTS = 16 * 1024 };

struct linear { /* mirrored in library.py */
    const void *panels; /* [ceil(outputs / 16)][inputs][16], padded with zeros */
    const float *bias;  /* [outputs] or NULL */
    int64_t inputs, outputs;
    int32_t dtype;
};

/* Column c of a panel row: bfloat16 panels interleave columns j and j + 8 so that one load gives both vectors. */
INLINE int panel_column(enum dtype dtype, int c) {
    return dtype == F32 ? c : (c < 8 ? 2 * c : 2 * (c - 8) + 1);
}

/* weight: [outputs, inputs] rows of `stride` elements. Fills `panels` (ceil(outputs / 16) * 16 * inputs elements). */
EXPORT void pack_linear(const void *weight, int64_t stride, void *panels, int32_t dtype, int64_t outputs,
                        int64_t inputs, int32_t threads) {
    const int64_t count = ceil_div(outputs, PANEL);
    const size_t size = dtype == F32 ? 4 : 2;
#ifdef MADV_HUGEPAGE
    const uintptr_t huge = 2 << 20, begin = ((uintptr_t)panels + huge - 1) / huge * huge;
    const uintptr_t end = ((uintptr_t)panels + count * PANEL * inputs * size) / huge * huge;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* advice only: failure is harmless */
#endif
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < count; p++) {
        char *panel = (char *)panels + p * PANEL * inputs * size;
        for (int c = 0; c < PANEL; c++) {
            const int64_t row = p * PANEL + c, column = panel_column(dtype, c);
            const char *source = (const char *)weight + row * stride * size;
            for (int64_t i = 0; i < inputs; i++) {
                char *target = panel + (i * PANEL + column) * size;
                if (row >= outputs) memset(target, 0, size);
                else memcpy(target, source + i * size, size);
            }
        }
    }
}

/* Row ids[t] of the weight to y[t]: an embedding table that is also the output projection is kept once.
 * Ids outside [0, outputs) are refused: returns the position of the first one, -1 when all is well. */
EXPORT int64_t gather_rows(const struct linear *linear, const int64_t *ids, int64_t count, void *y, int32_t y_dtype,
                           int32_t threads) {
    for (int64_t t = 0; t < count; t++)
        if (ids[t] < 0 || ids[t] >= linear->outputs) return t;
    const int64_t inputs = linear->inputs;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 8)
    for (int64_t t = 0; t < count; t++) {
        const int column = panel_column(linear->dtype, ids[t] % PANEL);
        const void *panel = offset(linear->panels, linear->dtype, ids[t] / PANEL * PANEL * inputs);
        for (int64_t i = 0; i < inputs; i++)
            store_one(y, y_dtype, t * inputs + i, load_one(panel, linear->dtype, i * PANEL + column));
    }
    return -1;
}

struct product {
    const struct linear *linear;
    const float *x;
    void *y;
    int64_t ldx, ldy, rows, block_rows, block_inputs;
    enum dtype y_dtype;
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
        const int64_t ahead_step = tiles <= 4 ? line_step / tiles : 0;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = tile * rows / tiles, last = (tile + 1) * rows / tiles;
            tile_multiply(last - first, job->x + (row + first) * job->ldx + begin, job->ldx, w, linear->dtype, k,
                          acc + first * PANEL, begin > 0, ahead, ahead_step);
            ahead += k / 2 * ahead_step;
        }
    }
    store_panel(job, row, rows, panel * PANEL, acc);
}

static void plan_blocks(struct product *job, int32_t threads) {
    const struct linear *linear = job->linear;
    const int64_t panels = ceil_div(linear->outputs, PANEL);
    int64_t rows = BLOCK_BYTES / (int64_t)sizeof(float) / max64(linear->inputs, 1) / TILE_ROWS * TILE_ROWS;
    rows = min64(max64(rows, 4 * TILE_ROWS), MAX_BLOCK_ROWS);
    const int64_t wanted = ceil_div(4 * threads, panels); /* row blocks, so that every thread has work */
    rows = min64(rows, ceil_div(ceil_div(job->rows, wanted), TILE_ROWS) * TILE_ROWS);
    job->block_rows = ceil_div(job->rows, ceil_div(job->rows, rows));
    if (job->block_rows <= TILE_ROWS) job->block_inputs = linear->inputs;
    else if (job->block_rows <= 4 * TILE_ROWS) job->block_inputs = 192;
    else job->block_inputs = linear->dtype == F32 ? 256 : 512;
}

static void widen_rows(const void *x, enum dtype dtype, int64_t ldx, float *target, int64_t rows, int64_t inputs,
                       int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * inputs > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) {
        int64_t i = 0;
        for (; i + 8 <= inputs; i += 8) store8(target, F32, r * inputs + i, load8(x, dtype, r * ldx + i));
        for (; i < inputs; i++) target[r * inputs + i] = load_one(x, dtype, r * ldx + i);
    }
}

/* y[rows, outputs] = x[rows, inputs] W^T + b. Returns 0, or 1 when out of memory. */
EXPORT int32_t linear_forward(const struct linear *linear, const void *x, int32_t x_dtype, int64_t ldx, void *y,
                              int32_t y_dtype, int64_t ldy, int64_t rows, int32_t threads) {
    if (rows == 0) return 0;
    struct product job = {linear, x, y, ldx, ldy, rows, 0, 0, y_dtype};
    if (x_dtype != F32) {
        float *wide = scratch(SCRATCH_ACTIVATIONS, rows * linear->inputs * sizeof(float));
        if (!wide) return 1;
        widen_rows(x, x_dtype, ldx, wide, rows, linear->inputs, threads);
        job.x = wide;
        job.ldx = linear->inputs;
    }
    plan_blocks(&job, threads);
    const int64_t panels = ceil_div(linear->outputs, PANEL), blocks = ceil_div(rows, job.block_rows);
    const int64_t chunk = max64(1, panels * blocks / (threads * 8));
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (int64_t task = 0; task < panels * blocks; task++) {
        const int64_t row = task / panels * job.block_rows;
        multiply_panel(&job, row, min64(job.block_rows, rows - row), task % panels);
    }
    return 0;
}
