/* Decoder layers one after the other in a single call: the same kernels in the same order as the binding calls them,
 * without the interpreter between them, and in a step of decodes without a pause between rotation and attention. */
#include "kernels.h"

static int decodes_only(const struct attention *a) {
    for (int64_t s = 0; s < a->sequences; s++)
        if (a->query_starts[s + 1] - a->query_starts[s] != 1) return 0;
    return 1;
}

/* linear(x), and what its adapter adds. */
static int32_t adapted(const struct pass *p, const struct linear *linear, const struct low_rank *adapter, const float *x,
                       float *y, int32_t threads) {
    const int64_t inputs = linear->inputs, outputs = linear->outputs;
    if (linear_forward(linear, x, F32, inputs, y, F32, outputs, p->rows, threads)) return 1;
    if (!p->gate || !adapter->down) return 0;
    const int64_t rank = adapter->down->outputs;
    if (linear_forward(adapter->down, x, F32, inputs, p->low, F32, rank, p->rows, threads)) return 1;
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t k = 0; k < rank; k++) p->low[r * rank + k] *= p->gate[r];
    if (linear_forward(adapter->up, p->low, F32, rank, p->added, F32, outputs, p->rows, threads)) return 1;
    add_rows(p->added, y, F32, p->rows, outputs, threads);
    return 0;
}

static int32_t attention_block(const struct pass *p, const struct layer *layer, struct attention *a, int32_t threads) {
    const int64_t q_width = a->heads * a->head_size, kv_width = a->kv_heads * a->head_size;
    const int64_t width = q_width + 2 * kv_width;
    struct rope rope = p->rope;
    if (adapted(p, layer->qkv, &layer->qkv_adapter, p->normed, p->qkv, threads)) return 1;
    rope.query_weight = layer->query_norm;
    rope.key_weight = layer->key_norm;
    a->q = p->qkv;
    a->k = p->qkv + q_width;
    a->v = p->qkv + q_width + kv_width;
    a->q_stride = a->k_stride = a->v_stride = width;
    a->out = p->attended;
    a->window = layer->window;
    if (decodes_only(a)) {
        if (attend_rotating(a, &rope, threads)) return 1;
    } else {
        rope_heads(&rope, p->qkv, width, F32, p->rows, threads);
        if (attend(a, threads)) return 1;
    }
    return adapted(p, layer->output, &layer->output_adapter, p->attended, p->mixed, threads);
}

static int32_t mlp_block(const struct pass *p, const struct layer *layer, int32_t threads) {
    const int64_t width = p->intermediate;
    if (adapted(p, layer->gate_up, &layer->gate_up_adapter, p->normed, p->gate_up, threads)) return 1;
    silu_mul(p->gate_up, 2 * width, p->gated, width, F32, p->rows, width, threads);
    return adapted(p, layer->down, &layer->down_adapter, p->gated, p->mixed, threads);
}

EXPORT int32_t decoder_pass(const struct pass *p, int32_t threads) {
    struct attention attention = p->attention;
    for (int64_t i = 0; i < p->num_layers; i++) {
        const struct layer *layer = p->layers + i;
        rms_norm(i ? p->mixed : p->residual, p->hidden, i ? p->residual : 0, layer->input_norm, p->norm_dtype, p->eps,
                 p->normed, p->hidden, F32, p->rows, p->hidden, threads);
        if (attention_block(p, layer, &attention, threads)) return 1;
        rms_norm(p->mixed, p->hidden, p->residual, layer->post_norm, p->norm_dtype, p->eps, p->normed, p->hidden, F32,
                 p->rows, p->hidden, threads);
        if (mlp_block(p, layer, threads)) return 1;
        attention.keys = (char *)attention.keys + p->layer_bytes;
        attention.values = (char *)attention.values + p->layer_bytes;
    }
    add_rows(p->mixed, p->residual, F32, p->rows, p->hidden, threads);
    return 0;
}
