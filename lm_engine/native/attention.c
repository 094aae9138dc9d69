/* Causal attention over the paged KV cache, for any mix of prompt chunks and decodes in one call.
 *
 * Keys are taken in tiles at fixed positions of the sequence and a query's masked keys add exact zeros, so its result
 * depends on its own keys alone: not on the chunk, the batch or the threads it is computed with. */
#include "kernels.h"

#include <math.h>
#include <string.h>

enum { TILE_KEYS = 64, MAX_TILE_ROWS = 48, MAX_HEAD = 256, IN_PLACE_ROWS = 8 };

struct task {
    int32_t sequence, first_query; /* within the sequence's queries of this step */
    int32_t group, num_groups;     /* KV heads */
};

struct tile { /* one task's working memory; a row is one query of one head, the rows of a group stand together */
    float q[MAX_TILE_ROWS * MAX_HEAD];
    float k[TILE_KEYS * MAX_HEAD];
    float v[TILE_KEYS * MAX_HEAD];   /* panels of 16 columns: [panel][key][16] */
    float out[MAX_TILE_ROWS * MAX_HEAD]; /* [panel][row][16] */
    float scores[MAX_TILE_ROWS * TILE_KEYS];
    float maximum[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
    int64_t rows, group_rows, width; /* width: head size rounded up to whole panels */
    struct task task;
};

INLINE int64_t queries_per_task(const struct attention *a) { return MAX_TILE_ROWS / (a->heads / a->kv_heads); }

static void copy_row(const void *source, enum dtype from, int64_t at, void *target, enum dtype to, int64_t target_at,
                     int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) store8(target, to, target_at + i, load8(source, from, at + i));
    for (; i < count; i++) store_one(target, to, target_at + i, load_one(source, from, at + i));
}

static void write_token(const void *context, int64_t token) {
    const struct attention *a = context;
    const int64_t width = a->kv_heads * a->head_size, at = a->slots[token] * width;
    copy_row(a->k, a->dtype, token * a->k_stride, a->keys, a->cache_dtype, at, width);
    copy_row(a->v, a->dtype, token * a->v_stride, a->values, a->cache_dtype, at, width);
}

struct place {
    int64_t token, head;
};

/* Which query a row is; `start`: the sequence's first token of the step. */
INLINE struct place place_of(const struct attention *a, const struct tile *tile, int64_t start, int64_t row) {
    const int64_t per_group = a->heads / a->kv_heads, within = row % tile->group_rows;
    return (struct place){start + tile->task.first_query + within / per_group,
                          (tile->task.group + row / tile->group_rows) * per_group + within % per_group};
}

static void load_queries(const struct attention *a, struct tile *tile, int64_t start) {
    for (int64_t r = 0; r < tile->rows; r++) {
        const struct place place = place_of(a, tile, start, r);
        const int64_t at = place.token * a->q_stride + place.head * a->head_size;
        float *row = tile->q + r * tile->width;
        for (int64_t i = 0; i < tile->width; i += 8) {
            if (i + 8 <= a->head_size) {
                *(f32x8 *)(row + i) = load8(a->q, a->dtype, at + i) * a->scale;
                continue;
            }
            for (int64_t j = i; j < i + 8; j++)
                row[j] = j < a->head_size ? load_one(a->q, a->dtype, at + j) * a->scale : 0.0f;
        }
        tile->maximum[r] = -INFINITY;
        tile->total[r] = 0.0f;
    }
    memset(tile->out, 0, tile->width * tile->rows * sizeof(float));
}

/* Where the cache row of one token begins for the task's first KV head, in elements. */
INLINE int64_t cache_row(const struct attention *a, struct task task, int64_t position) {
    const uint32_t block_size = (uint32_t)a->block_size, at = (uint32_t)position; /* 64-bit division is slow */
    const int64_t block = a->blocks[task.sequence * a->blocks_stride + at / block_size];
    return ((block * a->block_size + at % block_size) * a->kv_heads + task.group) * a->head_size;
}

struct stretch { /* keys of a task's sequence from `first` on */
    struct task task;
    int64_t first, keys;
};

/* Asks for a part of a tile's rows, which lie too far apart for the hardware to foresee, while the tile before is
 * computed: in parts, because the core waits when too many requests are open. */
static void prefetch_keys(const struct attention *a, const struct stretch *stretch, int64_t part, int64_t parts) {
    const int64_t line = a->cache_dtype == F32 ? 16 : 32;
    const int64_t count = max64(0, min64(TILE_KEYS, stretch->keys - stretch->first));
    for (int64_t n = count * part / parts; n < count * (part + 1) / parts; n++) {
        const int64_t row = cache_row(a, stretch->task, stretch->first + n);
        for (int64_t i = 0; i < stretch->task.num_groups * a->head_size; i += line) {
            __builtin_prefetch(offset(a->keys, a->cache_dtype, row + i), 0, 2);
            __builtin_prefetch(offset(a->values, a->cache_dtype, row + i), 0, 2);
        }
    }
}

/* One token's key or value as float32, `step` floats between the panels of the target; zero beyond the head. */
INLINE void widen_head(const void *cache, enum dtype dtype, int64_t at, int64_t head_size, float *target,
                       int64_t step) {
    int64_t i = 0;
    for (; i + PANEL <= head_size; i += PANEL, target += step) {
        ((f32x8 *)target)[0] = load8(cache, dtype, at + i);
        ((f32x8 *)target)[1] = load8(cache, dtype, at + i + 8);
    }
    if (i == head_size) return;
    for (int64_t j = 0; j < PANEL; j++) target[j] = i + j < head_size ? load_one(cache, dtype, at + i + j) : 0.0f;
}

INLINE void load_rows(const struct attention *a, enum dtype dtype, struct tile *tile, int64_t first, int64_t count) {
    for (int64_t n = 0; n < count; n++) {
        const int64_t at = cache_row(a, tile->task, first + n);
        widen_head(a->keys, dtype, at, a->head_size, tile->k + n * tile->width, PANEL);
        widen_head(a->values, dtype, at, a->head_size, tile->v + n * PANEL, PANEL * TILE_KEYS);
    }
}

/* Keys [first, first + count) of the task's only group as float32; the rows up to `padded` are zero. */
static void load_keys(const struct attention *a, struct tile *tile, int64_t first, int64_t count, int64_t padded) {
    if (a->cache_dtype == F32) load_rows(a, F32, tile, first, count);
    else load_rows(a, BF16, tile, first, count);
    memset(tile->k + count * tile->width, 0, (padded - count) * tile->width * sizeof(float));
    for (int64_t i = 0; i < tile->width; i += PANEL)
        memset(tile->v + i * TILE_KEYS + count * PANEL, 0, (padded - count) * PANEL * sizeof(float));
}

typedef float f32x4 __attribute__((vector_size(16), aligned(4), may_alias));

/* The lane sums of four vectors. */
INLINE f32x4 sum_four(f32x8 a, f32x8 b, f32x8 c, f32x8 d) {
    const i32x8 low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const i32x8 first = {0, 1, 8, 9, 4, 5, 12, 13}, second = {2, 3, 10, 11, 6, 7, 14, 15};
    f32x8 ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    f32x8 cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
    f32x8 sums = __builtin_shuffle(ab, cd, first) + __builtin_shuffle(ab, cd, second);
    return (f32x4){sums[0], sums[1], sums[2], sums[3]} + (f32x4){sums[4], sums[5], sums[6], sums[7]};
}

#ifdef __AVX2__
#define IN_REGISTER(vector) __asm__("" : "+x"(vector))
#else
#define IN_REGISTER(vector)
#endif

/* Scores of four keys, which begin at keys[at[0..3]]. */
INLINE void score_rows(int rows, const float *q, const void *keys, enum dtype dtype, const int64_t *at, int64_t width,
                       float *scores) {
    f32x8 sum[3][4];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) sum[r][n] = (f32x8){0};
    for (int64_t i = 0; i < width; i += 8) {
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            f32x8 key = load8(keys, dtype, at[n] + i);
            IN_REGISTER(key); /* or gcc loads it again for every row */
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++) sum[r][n] += key * *(const f32x8 *)(q + r * width + i);
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
        *(f32x4 *)(scores + r * TILE_KEYS) = sum_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

/* Rows [begin, begin + group_rows) with the keys of their group. */
INLINE void score(struct tile *tile, int64_t begin, const void *keys, enum dtype dtype, const int64_t *at,
                  int64_t padded) {
    const int64_t width = tile->width, end = begin + tile->group_rows;
    for (int64_t n = 0; n < padded; n += 4) {
        float *scores = tile->scores + n;
        int64_t r = begin;
        for (; r + 3 <= end; r += 3)
            score_rows(3, tile->q + r * width, keys, dtype, at + n, width, scores + r * TILE_KEYS);
        for (; r < end; r++) score_rows(1, tile->q + r * width, keys, dtype, at + n, width, scores + r * TILE_KEYS);
    }
}

/* Turns the scores of one row into weights; keys before `first` and from `visible` on get zero. Rescales what the
 * row has summed. */
static void soften(struct tile *tile, int64_t row, int64_t first, int64_t visible, int64_t padded) {
    float *scores = tile->scores + row * TILE_KEYS;
    if (visible <= max64(first, 0)) {
        memset(scores, 0, padded * sizeof(float));
        return;
    }
    for (int64_t n = 0; n < first; n++) scores[n] = -INFINITY;
    for (int64_t n = visible; n < padded; n++) scores[n] = -INFINITY;
    f32x8 largest = *(f32x8 *)scores;
    for (int64_t n = 8; n < padded; n += 8) {
        f32x8 value = *(f32x8 *)(scores + n);
        i32x8 greater = value > largest;
        largest = (f32x8)(((i32x8)value & greater) | ((i32x8)largest & ~greater));
    }
    float maximum = tile->maximum[row];
    for (int i = 0; i < 8; i++) maximum = largest[i] > maximum ? largest[i] : maximum;
    const float rescale = exp8(splat(tile->maximum[row] - maximum))[0];
    f32x8 total = {0};
    for (int64_t n = 0; n < padded; n += 8) {
        f32x8 weight = exp8(*(f32x8 *)(scores + n) - maximum);
        *(f32x8 *)(scores + n) = weight;
        total += weight;
    }
    tile->maximum[row] = maximum;
    tile->total[row] = tile->total[row] * rescale + sum8(total);
    if (rescale == 1.0f) return;
    for (int64_t i = 0; i < tile->width; i += PANEL) {
        f32x8 *out = (f32x8 *)(tile->out + i * tile->rows + row * PANEL);
        out[0] *= rescale;
        out[1] *= rescale;
    }
}

static void add_values(struct tile *tile, int64_t padded) {
    for (int64_t i = 0; i < tile->width; i += PANEL) {
        const float *v = tile->v + i * TILE_KEYS;
        for (int64_t r = 0; r < tile->rows; r += TILE_ROWS)
            tile_multiply(min64(TILE_ROWS, tile->rows - r), tile->scores + r * TILE_KEYS, TILE_KEYS, v, padded,
                          tile->out + i * tile->rows + r * PANEL);
    }
}

/* Two panels of `rows` rows, values straight from the cache; the same sums in the same order as add_values. */
INLINE void add_cached_rows(int rows, const float *weights, const void *values, enum dtype dtype, const int64_t *at,
                            int64_t column, int64_t padded, float *out, int64_t panel_step) {
    f32x8 sum[3][4];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sum[r][c] = *(f32x8 *)(out + c / 2 * panel_step + r * PANEL + c % 2 * 8);
    for (int64_t n = 0; n < padded; n++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            f32x8 value = load8(values, dtype, at[n] + column + c * 8);
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++) sum[r][c] += weights[r * TILE_KEYS + n] * value;
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) *(f32x8 *)(out + c / 2 * panel_step + r * PANEL + c % 2 * 8) = sum[r][c];
}

INLINE void add_cached_values(struct tile *tile, int64_t begin, const void *values, enum dtype dtype,
                              const int64_t *at, int64_t padded) {
    const int64_t end = begin + tile->group_rows, step = PANEL * tile->rows;
    for (int64_t i = 0; i < tile->width; i += 2 * PANEL) {
        float *out = tile->out + i * tile->rows;
        int64_t r = begin;
        for (; r + 3 <= end; r += 3)
            add_cached_rows(3, tile->scores + r * TILE_KEYS, values, dtype, at, i, padded, out + r * PANEL, step);
        for (; r < end; r++)
            add_cached_rows(1, tile->scores + r * TILE_KEYS, values, dtype, at, i, padded, out + r * PANEL, step);
    }
}

static void store_out(const struct attention *a, const struct tile *tile, int64_t start) {
    for (int64_t r = 0; r < tile->rows; r++) {
        const float inverse = 1.0f / tile->total[r];
        const struct place place = place_of(a, tile, start, r);
        const int64_t at = (place.token * a->heads + place.head) * a->head_size;
        for (int64_t i = 0; i < a->head_size; i += 8) {
            const float *sum = tile->out + i / PANEL * PANEL * tile->rows + r * PANEL + i % PANEL;
            if (i + 8 <= a->head_size) {
                store8(a->out, a->dtype, at + i, *(const f32x8 *)sum * inverse);
                continue;
            }
            for (int64_t j = 0; i + j < a->head_size; j++) store_one(a->out, a->dtype, at + i + j, sum[j] * inverse);
        }
    }
}

/* `visible`: keys of this tile that the first query sees. */
static void soften_all(const struct attention *a, struct tile *tile, int64_t visible, int64_t count, int64_t padded) {
    for (int64_t r = 0; r < tile->rows; r++) {
        const int64_t end = visible + r % tile->group_rows / (a->heads / a->kv_heads);
        soften(tile, r, a->window ? end - a->window : 0, min64(count, end), padded);
    }
}

INLINE int reads_in_place(const struct attention *a, int64_t group_rows) {
    return group_rows <= IN_PLACE_ROWS && a->head_size % (2 * PANEL) == 0;
}

/* Few rows (a decode): reading the cache in place is cheaper than a float32 copy of the tile. */
INLINE void attend_in_place(const struct attention *a, enum dtype dtype, struct tile *tile, int64_t first,
                            int64_t keys, int64_t visible, const struct stretch *ahead) {
    const int64_t count = min64(TILE_KEYS, keys - first), padded = ceil_div(count, 8) * 8;
    const int64_t groups = tile->task.num_groups;
    int64_t at[TILE_KEYS];
    for (int64_t n = 0; n < padded; n++) /* padding keys are real ones whose weight is zero */
        at[n] = cache_row(a, tile->task, first + min64(n, count - 1));
    for (int64_t g = 0; g < groups; g++) {
        prefetch_keys(a, ahead, g, 2 * groups);
        score(tile, g * tile->group_rows, offset(a->keys, dtype, g * a->head_size), dtype, at, padded);
    }
    soften_all(a, tile, visible, count, padded);
    for (int64_t g = 0; g < groups; g++) {
        prefetch_keys(a, ahead, groups + g, 2 * groups);
        add_cached_values(tile, g * tile->group_rows, offset(a->values, dtype, g * a->head_size), dtype, at, padded);
    }
}

static void attend_copy(const struct attention *a, struct tile *tile, int64_t first, int64_t keys, int64_t visible,
                        const struct stretch *ahead) {
    const int64_t count = min64(TILE_KEYS, keys - first), padded = ceil_div(count, 8) * 8;
    int64_t at[TILE_KEYS];
    for (int64_t n = 0; n < padded; n++) at[n] = n * tile->width;
    prefetch_keys(a, ahead, 0, 1);
    load_keys(a, tile, first, count, padded);
    score(tile, 0, tile->k, F32, at, padded);
    soften_all(a, tile, visible, count, padded);
    add_values(tile, padded);
}

/* Keys that the task's first query sees. */
INLINE int64_t first_visible(const struct attention *a, struct task task) {
    const int64_t total = a->query_starts[task.sequence + 1] - a->query_starts[task.sequence];
    return a->lengths[task.sequence] - total + task.first_query + 1;
}

INLINE int64_t task_queries(const struct attention *a, struct task task) {
    const int64_t total = a->query_starts[task.sequence + 1] - a->query_starts[task.sequence];
    return min64(queries_per_task(a), total - task.first_query);
}

/* From the tile on in which the first query's window begins. */
INLINE struct stretch all_keys(const struct attention *a, struct task task) {
    const int64_t before = a->window ? max64(0, first_visible(a, task) - a->window) : 0;
    return (struct stretch){task, before / TILE_KEYS * TILE_KEYS, first_visible(a, task) + task_queries(a, task) - 1};
}

/* `next`: what this thread will probably attend to afterwards. */
static void attend_tile(const struct attention *a, struct task task, struct task next) {
    struct tile tile;
    const struct stretch own = all_keys(a, task);
    const int64_t visible = first_visible(a, task), keys = own.keys;
    tile.task = task;
    tile.group_rows = task_queries(a, task) * (a->heads / a->kv_heads);
    tile.rows = tile.group_rows * task.num_groups;
    tile.width = ceil_div(a->head_size, PANEL) * PANEL;
    load_queries(a, &tile, a->query_starts[task.sequence]);
    const int in_place = reads_in_place(a, tile.group_rows);
    for (int64_t first = own.first; first < keys; first += TILE_KEYS) {
        struct stretch ahead = {task, first + TILE_KEYS, keys};
        if (ahead.first >= keys) ahead = all_keys(a, next);
        if (!in_place) attend_copy(a, &tile, first, keys, visible - first, &ahead);
        else if (a->cache_dtype == F32) attend_in_place(a, F32, &tile, first, keys, visible - first, &ahead);
        else attend_in_place(a, BF16, &tile, first, keys, visible - first, &ahead);
    }
    store_out(a, &tile, a->query_starts[task.sequence]);
}

/* With sequences enough to occupy the threads, a decode takes all its KV heads at once: they lie side by side, and
 * memory is read in one stream. */
INLINE int64_t groups_per_task(const struct attention *a, int64_t queries, int32_t threads) {
    const int64_t group_rows = queries * (a->heads / a->kv_heads);
    const int fits = reads_in_place(a, group_rows) && group_rows * a->kv_heads <= MAX_TILE_ROWS;
    return fits && a->sequences >= 2 * threads ? a->kv_heads : 1;
}

/* Late queries see most keys: they start first, so that no thread ends alone with a long one. */
static int64_t list_tasks(const struct attention *a, struct task *tasks, int32_t threads) {
    int64_t count = 0;
    const int64_t step = queries_per_task(a);
    for (int64_t s = 0; s < a->sequences; s++) {
        const int64_t queries = a->query_starts[s + 1] - a->query_starts[s];
        const int64_t groups = groups_per_task(a, queries, threads);
        for (int64_t tile = ceil_div(queries, step) - 1; tile >= 0; tile--)
            for (int64_t g = 0; g < a->kv_heads; g += groups)
                tasks[count++] = (struct task){s, tile * step, g, groups};
    }
    return count;
}

struct plan {
    const struct attention *attention;
    const struct rope *rope; /* NULL: rotated and written already */
    const struct task *tasks;
    int64_t count;
};

/* The heads of a task's only query, and their keys and values into the cache. */
static void prepare_query(const struct attention *a, const struct rope *rope, struct task task) {
    const int64_t token = a->query_starts[task.sequence], per_group = a->heads / a->kv_heads;
    const int64_t skipped = task.group * a->head_size, at = a->slots[token] * a->kv_heads * a->head_size + skipped;
    const int64_t q_at = token * a->q_stride + skipped * per_group;
    const int64_t k_at = token * a->k_stride + skipped, v_at = token * a->v_stride + skipped;
    rotate_heads(rope, (void *)a->q, a->dtype, q_at, rope->query_weight, task.num_groups * per_group, token);
    rotate_heads(rope, (void *)a->k, a->dtype, k_at, rope->key_weight, task.num_groups, token);
    copy_row(a->k, a->dtype, k_at, a->keys, a->cache_dtype, at, task.num_groups * a->head_size);
    copy_row(a->v, a->dtype, v_at, a->values, a->cache_dtype, at, task.num_groups * a->head_size);
}

static void run_planned(const void *context, int64_t i) {
    const struct plan *plan = context;
    const struct attention *a = plan->attention;
    const struct task task = plan->tasks[i];
    /* the caller goes forwards, helpers backwards */
    const int64_t next = max64(0, min64(plan->count - 1, 2 * i < plan->count ? i + 1 : i - 1));
    const struct stretch own = all_keys(a, task);
    prefetch_keys(a, &own, 0, 1);
    if (plan->rope) prepare_query(a, plan->rope, task);
    attend_tile(a, task, plan->tasks[next]);
}

static int32_t attend_planned(const struct attention *a, const struct rope *rope, int32_t threads) {
    const int64_t most_tasks = (a->tokens / queries_per_task(a) + a->sequences) * a->kv_heads;
    struct task *tasks = scratch(SCRATCH_TASKS, (most_tasks + 1) * sizeof *tasks);
    if (!tasks) return 1;
    const struct plan plan = {a, rope, tasks, list_tasks(a, tasks, threads)};
    run_tasks(threads, plan.count, run_planned, &plan);
    return 0;
}

/* Writes k, v at `slots`, then attends. Returns 0, or 1 when out of memory. */
EXPORT int32_t attend(const struct attention *a, int32_t threads) {
    run_tasks(threads_for(a->tokens * a->kv_heads * a->head_size, threads), a->tokens, write_token, a);
    return attend_planned(a, NULL, threads);
}

/* Every task rotates and writes what belongs to its own heads: nobody else reads it. */
int32_t attend_rotating(const struct attention *a, const struct rope *rope, int32_t threads) {
    return attend_planned(a, rope, threads);
}
