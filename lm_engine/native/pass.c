/* Decoder layers one after the other in a single call: the same kernels in the same order as the binding calls them,
 * without the interpreter between them, and in a step of decodes without a pause between rotation and attention. */
#include "kernels.h"

static int decodes_only(const struct attention *a) {
    for (int64_t s = 0; s < a->sequences; s++)
        if (a->query_starts[s + 1] - a->query_starts[s] != 1) return 0;
    return 1;
}

static int32_t attention_block(const struct pass *p, const struct layer *layer, struct attention *a, int32_t threads) {
    const int64_t q_width = a->heads * a->head_size, kv_width = a->kv_heads * a->head_size;
    const int64_t width = q_width + 2 * kv_width;
    struct rope rope = p->rope;
    if (linear_forward(layer->qkv, p->normed, F32, p->hidden, p->qkv, F32, width, p->rows, threads)) return 1;
    rope.query_weight = layer->query_norm;
    rope.key_weight = layer->key_norm;
    a->q = p->qkv;
    a->k = p->qkv + q_width;
    a->v = p->qkv + q_width + kv_width;
    a->q_stride = a->k_stride = a->v_stride = width;
    a->out = p->attended;
    if (decodes_only(a)) {
        if (attend_rotating(a, &rope, threads)) return 1;
    } else {
        rope_heads(&rope, p->qkv, width, F32, p->rows, threads);
        if (attend(a, threads)) return 1;
    }
    return linear_forward(layer->output, p->attended, F32, q_width, p->mixed, F32, p->hidden, p->rows, threads);
}

static int32_t mlp_block(const struct pass *p, const struct layer *layer, int32_t threads) {
    const int64_t width = p->intermediate;
    if (linear_forward(layer->gate_up, p->normed, F32, p->hidden, p->gate_up, F32, 2 * width, p->rows, threads)) return 1;
    silu_mul(p->gate_up, 2 * width, p->gated, width, F32, p->rows, width, threads);
    return linear_forward(layer->down, p->gated, F32, width, p->mixed, F32, p->hidden, p->rows, threads);
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
