/* tests/kernels/cut_model.h: the bytes of a small model of random weights, all matrices of one
 * type, whose widths do not divide on blocks of 256: experts are dealt out, and of the dense width
 * some ranks get nothing.
 *
 * Used by: test_cuts.c, tests/unit/test_plan.c
 */
#ifndef OCTAVO_TESTS_KERNELS_CUT_MODEL_H
#define OCTAVO_TESTS_KERNELS_CUT_MODEL_H

#include "proto/gguf.h"
#include "tests/kernels/check.h"
#include "tests/unit/gguf_writer.h"

/* Glossary of the short names: kernels/kernels.h. */
enum {
    D = 256,
    HEADS = 8,
    NOPE = 32,
    ROPE = 16,
    R = 256,
    Q = 256,
    DENSE = 768,
    EXPERT = 512,
    EXPERTS = 6,
    USED = 2,
    IX_HEADS = 2,
    IX_DIM = 32,
    VOCAB = 64
};

struct writer {
    struct bytes b, data;
    struct rng rng;
    int type, n_tensors;
    struct bytes infos;
};

static inline void put_int(struct bytes *b, const char *key, uint32_t v) {
    char full[96];
    snprintf(full, sizeof full, "glm-dsa.%s", key);
    put_key(b, full, GGUF_U32);
    put_u32(b, v);
}

static inline void put_float(struct bytes *b, const char *key, float v) {
    char full[96];
    snprintf(full, sizeof full, "glm-dsa.%s", key);
    put_key(b, full, GGUF_F32);
    put(b, &v, sizeof v);
}

static inline void tensor(struct writer *w, const char *name, int type, uint64_t cols,
                          uint64_t rows, uint64_t count) {
    const uint64_t ne[3] = {cols, rows, count};
    put_padding(&w->data, 32);
    put_tensor(&w->infos, name, 3, ne, (uint32_t)type, w->data.n);
    uint64_t n = cols * rows * count, bytes = (uint64_t)ktype_row_bytes(type, (int64_t)n);
    uint8_t *p = check_alloc(bytes);
    check_random_weights(&w->rng, type, p, (int64_t)n);
    put(&w->data, p, bytes);
    free(p);
    w->n_tensors++;
}

static inline void matrix(struct writer *w, int block, const char *name, uint64_t cols,
                          uint64_t rows, uint64_t count) {
    char full[64];
    snprintf(full, sizeof full, block < 0 ? "%s.weight" : "blk.%2$d.%1$s.weight", name, block);
    bool fits = cols % (uint64_t)ktype_block_elems(w->type) == 0;
    tensor(w, full, fits ? w->type : KT_Q8_0, cols, rows, count);
}

static inline void vector(struct writer *w, int block, const char *name, uint64_t n) {
    char full[64];
    snprintf(full, sizeof full, block < 0 ? "%s" : "blk.%2$d.%1$s", name, block);
    tensor(w, full, KT_F32, n, 1, 1);
}

static inline void put_block(struct writer *w, int b, uint64_t value) {
    vector(w, b, "attn_norm.weight", D);
    matrix(w, b, "attn_q_a", D, Q, 1);
    vector(w, b, "attn_q_a_norm.weight", Q);
    matrix(w, b, "attn_q_b", Q, HEADS * (NOPE + ROPE), 1);
    matrix(w, b, "attn_kv_a_mqa", D, R + ROPE, 1);
    vector(w, b, "attn_kv_a_norm.weight", R);
    matrix(w, b, "attn_k_b", NOPE, R, HEADS);
    matrix(w, b, "attn_v_b", R, value, HEADS);
    matrix(w, b, "attn_output", HEADS * value, D, 1);
    matrix(w, b, "indexer.attn_q_b", Q, IX_HEADS * IX_DIM, 1);
    matrix(w, b, "indexer.attn_k", D, IX_DIM, 1);
    matrix(w, b, "indexer.proj", D, IX_HEADS, 1);
    vector(w, b, "indexer.k_norm.weight", IX_DIM);
    vector(w, b, "indexer.k_norm.bias", IX_DIM);
    vector(w, b, "ffn_norm.weight", D);
    if (b == 0) {
        matrix(w, b, "ffn_gate", D, DENSE, 1);
        matrix(w, b, "ffn_up", D, DENSE, 1);
        matrix(w, b, "ffn_down", DENSE, D, 1);
        return;
    }
    tensor(w, "blk.1.ffn_gate_inp.weight", KT_F32, D, EXPERTS, 1);
    matrix(w, b, "ffn_gate_shexp", D, EXPERT, 1);
    matrix(w, b, "ffn_up_shexp", D, EXPERT, 1);
    matrix(w, b, "ffn_down_shexp", EXPERT, D, 1);
    matrix(w, b, "ffn_gate_exps", D, EXPERT, EXPERTS);
    matrix(w, b, "ffn_up_exps", D, EXPERT, EXPERTS);
    matrix(w, b, "ffn_down_exps", EXPERT, D, EXPERTS);
}

static inline int put_keys(struct bytes *b, uint32_t value) {
    put_key(b, "general.architecture", GGUF_STRING);
    put_str(b, "glm-dsa");
    const struct {
        const char *key;
        uint32_t v;
    } ints[] = {{"block_count", 2},
                {"leading_dense_block_count", 1},
                {"context_length", 64},
                {"embedding_length", D},
                {"feed_forward_length", DENSE},
                {"vocab_size", VOCAB},
                {"expert_count", EXPERTS},
                {"expert_used_count", USED},
                {"expert_shared_count", 1},
                {"expert_feed_forward_length", EXPERT},
                {"attention.head_count", HEADS},
                {"attention.q_lora_rank", Q},
                {"attention.kv_lora_rank", R},
                {"attention.key_length_mla", NOPE + ROPE},
                {"attention.value_length_mla", value},
                {"rope.dimension_count", ROPE},
                {"attention.indexer.head_count", IX_HEADS},
                {"attention.indexer.key_length", IX_DIM},
                {"attention.indexer.top_k", 4}};
    for (size_t i = 0; i < ARRAY_LEN(ints); i++) put_int(b, ints[i].key, ints[i].v);
    put_float(b, "attention.layer_norm_rms_epsilon", 1e-5f);
    return (int)ARRAY_LEN(ints) + 2;
}

/* n factors: 2^(step * (i mod 3) + base). */
static inline void put_scale(struct writer *w, const char *name, uint64_t n, int base, int step) {
    const uint64_t ne[1] = {n};
    put_padding(&w->data, 32);
    put_tensor(&w->infos, name, 1, ne, KT_F32, w->data.n);
    for (uint64_t i = 0; i < n; i++) {
        float f = ldexpf(1, step * (int)(i % 3) + base);
        put(&w->data, &f, sizeof f);
    }
    w->n_tensors++;
}

/* Factors beside weights, that make up for each other but for the head's, a half. */
static inline void put_scales(struct writer *w) {
    put_scale(w, "blk.0.attn_v_b.scale", 1, 2, 0);
    put_scale(w, "blk.0.attn_output.scale", 1, -2, 0);
    put_scale(w, "blk.1.attn_v_b.scale", HEADS, 3, 0);
    put_scale(w, "blk.1.attn_output.scale", 1, -3, 0);
    put_scale(w, "blk.0.ffn_up.scale", 1, 1, 0);
    put_scale(w, "blk.0.ffn_down.scale", 1, -1, 0);
    put_scale(w, "blk.1.ffn_up_shexp.scale", 1, -1, 0);
    put_scale(w, "blk.1.ffn_down_shexp.scale", 1, 1, 0);
    put_scale(w, "blk.1.ffn_up_exps.scale", EXPERTS, 1, 2);
    put_scale(w, "blk.1.ffn_down_exps.scale", EXPERTS, -1, -2);
    put_scale(w, "output.scale", 1, -1, 0);
}

/* The bytes of a model whose matrices are of this type; heads have `value` values; scaled: with
 * factors beside weights. */
static inline struct bytes model_bytes(int type, uint32_t value, bool scaled) {
    struct writer w = {.type = type, .rng = rng_new((uint64_t)type + 100)};
    struct bytes keys = {0};
    matrix(&w, -1, "token_embd", D, VOCAB, 1);
    for (int b = 0; b < 2; b++) put_block(&w, b, value);
    vector(&w, -1, "output_norm.weight", D);
    matrix(&w, -1, "output", D, VOCAB, 1);
    if (scaled) put_scales(&w);
    int n_keys = put_keys(&keys, value);
    put_header(&w.b, 3, (uint64_t)w.n_tensors, (uint64_t)n_keys);
    put(&w.b, keys.p, keys.n);
    put(&w.b, w.infos.p, w.infos.n);
    put_padding(&w.b, 32);
    put(&w.b, w.data.p, w.data.n);
    free(keys.p), free(w.infos.p), free(w.data.p);
    return w.b;
}

static inline struct gguf *parse_model(const struct bytes *b) {
    struct gguf *g;
    struct err_text err = {0};
    if (gguf_parse(&g, b->p, b->n, "cuts.gguf", &err) < 0) fail_msg("%s", err.text);
    return g;
}

#endif
