/* Whole decode steps, a row a sequence: from the tokens in the request table through the layers to the tokens drawn
 * greedily. A thread runs them in the order they came, so that nothing but kernels stands between two steps. */
#include "kernels.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { SEGMENT = 4096, QUEUE_LENGTH = 8 };

struct request_table { /* mirrored in library.py; a row a slot, contiguous */
    int32_t *tokens, *blocks;
    const float *positions; /* [axes, slots, tokens of a prompt] */
    const float *position_delta;
    const int64_t *num_prompt;
    const int32_t *gated_from; /* index from which a picture adapter acts; NULL: there is none */
    int64_t slots, tokens_stride, blocks_stride, positions_stride;
};

struct decode { /* mirrored in library.py */
    struct pass pass; /* without what is gathered from the table */
    struct request_table table;
    const float *cos, *sin; /* of whole positions from 0 on, [positions, half] */
    const int32_t *axes;    /* [half]: whose position turns the pair */
    const void *embedding;  /* [vocabulary, hidden] contiguous */
    const void *final_norm;
    const struct linear *head;
    const int32_t *packed;          /* [4, rows]: slot, index, a block to append (0: none), that block's column */
    const int64_t *adjusted_rows, *adjusted_tokens; /* logits that change, by `adjustments`; -inf forbids */
    const float *adjustments;
    float *logits;  /* [rows, vocabulary] */
    int64_t *drawn; /* [rows]; 0 where the logits are not finite */
    uint8_t *valid;
    int64_t num_adjustments;
    int32_t embedding_dtype, threads;
    int32_t status; /* 0, or 1 when out of memory; of a step that has run */
};

struct inputs { /* of a step, in scratch memory */
    int64_t *slots;
    int32_t *starts, *lengths, *blocks;
    float *cos, *sin, *gate;
};

static int allocate(const struct decode *d, struct inputs *inputs) {
    const int64_t rows = d->pass.rows, half = d->pass.rope.half;
    const int64_t words = 2 * rows + 2 * (rows + 1) + rows * d->table.blocks_stride + (2 * half + 1) * rows;
    int32_t *memory = scratch(SCRATCH_INPUTS, words * sizeof *memory);
    if (!memory) return 1;
    inputs->slots = (int64_t *)memory;
    inputs->starts = memory + 2 * rows;
    inputs->lengths = inputs->starts + rows + 1;
    inputs->blocks = inputs->lengths + rows + 1;
    inputs->cos = (float *)(inputs->blocks + rows * d->table.blocks_stride);
    inputs->sin = inputs->cos + rows * half;
    inputs->gate = inputs->sin + rows * half;
    return 0;
}

INLINE int32_t slot_of(const struct decode *d, int64_t row) { return d->packed[row]; }
INLINE int32_t index_of(const struct decode *d, int64_t row) { return d->packed[d->pass.rows + row]; }

/* The token that a row computes; the next one is the token that it draws. */
INLINE int32_t *token_of(const struct decode *d, int64_t row) {
    return d->table.tokens + slot_of(d, row) * d->table.tokens_stride + index_of(d, row);
}

static void append_block(const struct decode *d, int64_t row) {
    const int32_t block = d->packed[2 * d->pass.rows + row], column = d->packed[3 * d->pass.rows + row];
    if (block) d->table.blocks[slot_of(d, row) * d->table.blocks_stride + column] = block;
}

static void turn_row(const struct decode *d, int64_t row, float *cos, float *sin) {
    const struct request_table *table = &d->table;
    const int64_t slot = slot_of(d, row), index = index_of(d, row), half = d->pass.rope.half;
    for (int64_t p = 0; p < half; p++) {
        const float *prompt = table->positions + (d->axes[p] * table->slots + slot) * table->positions_stride;
        const float at = index < table->num_prompt[slot] ? prompt[index] : index + table->position_delta[slot];
        cos[p] = d->cos[(int64_t)at * half + p];
        sin[p] = d->sin[(int64_t)at * half + p];
    }
}

static void gather_row(const struct decode *d, int64_t row, const struct inputs *inputs) {
    const int64_t block_size = d->pass.attention.block_size, half = d->pass.rope.half, index = index_of(d, row);
    const int64_t stride = d->table.blocks_stride, used = index / block_size + 1;
    int32_t *blocks = inputs->blocks + row * stride;
    append_block(d, row);
    memcpy(blocks, d->table.blocks + slot_of(d, row) * stride, used * sizeof *blocks);
    inputs->starts[row] = row;
    inputs->lengths[row] = index + 1;
    inputs->slots[row] = blocks[used - 1] * block_size + index % block_size;
    turn_row(d, row, inputs->cos + row * half, inputs->sin + row * half);
}

/* NULL where no row is behind a picture. */
static const float *gates(const struct decode *d, float *gate) {
    int any = 0;
    if (!d->table.gated_from) return NULL;
    for (int64_t r = 0; r < d->pass.rows; r++) {
        const int acts = index_of(d, r) >= d->table.gated_from[slot_of(d, r)];
        gate[r] = (float)acts;
        any |= acts;
    }
    return any ? gate : NULL;
}

/* Tells the pass what the table holds of the step's rows. */
static int gather(const struct decode *d, struct pass *pass) {
    struct inputs inputs;
    if (allocate(d, &inputs)) return 1;
    for (int64_t r = 0; r < pass->rows; r++) gather_row(d, r, &inputs);
    inputs.starts[pass->rows] = pass->rows;
    pass->rope.cos = inputs.cos;
    pass->rope.sin = inputs.sin;
    pass->gate = gates(d, inputs.gate);
    struct attention *a = &pass->attention;
    a->query_starts = inputs.starts;
    a->lengths = inputs.lengths;
    a->blocks = inputs.blocks;
    a->blocks_stride = d->table.blocks_stride;
    a->slots = inputs.slots;
    a->tokens = a->sequences = pass->rows;
    return 0;
}

static void embed_rows(const struct decode *d) {
    const int64_t hidden = d->pass.hidden;
    for (int64_t r = 0; r < d->pass.rows; r++) {
        const int64_t at = *token_of(d, r) * hidden;
        float *row = d->pass.residual + r * hidden;
        int64_t i = 0;
        for (; i + 8 <= hidden; i += 8) *(f32x8 *)(row + i) = load8(d->embedding, d->embedding_dtype, at + i);
        for (; i < hidden; i++) row[i] = load_one(d->embedding, d->embedding_dtype, at + i);
    }
}

struct best { /* `value` is NaN when some logit is */
    float value;
    int64_t token;
};

/* The first of the largest. */
static struct best largest(const float *logits, int64_t count) {
    f32x8 most = splat(-INFINITY);
    i32x8 nan = {0};
    float value = -INFINITY;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const f32x8 x = *(const f32x8 *)(logits + i);
        const i32x8 greater = x > most;
        most = (f32x8)(((i32x8)x & greater) | ((i32x8)most & ~greater));
        nan |= x != x;
    }
    for (int lane = 0; lane < 8; lane++) {
        if (nan[lane]) return (struct best){NAN, 0};
        value = most[lane] > value ? most[lane] : value;
    }
    for (; i < count; i++) {
        if (isnan(logits[i])) return (struct best){NAN, 0};
        value = logits[i] > value ? logits[i] : value;
    }
    int64_t token = 0;
    while (logits[token] != value) token++;
    return (struct best){value, token};
}

struct draw {
    const struct decode *decode;
    struct best *bests; /* [rows, segments] */
    int64_t segments;
};

static void draw_segment(const void *context, int64_t task) {
    const struct draw *job = context;
    const int64_t vocabulary = job->decode->head->outputs, row = task / job->segments;
    const int64_t first = task % job->segments * SEGMENT, count = min64(SEGMENT, vocabulary - first);
    job->bests[task] = largest(job->decode->logits + row * vocabulary + first, count);
    job->bests[task].token += first;
}

static int32_t draw(const struct decode *d) {
    const int64_t vocabulary = d->head->outputs, segments = ceil_div(vocabulary, SEGMENT);
    struct best *bests = scratch(SCRATCH_TASKS, d->pass.rows * segments * sizeof *bests);
    if (!bests) return 1;
    for (int64_t i = 0; i < d->num_adjustments; i++)
        d->logits[d->adjusted_rows[i] * vocabulary + d->adjusted_tokens[i]] += d->adjustments[i];
    const struct draw job = {d, bests, segments};
    run_tasks(threads_for(d->pass.rows * vocabulary, d->threads), d->pass.rows * segments, draw_segment, &job);
    for (int64_t r = 0; r < d->pass.rows; r++) {
        struct best best = bests[r * segments];
        for (int64_t s = 1; s < segments; s++) {
            const struct best other = bests[r * segments + s];
            if (other.value > best.value || isnan(other.value)) best = other;
        }
        d->valid[r] = isfinite(best.value);
        d->drawn[r] = d->valid[r] ? best.token : 0;
        token_of(d, r)[1] = (int32_t)d->drawn[r];
    }
    return 0;
}

static int32_t run_decode(const struct decode *d) {
    struct pass pass = d->pass;
    const struct pass *p = &pass;
    if (gather(d, &pass)) return 1;
    embed_rows(d);
    if (decoder_pass(p, d->threads)) return 1;
    rms_norm(p->residual, p->hidden, NULL, d->final_norm, p->norm_dtype, p->eps, p->normed, p->hidden, F32, p->rows,
             p->hidden, d->threads);
    if (linear_forward(d->head, p->normed, F32, p->hidden, d->logits, F32, d->head->outputs, p->rows, d->threads))
        return 1;
    return draw(d);
}

struct queue {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct decode *steps[QUEUE_LENGTH];
    uint64_t submitted, finished;
    int closing;
};

static void *serve(void *argument) {
    struct queue *queue = argument;
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (queue->finished == queue->submitted && !queue->closing)
            pthread_cond_wait(&queue->changed, &queue->lock);
        if (queue->finished == queue->submitted) break;
        struct decode *step = queue->steps[queue->finished % QUEUE_LENGTH];
        pthread_mutex_unlock(&queue->lock);
        step->status = run_decode(step);
        pthread_mutex_lock(&queue->lock);
        queue->finished++;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* NULL when there is no memory, or no thread, to be had. */
EXPORT struct queue *queue_open(void) {
    struct queue *queue = calloc(1, sizeof *queue);
    if (!queue) return NULL;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->changed, NULL);
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&queue->thread, NULL, serve, queue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return queue;
    free(queue);
    return NULL;
}

/* The step and what it points to stay where they are until it has run. Returns its number. Waits while the queue is
 * full. */
EXPORT uint64_t queue_submit(struct queue *queue, struct decode *step) {
    pthread_mutex_lock(&queue->lock);
    while (queue->submitted - queue->finished == QUEUE_LENGTH) pthread_cond_wait(&queue->changed, &queue->lock);
    queue->steps[queue->submitted % QUEUE_LENGTH] = step;
    const uint64_t number = ++queue->submitted;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    return number;
}

/* Until the step of this number, and so all before it, have run. */
EXPORT void queue_wait(struct queue *queue, uint64_t number) {
    pthread_mutex_lock(&queue->lock);
    while (queue->finished < number) pthread_cond_wait(&queue->changed, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
}

/* Runs what was submitted, then ends the thread. Nobody waits any more. */
EXPORT void queue_close(struct queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->closing = 1;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
    pthread_mutex_destroy(&queue->lock);
    pthread_cond_destroy(&queue->changed);
    free(queue);
}
