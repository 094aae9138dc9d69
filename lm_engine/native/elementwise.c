/* RMS norms, the gated activation and rotary positions: computed in float32, rounded once to the rows' dtype. */
#include "kernels.h"

#include <math.h>

INLINE float inverse_rms(const void *x, enum dtype dtype, int64_t at, int64_t width, float eps) {
    f32x8 squares = {0};
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
        f32x8 value = load8(x, dtype, at + i);
        squares += value * value;
    }
    float sum = sum8(squares);
    for (; i < width; i++) sum += load_one(x, dtype, at + i) * load_one(x, dtype, at + i);
    return 1.0f / sqrtf(sum / (float)width + eps);
}

INLINE void scale_row(const void *x, enum dtype dtype, int64_t x_at, float scale, const void *weight,
                      enum dtype weight_dtype, void *y, int64_t y_at, int64_t width) {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8)
        store8(y, dtype, y_at + i, load8(x, dtype, x_at + i) * scale * load8(weight, weight_dtype, i));
    for (; i < width; i++)
        store_one(y, dtype, y_at + i, load_one(x, dtype, x_at + i) * scale * load_one(weight, weight_dtype, i));
}

INLINE void add_row(const void *x, int64_t x_at, void *residual, int64_t at, enum dtype dtype, int64_t width) {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8)
        store8(residual, dtype, at + i, load8(x, dtype, x_at + i) + load8(residual, dtype, at + i));
    for (; i < width; i++)
        store_one(residual, dtype, at + i, load_one(x, dtype, x_at + i) + load_one(residual, dtype, at + i));
}

struct rms_norm {
    const void *x, *weight;
    void *residual, *y;
    int64_t ldx, ldy, rows, width, rows_per_task;
    enum dtype dtype, weight_dtype;
    float eps;
};

static void norm_rows(const void *context, int64_t task) {
    const struct rms_norm *job = context;
    const enum dtype dtype = job->dtype;
    const int64_t width = job->width, end = min64((task + 1) * job->rows_per_task, job->rows);
    for (int64_t r = task * job->rows_per_task; r < end; r++) {
        if (job->residual) add_row(job->x, r * job->ldx, job->residual, r * width, dtype, width);
        const void *source = job->residual ? job->residual : job->x;
        const int64_t at = job->residual ? r * width : r * job->ldx;
        const float scale = inverse_rms(source, dtype, at, width, job->eps);
        scale_row(source, dtype, at, scale, job->weight, job->weight_dtype, job->y, r * job->ldy, width);
    }
}

/* y = norm(x) * weight; with `residual` (contiguous): residual += x first, and y = norm(residual) * weight.
 * y may be x. */
EXPORT void rms_norm(const void *x, int64_t ldx, void *residual, const void *weight, int32_t weight_dtype, float eps,
                     void *y, int64_t ldy, int32_t dtype, int64_t rows, int64_t width, int32_t threads) {
    const int64_t span = rows_per_task(rows, threads);
    const struct rms_norm job = {x, weight, residual, y, ldx, ldy, rows, width, span, dtype, weight_dtype, eps};
    run_tasks(threads_for(rows * width, threads), ceil_div(rows, span), norm_rows, &job);
}

struct addition {
    const void *x;
    void *residual;
    int64_t rows, width, rows_per_task;
    enum dtype dtype;
};

static void add_span(const void *context, int64_t task) {
    const struct addition *job = context;
    const int64_t end = min64((task + 1) * job->rows_per_task, job->rows);
    for (int64_t r = task * job->rows_per_task; r < end; r++)
        add_row(job->x, r * job->width, job->residual, r * job->width, job->dtype, job->width);
}

/* residual += x, both contiguous. */
void add_rows(const void *x, void *residual, int32_t dtype, int64_t rows, int64_t width, int32_t threads) {
    const int64_t span = rows_per_task(rows, threads);
    const struct addition job = {x, residual, rows, width, span, dtype};
    run_tasks(threads_for(rows * width, threads), ceil_div(rows, span), add_span, &job);
}

/* exp of the negative magnitude never overflows: sigmoid(x) = 1 / (1 + e) for x >= 0, else e / (1 + e). */
INLINE f32x8 silu8(f32x8 x) {
    f32x8 e = exp8((f32x8)((i32x8)x | INT32_MIN));
    i32x8 negative = x < 0.0f;
    f32x8 numerator = (f32x8)(((i32x8)splat(1.0f) & ~negative) | ((i32x8)e & negative));
    return x * numerator / (1.0f + e);
}

struct silu_mul {
    const void *x;
    void *y;
    int64_t ldx, ldy, rows, width, rows_per_task;
    enum dtype dtype;
};

static void silu_rows(const void *context, int64_t task) {
    const struct silu_mul *job = context;
    const enum dtype dtype = job->dtype;
    const int64_t width = job->width, end = min64((task + 1) * job->rows_per_task, job->rows);
    for (int64_t r = task * job->rows_per_task; r < end; r++) {
        const int64_t gate_at = r * job->ldx, up_at = gate_at + width, y_at = r * job->ldy;
        int64_t i = 0;
        for (; i + 8 <= width; i += 8)
            store8(job->y, dtype, y_at + i, silu8(load8(job->x, dtype, gate_at + i)) * load8(job->x, dtype, up_at + i));
        for (; i < width; i++) {
            const float gate = silu8(splat(load_one(job->x, dtype, gate_at + i)))[0];
            store_one(job->y, dtype, y_at + i, gate * load_one(job->x, dtype, up_at + i));
        }
    }
}

/* y[rows, width] = silu(x[:, :width]) * x[:, width:]. */
EXPORT void silu_mul(const void *x, int64_t ldx, void *y, int64_t ldy, int32_t dtype, int64_t rows, int64_t width,
                     int32_t threads) {
    const int64_t span = rows_per_task(rows, threads);
    const struct silu_mul job = {x, y, ldx, ldy, rows, width, span, dtype};
    run_tasks(threads_for(4 * rows * width, threads), ceil_div(rows, span), silu_rows, &job); /* exp is most of it */
}

INLINE void rotate_head(const struct rope *rope, void *x, enum dtype dtype, int64_t at, const void *weight,
                        const float *cos, const float *sin) {
    const int64_t half = rope->half;
    if (weight) {
        const float scale = inverse_rms(x, dtype, at, 2 * half, rope->eps);
        scale_row(x, dtype, at, scale, weight, rope->weight_dtype, x, at, 2 * half);
    }
    int64_t p = 0;
    for (; p + 8 <= half; p += 8) {
        f32x8 a = load8(x, dtype, at + p), b = load8(x, dtype, at + half + p);
        f32x8 c = *(const f32x8 *)(cos + p), s = *(const f32x8 *)(sin + p);
        store8(x, dtype, at + p, a * c - b * s);
        store8(x, dtype, at + half + p, b * c + a * s);
    }
    for (; p < half; p++) {
        float a = load_one(x, dtype, at + p), b = load_one(x, dtype, at + half + p);
        store_one(x, dtype, at + p, a * cos[p] - b * sin[p]);
        store_one(x, dtype, at + half + p, b * cos[p] + a * sin[p]);
    }
}

void rotate_heads(const struct rope *rope, void *x, int32_t dtype, int64_t at, const void *weight, int64_t heads,
                  int64_t row) {
    const float *cos = rope->cos + row * rope->half, *sin = rope->sin + row * rope->half;
    for (int64_t h = 0; h < heads; h++) rotate_head(rope, x, dtype, at + h * 2 * rope->half, weight, cos, sin);
}

struct rotation {
    const struct rope *rope;
    void *x;
    int64_t ldx, rows, rows_per_task;
    enum dtype dtype;
};

static void rotate_rows(const void *context, int64_t task) {
    const struct rotation *job = context;
    const struct rope *rope = job->rope;
    const int64_t half = rope->half, end = min64((task + 1) * job->rows_per_task, job->rows);
    for (int64_t r = task * job->rows_per_task; r < end; r++) {
        const int64_t queries_at = r * job->ldx, keys_at = queries_at + rope->query_heads * 2 * half;
        rotate_heads(rope, job->x, job->dtype, queries_at, rope->query_weight, rope->query_heads, r);
        rotate_heads(rope, job->x, job->dtype, keys_at, rope->key_weight, rope->key_heads, r);
    }
}

/* In place on the first query_heads + key_heads heads of each row. */
EXPORT void rope_heads(const struct rope *rope, void *x, int64_t ldx, int32_t dtype, int64_t rows, int32_t threads) {
    const int64_t span = rows_per_task(rows, threads), width = (rope->query_heads + rope->key_heads) * 2 * rope->half;
    const struct rotation job = {rope, x, ldx, rows, span, dtype};
    run_tasks(threads_for(rows * width, threads), ceil_div(rows, span), rotate_rows, &job);
}
