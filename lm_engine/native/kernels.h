/* Vector types, bfloat16 conversion and scratch memory shared by the kernels. Plain GNU C: the compiler maps the
 * 8-lane vectors to AVX2/AVX-512 where `-march` has them, else to SSE2 or NEON pairs. */
#ifndef OMNISTAGE_KERNELS_H
#define OMNISTAGE_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef float f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t u16x8 __attribute__((vector_size(16), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default"))) /* called by the binding; all else stays hidden */
#define PANEL 16 /* output columns that are stored side by side in a packed weight */

enum dtype { F32 = 0, BF16 = 1 }; /* the binding passes these numbers */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE f32x8 splat(float value) { return value - (f32x8){0}; }

INLINE f32x8 widen_bf16(u16x8 bits) {
#ifdef __AVX2__ /* gcc makes four instructions of the conversion below */
    return (f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#else
    return (f32x8)(__builtin_convertvector(bits, u32x8) << 16);
#endif
}

/* Round to nearest even; NaN stays a quiet NaN. */
INLINE u16x8 narrow_bf16(f32x8 value) {
    u32x8 bits = (u32x8)value;
    u32x8 rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
    u32x8 is_nan = (u32x8)(value != value);
    return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), u16x8);
}

INLINE float load_one(const void *base, enum dtype dtype, int64_t index) {
    if (dtype == F32) return ((const float *)base)[index];
    union { uint32_t bits; float value; } u = {(uint32_t)((const uint16_t *)base)[index] << 16};
    return u.value;
}

INLINE f32x8 load8(const void *base, enum dtype dtype, int64_t index) {
    if (dtype == F32) return *(const f32x8 *)((const float *)base + index);
    return widen_bf16(*(const u16x8 *)((const uint16_t *)base + index));
}

INLINE void store8(void *base, enum dtype dtype, int64_t index, f32x8 value) {
    if (dtype == F32) *(f32x8 *)((float *)base + index) = value;
    else *(u16x8 *)((uint16_t *)base + index) = narrow_bf16(value);
}

INLINE void store_one(void *base, enum dtype dtype, int64_t index, float value) {
    if (dtype == F32) ((float *)base)[index] = value;
    else ((uint16_t *)base)[index] = narrow_bf16(splat(value))[0];
}

INLINE const void *offset(const void *base, enum dtype dtype, int64_t elements) {
    return (const char *)base + elements * (dtype == F32 ? 4 : 2);
}

/* Sum of the lanes, always in the same order. */
INLINE float sum8(f32x8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* exp(x) for x <= 88, relative error < 2e-7; 0 below -87.3. */
INLINE f32x8 exp8(f32x8 x) {
    i32x8 underflow = x < -87.3f;
    x = (f32x8)(((i32x8)x & ~underflow));
    f32x8 shifted = x * 1.44269504f + 12582912.0f; /* rounds to an integer in the low mantissa bits */
    f32x8 n = shifted - 12582912.0f;
    f32x8 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    f32x8 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i32x8 scale = ((i32x8)shifted << 23) + (127 << 23);
    return (f32x8)((i32x8)(p * (f32x8)scale) & ~underflow);
}

/* Memory of the calling thread, valid until its next call with the same slot; grows, freed when the thread ends.
 * NULL when the system has none left. */
void *scratch(int slot, size_t bytes);
enum { SCRATCH_ACTIVATIONS, SCRATCH_TASKS, SCRATCH_INPUTS, SCRATCH_SLOTS };

/* Runs run(context, task) for every task in [0, count) on up to `threads` threads, the caller among them. Which thread
 * runs a task is left open. Safe from several threads at once, not from within a task. */
typedef void task_function(const void *context, int64_t task);
void run_tasks(int32_t threads, int64_t count, task_function *run, const void *context);

/* acc[r][c] (rows of 16) += sum over k of x[r * ldx + k] * w[k][c], added in the order of k, whatever the number of
 * rows: a row's result never depends on the rows beside it. `rows` <= TILE_ROWS. */
#define TILE_ROWS 6
void tile_multiply(int rows, const float *x, int64_t ldx, const float *w, int64_t k, float *acc);

/* The same with the rows' values side by side, x[k][rows], so that one pointer walks them all; from zero unless
 * `accumulate`. `ahead`: memory that will be read soon, touched at `ahead_step` bytes each 2 k. */
void tile_multiply_packed(int rows, const float *x, const void *w, enum dtype w_dtype, int64_t k, float *acc,
                          int accumulate, const char *ahead, int64_t ahead_step);

/* The same on rows as they are, `ldx` apart: for so few rows that packing them costs more than it saves. */
void tile_multiply_rows(int rows, const float *x, int64_t ldx, const void *w, enum dtype w_dtype, int64_t k, float *acc,
                        int accumulate, const char *ahead, int64_t ahead_step);

/* --- What the binding describes (mirrored in library.py), and the kernels on it. --- */
struct linear {
    const void *panels; /* [ceil(outputs / 16)][inputs][16], padded with zeros */
    const float *bias;  /* [outputs] or NULL */
    int64_t inputs, outputs;
    int32_t dtype;
};

struct rope {
    const float *cos, *sin;                /* [rows, half] contiguous */
    const void *query_weight, *key_weight; /* [2 * half] or NULL: no norm before the rotation */
    int64_t query_heads, key_heads, half;
    int32_t weight_dtype;
    float eps;
};

struct attention { /* strides count elements */
    const void *q, *k, *v; /* rows of heads * head_size */
    void *out, *keys, *values; /* out: contiguous; caches: [blocks, block_size, kv_heads, head_size] */
    const int32_t *query_starts, *lengths, *blocks;
    const int64_t *slots;
    int64_t q_stride, k_stride, v_stride, blocks_stride;
    int64_t tokens, sequences, heads, kv_heads, head_size, block_size;
    int64_t window; /* keys that a query sees, its own the last of them; 0: all */
    int32_t dtype, cache_dtype;
    float scale;
};

struct low_rank { /* what an adapter adds to a linear's output: up(gate * down(x)); NULL: nothing */
    const struct linear *down, *up;
};

struct layer { /* mirrored in library.py; norms of the residual have the pass's dtype, of the heads the rope's */
    const struct linear *qkv, *output, *gate_up, *down;
    const void *input_norm, *post_norm, *query_norm, *key_norm;
    struct low_rank qkv_adapter, output_adapter, gate_up_adapter, down_adapter;
    int64_t window;
};

struct pass { /* mirrored in library.py; all activations are contiguous float32 */
    const struct layer *layers;
    float *residual;                            /* [rows, hidden] */
    float *normed, *qkv, *attended, *gate_up, *gated, *mixed, *low, *added; /* working memory */
    const float *gate; /* [rows], 1 where the adapters act, else 0; NULL: nowhere */
    int64_t num_layers, rows, hidden, intermediate, layer_bytes; /* of one layer's keys, or values */
    struct rope rope;           /* without the heads' norms */
    struct attention attention; /* of the first layer, without q, k, v, out and window */
    int32_t norm_dtype;
    float eps;
};

int32_t linear_forward(const struct linear *linear, const void *x, int32_t x_dtype, int64_t ldx, void *y,
                       int32_t y_dtype, int64_t ldy, int64_t rows, int32_t threads);
void rms_norm(const void *x, int64_t ldx, void *residual, const void *weight, int32_t weight_dtype, float eps,
              void *y, int64_t ldy, int32_t dtype, int64_t rows, int64_t width, int32_t threads);
void add_rows(const void *x, void *residual, int32_t dtype, int64_t rows, int64_t width, int32_t threads);
void silu_mul(const void *x, int64_t ldx, void *y, int64_t ldy, int32_t dtype, int64_t rows, int64_t width,
              int32_t threads);
void rope_heads(const struct rope *rope, void *x, int64_t ldx, int32_t dtype, int64_t rows, int32_t threads);
/* `heads` heads of one of the step's rows, the first at x[at]. */
void rotate_heads(const struct rope *rope, void *x, int32_t dtype, int64_t at, const void *weight, int64_t heads,
                  int64_t row);
int32_t attend(const struct attention *a, int32_t threads);
/* The residual stream through all layers, before the final norm. Returns 0, or 1 when out of memory. */
int32_t decoder_pass(const struct pass *p, int32_t threads);
/* attend for a step of one query a sequence, whose q and k are rotated first, in place. */
int32_t attend_rotating(const struct attention *a, const struct rope *rope, int32_t threads);

/* Work on few elements stays with the caller: a helper would cost more than it saves. */
INLINE int32_t threads_for(int64_t elements, int32_t threads) { return elements <= 16 * 1024 ? 1 : threads; }

/* Rows are dealt out in spans, some more than there are threads. */
INLINE int64_t rows_per_task(int64_t rows, int32_t threads) { return max64(1, ceil_div(rows, 4 * (int64_t)threads)); }

#endif
