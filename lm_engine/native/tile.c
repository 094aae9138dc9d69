/* The register-blocked product of a few rows with one packed panel, and per-thread scratch memory. */
#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>

struct pair { /* 16 columns of a panel's row */
    f32x8 low, high;
};

INLINE struct pair load_pair(const void *w, enum dtype w_dtype) {
    if (w_dtype == F32) return (struct pair){((const f32x8 *)w)[0], ((const f32x8 *)w)[1]};
    const u32x8 pairs = *(const u32x8 *)w; /* 32-bit lane j holds columns j (low half) and j + 8 (high half) */
    return (struct pair){(f32x8)(pairs << 16), (f32x8)(pairs & 0xffff0000u)};
}

INLINE void step(int rows, const float *x, int64_t row_step, const void *w, enum dtype w_dtype,
                 f32x8 sum[TILE_ROWS][2]) {
    const struct pair weights = load_pair(w, w_dtype);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        f32x8 value = splat(x[r * row_step]);
        sum[r][0] += value * weights.low;
        sum[r][1] += value * weights.high;
    }
}

INLINE void load_sums(int rows, const float *acc, int accumulate, f32x8 sum[TILE_ROWS][2]) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        sum[r][0] = accumulate ? *(const f32x8 *)(acc + r * PANEL) : (f32x8){0};
        sum[r][1] = accumulate ? *(const f32x8 *)(acc + r * PANEL + 8) : (f32x8){0};
    }
}

INLINE void store_sums(int rows, float *acc, f32x8 sum[TILE_ROWS][2]) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        *(f32x8 *)(acc + r * PANEL) = sum[r][0];
        *(f32x8 *)(acc + r * PANEL + 8) = sum[r][1];
    }
}

INLINE void multiply(int rows, const float *x, int64_t ldx, const float *w, int64_t k, float *acc) {
    f32x8 sum[TILE_ROWS][2];
    load_sums(rows, acc, 1, sum);
    for (int64_t i = 0; i < k; i++) step(rows, x + i, ldx, w + i * PANEL, F32, sum);
    store_sums(rows, acc, sum);
}

/* Two k a turn: more, and the compiler runs out of registers. */
INLINE void multiply_packed(int rows, const float *x, const char *w, enum dtype w_dtype, int64_t k, float *acc,
                            int accumulate, const char *ahead, int64_t ahead_step) {
    f32x8 sum[TILE_ROWS][2];
    const int64_t w_step = w_dtype == BF16 ? 2 * PANEL : 4 * PANEL;
    load_sums(rows, acc, accumulate, sum);
    int64_t i = 0;
    for (; i + 2 <= k; i += 2) {
        __builtin_prefetch(ahead);
        ahead += ahead_step;
        step(rows, x, 1, w, w_dtype, sum);
        step(rows, x + rows, 1, w + w_step, w_dtype, sum);
        x += 2 * rows;
        w += 2 * w_step;
    }
    if (i < k) step(rows, x, 1, w, w_dtype, sum);
    store_sums(rows, acc, sum);
}

INLINE void step_rows(int rows, const float *const x[TILE_ROWS], int64_t i, const void *w, enum dtype w_dtype,
                      f32x8 sum[TILE_ROWS][2]) {
    const struct pair weights = load_pair(w, w_dtype);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        f32x8 value = splat(x[r][i]);
        sum[r][0] += value * weights.low;
        sum[r][1] += value * weights.high;
    }
}

INLINE void multiply_rows(int rows, const float *x, int64_t ldx, const char *w, enum dtype w_dtype, int64_t k,
                          float *acc, int accumulate, const char *ahead, int64_t ahead_step) {
    f32x8 sum[TILE_ROWS][2];
    const float *row[TILE_ROWS];
    const int64_t w_step = w_dtype == BF16 ? 2 * PANEL : 4 * PANEL;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) row[r] = x + r * ldx;
    load_sums(rows, acc, accumulate, sum);
    int64_t i = 0;
    for (; i + 2 <= k; i += 2) {
        __builtin_prefetch(ahead);
        ahead += ahead_step;
        step_rows(rows, row, i, w, w_dtype, sum);
        step_rows(rows, row, i + 1, w + w_step, w_dtype, sum);
        w += 2 * w_step;
    }
    if (i < k) step_rows(rows, row, i, w, w_dtype, sum);
    store_sums(rows, acc, sum);
}

#define CASE(ROWS) \
    case ROWS: multiply(ROWS, x, ldx, w, k, acc); break;

void tile_multiply(int rows, const float *x, int64_t ldx, const float *w, int64_t k, float *acc) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    }
}

#define PACKED_CASE(ROWS) \
    case ROWS: \
        if (w_dtype == BF16) multiply_packed(ROWS, x, w, BF16, k, acc, accumulate, ahead, ahead_step); \
        else multiply_packed(ROWS, x, w, F32, k, acc, accumulate, ahead, ahead_step); \
        break;

void tile_multiply_packed(int rows, const float *x, const void *w, enum dtype w_dtype, int64_t k, float *acc,
                          int accumulate, const char *ahead, int64_t ahead_step) {
    switch (rows) {
        PACKED_CASE(1) PACKED_CASE(2) PACKED_CASE(3) PACKED_CASE(4) PACKED_CASE(5) PACKED_CASE(6)
    }
}

#define ROWS_CASE(ROWS) \
    case ROWS: \
        if (w_dtype == BF16) multiply_rows(ROWS, x, ldx, w, BF16, k, acc, accumulate, ahead, ahead_step); \
        else multiply_rows(ROWS, x, ldx, w, F32, k, acc, accumulate, ahead, ahead_step); \
        break;

void tile_multiply_rows(int rows, const float *x, int64_t ldx, const void *w, enum dtype w_dtype, int64_t k, float *acc,
                        int accumulate, const char *ahead, int64_t ahead_step) {
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
    }
}

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

struct arena {
    void *memory[SCRATCH_SLOTS];
    size_t bytes[SCRATCH_SLOTS];
};

static void free_arena(void *pointer) {
    struct arena *arena = pointer;
    for (int slot = 0; slot < SCRATCH_SLOTS; slot++) free(arena->memory[slot]);
    free(arena);
}

static void make_key(void) { pthread_key_create(&scratch_key, free_arena); }

void *scratch(int slot, size_t bytes) {
    pthread_once(&scratch_once, make_key);
    struct arena *arena = pthread_getspecific(scratch_key);
    if (!arena) {
        arena = calloc(1, sizeof *arena);
        if (!arena) return NULL;
        pthread_setspecific(scratch_key, arena);
    }
    if (arena->bytes[slot] < bytes) {
        free(arena->memory[slot]);
        bytes = (bytes + 4095) / 4096 * 4096;
        arena->memory[slot] = aligned_alloc(64, bytes);
        arena->bytes[slot] = arena->memory[slot] ? bytes : 0;
    }
    return arena->memory[slot];
}
