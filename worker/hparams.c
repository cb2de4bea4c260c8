/* worker/hparams.c: reads and judges the hyperparameters of a GGUF file.
 *
 * Owns: nothing; pure.  Called by: load.c, tests.
 * Fails how: ERR_FORMAT with key, expected, found. Every number is given a range before it is used
 * in a product or as a size; nothing is guessed except the defaults written here.
 * Limits: LIMIT_LAYERS, LIMIT_EXPERTS, LIMIT_CONTEXT_TOKENS; the ranges in the calls below.
 * Tested by: tests/unit/test_worker.c
 *
 * One row of `archs` per architecture that shares this forward pass says what differs by default.
 */
#include <math.h>
#include <string.h>

#include "worker/tensors.h"

#define WIDTH_MAX (1 << 20)

struct arch {
    const char *name;
    int gating;               /* when the key is absent: 1 softmax, 2 sigmoid */
    bool ix_rope_interleaved; /* else half split */
};

static const struct arch archs[] = {
    {.name = "glm-dsa", .gating = 2, .ix_rope_interleaved = true},
};

struct reader {
    const struct gguf *g;
    const struct arch *arch;
    struct err_text *err;
    char key[128];
};

static const char *full_key(struct reader *r, const char *key) {
    snprintf(r->key, sizeof r->key, "%s.%s", r->arch->name, key);
    return r->key;
}

static int read_int(struct reader *r, const char *key, int64_t min, int64_t max, int64_t *out) {
    uint64_t v;
    int rc = gguf_get_u64(r->g, full_key(r, key), &v, r->err);
    if (rc == ERR_NOT_FOUND)
        return err_set(r->err, ERR_FORMAT,
                       "%s: expected a number from %lld to %lld, found no such key", r->key,
                       (long long)min, (long long)max);
    if (rc < 0) return rc;
    if (v > (uint64_t)max || (int64_t)v < min)
        return err_set(r->err, ERR_FORMAT, "%s: expected a number from %lld to %lld, found %llu",
                       r->key, (long long)min, (long long)max, (unsigned long long)v);
    *out = (int64_t)v;
    return OK;
}

static int read_int_or(struct reader *r, const char *key, int64_t min, int64_t max,
                       int64_t otherwise, int64_t *out) {
    if (!gguf_find(r->g, full_key(r, key))) {
        *out = otherwise;
        return OK;
    }
    return read_int(r, key, min, max, out);
}

static int read_i(struct reader *r, const char *key, int64_t min, int64_t max, int *out) {
    int64_t v;
    TRY(read_int(r, key, min, max, &v));
    *out = (int)v;
    return OK;
}

static int read_i_or(struct reader *r, const char *key, int64_t min, int64_t max, int otherwise,
                     int *out) {
    int64_t v;
    TRY(read_int_or(r, key, min, max, otherwise, &v));
    *out = (int)v;
    return OK;
}

/* A finite number in [min, max]; absent is an error unless otherwise is a number. */
static int read_float(struct reader *r, const char *key, double min, double max, double otherwise,
                      double *out) {
    double v;
    int rc = gguf_get_f64(r->g, full_key(r, key), &v, r->err);
    if (rc == ERR_NOT_FOUND && !isnan(otherwise))
        v = otherwise;
    else if (rc == ERR_NOT_FOUND)
        return err_set(r->err, ERR_FORMAT, "%s: expected a number from %g to %g, found no such key",
                       r->key, min, max);
    else if (rc < 0)
        return rc;
    if (!(v >= min && v <= max))
        return err_set(r->err, ERR_FORMAT, "%s: expected a number from %g to %g, found %g", r->key,
                       min, max, v);
    *out = v;
    return OK;
}

static int read_arch(struct reader *r, struct hparams *hp) {
    struct gguf_str s;
    int rc = gguf_get_str(r->g, "general.architecture", &s, r->err);
    if (rc == ERR_NOT_FOUND)
        return err_set(r->err, ERR_FORMAT,
                       "general.architecture: expected glm-dsa, found no such key");
    if (rc < 0) return rc;
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        if (s.n == strlen(archs[i].name) && memcmp(s.p, archs[i].name, s.n) == 0)
            r->arch = &archs[i];
    if (!r->arch)
        return err_set(r->err, ERR_FORMAT, "general.architecture: expected glm-dsa, found %.*s",
                       (int)MIN(s.n, (uint64_t)64), s.p);
    snprintf(hp->arch, sizeof hp->arch, "%s", r->arch->name);
    return OK;
}

static int read_layers(struct reader *r, struct hparams *hp) {
    int blocks;
    TRY(read_i(r, "block_count", 1, LIMIT_LAYERS, &blocks));
    TRY(read_i_or(r, "nextn_predict_layers", 0, blocks - 1, 0, &hp->n_mtp));
    hp->n_layers = blocks - hp->n_mtp;
    TRY(read_i_or(r, "leading_dense_block_count", 0, hp->n_layers, 0, &hp->n_dense));
    TRY(read_int(r, "context_length", 1, INT32_MAX, &hp->context));
    hp->context = MIN(hp->context, LIMIT_CONTEXT_TOKENS);
    return OK;
}

static int read_attention(struct reader *r, struct hparams *hp) {
    struct kdims *d = &hp->dims;
    double eps;
    int key_mla, unused;
    TRY(read_i(r, "embedding_length", 1, WIDTH_MAX, &d->d_model));
    TRY(read_i(r, "attention.head_count", 1, 4096, &hp->n_heads));
    TRY(read_i_or(r, "attention.head_count_kv", 1, 4096, 1, &unused));
    TRY(read_float(r, "attention.layer_norm_rms_epsilon", 1e-12, 1e-1, NAN, &eps));
    TRY(read_i(r, "attention.q_lora_rank", 1, WIDTH_MAX, &d->r_q));
    TRY(read_i(r, "attention.kv_lora_rank", 1, WIDTH_MAX, &d->r_kv));
    TRY(read_i(r, "rope.dimension_count", 2, 2 * (int)ARRAY_LEN(hp->rope_freq), &d->d_rope));
    if (d->d_rope % 2)
        return err_set(r->err, ERR_FORMAT, "%s: expected an even number, found %d",
                       full_key(r, "rope.dimension_count"), d->d_rope);
    TRY(read_i(r, "attention.key_length_mla", d->d_rope + 1, WIDTH_MAX, &key_mla));
    TRY(read_i(r, "attention.value_length_mla", 1, WIDTH_MAX, &d->d_v));
    TRY(read_i_or(r, "attention.key_length", d->r_kv + d->d_rope, d->r_kv + d->d_rope, 0, &unused));
    if ((int64_t)hp->n_heads * MAX(key_mla, d->d_v) > WIDTH_MAX)
        return err_set(r->err, ERR_FORMAT,
                       "%s: expected heads times head width up to %d, found %d heads of %d",
                       full_key(r, "attention.head_count"), WIDTH_MAX, hp->n_heads,
                       MAX(key_mla, d->d_v));
    d->n_heads = hp->n_heads;
    d->d_nope = key_mla - d->d_rope;
    d->rms_eps = (float)eps;
    d->attn_scale = (float)(1 / sqrt(key_mla));
    return OK;
}

static int read_rope(struct reader *r, struct hparams *hp) {
    double base;
    struct gguf_str scaling;
    TRY(read_float(r, "rope.freq_base", 1, 1e30, 10000, &base));
    int rc = gguf_get_str(r->g, full_key(r, "rope.scaling.type"), &scaling, r->err);
    if (rc < 0 && rc != ERR_NOT_FOUND) return rc;
    if (rc == OK && !(scaling.n == 4 && memcmp(scaling.p, "none", 4) == 0))
        return err_set(r->err, ERR_FORMAT, "%s: expected none, found %.*s", r->key,
                       (int)MIN(scaling.n, (uint64_t)32), scaling.p);
    for (int i = 0; i < hp->dims.d_rope / 2; i++)
        hp->rope_freq[i] = pow(base, -2.0 * i / hp->dims.d_rope);
    return OK;
}

/* The pattern of GLM-5.2 for files that do not say it: 0, 1, 2 and then every fourth layer. */
static bool default_index_full(const struct hparams *hp, int layer) {
    return hp->context < 1048576 || MAX(layer - 2, 0) % 4 == 0;
}

static int read_index_types(struct reader *r, struct hparams *hp) {
    const struct gguf_kv *kv = gguf_find(r->g, full_key(r, "attention.indexer.types"));
    if (kv && kv->type == GGUF_BOOL) {
        bool all;
        TRY(gguf_get_bool(r->g, r->key, &all, r->err));
        for (int i = 0; i < hp->n_layers; i++) hp->index_full[i] = all;
    } else if (kv) {
        if (kv->type != GGUF_ARRAY || kv->elem_type != GGUF_BOOL ||
            kv->count != (uint64_t)hp->n_layers)
            return err_set(r->err, ERR_FORMAT,
                           "%s: expected an array of %d booleans, found %llu elements of type %d",
                           r->key, hp->n_layers, (unsigned long long)kv->count,
                           kv->type == GGUF_ARRAY ? (int)kv->elem_type : (int)kv->type);
        for (int i = 0; i < hp->n_layers; i++) {
            int64_t full;
            TRY(gguf_array_i64(kv, (uint64_t)i, &full));
            hp->index_full[i] = full != 0;
        }
    } else {
        for (int i = 0; i < hp->n_layers; i++) hp->index_full[i] = default_index_full(hp, i);
    }
    if (!hp->index_full[0])
        return err_set(r->err, ERR_FORMAT,
                       "%s: expected layer 0 to have an indexer of its own, found it shared",
                       r->key);
    return OK;
}

static int read_indexer(struct reader *r, struct hparams *hp) {
    struct kdims *d = &hp->dims;
    double eps;
    TRY(read_i(r, "attention.indexer.head_count", 1, 1024, &d->ix_heads));
    TRY(read_i(r, "attention.indexer.key_length", d->d_rope, 4096, &d->ix_dim));
    TRY(read_i(r, "attention.indexer.top_k", 1, WIDTH_MAX, &d->ix_topk));
    TRY(read_float(r, "attention.layer_norm_epsilon", 0, 1e-1, 1e-6, &eps));
    d->ix_eps = eps > 0 ? (float)eps : 1e-6f;
    d->ix_rope_interleaved = r->arch->ix_rope_interleaved;
    return read_index_types(r, hp);
}

/* feed_forward_length: a number, or one per layer of which the dense layers' must agree. */
static int read_dense_width(struct reader *r, struct hparams *hp) {
    const struct gguf_kv *kv = gguf_find(r->g, full_key(r, "feed_forward_length"));
    if (hp->n_dense == 0) return OK;
    if (!kv || kv->type != GGUF_ARRAY)
        return read_i(r, "feed_forward_length", 1, WIDTH_MAX, &hp->f_dense);
    for (int i = 0; i < hp->n_dense; i++) {
        int64_t width = 0;
        if ((uint64_t)i >= kv->count || gguf_array_i64(kv, (uint64_t)i, &width) < 0 || width < 1 ||
            width > WIDTH_MAX || (i > 0 && width != hp->f_dense))
            return err_set(r->err, ERR_FORMAT,
                           "%s: expected one width for all %d dense layers, found %lld at layer %d",
                           r->key, hp->n_dense, (long long)width, i);
        hp->f_dense = (int)width;
    }
    return OK;
}

static int read_groups(struct reader *r, struct kdims *d) {
    TRY(read_i_or(r, "expert_group_count", 0, d->n_experts, 1, &d->n_groups));
    d->n_groups = MAX(d->n_groups, 1);
    if (d->n_experts % d->n_groups || (d->n_groups > 1 && d->n_experts / d->n_groups < 2))
        return err_set(
            r->err, ERR_FORMAT,
            "%s: expected groups of equal size, at least 2, found %d experts in %d groups", r->key,
            d->n_experts, d->n_groups);
    TRY(read_i_or(r, "expert_group_used_count", 0, d->n_groups, d->n_groups, &d->n_groups_used));
    d->n_groups_used = MAX(d->n_groups_used, 1);
    if (d->n_used > d->n_experts / d->n_groups * d->n_groups_used)
        return err_set(r->err, ERR_FORMAT,
                       "%s: expected %d groups to hold the %d experts used, found %d", r->key,
                       d->n_groups_used, d->n_used, d->n_experts / d->n_groups * d->n_groups_used);
    return OK;
}

static int read_experts(struct reader *r, struct hparams *hp) {
    struct kdims *d = &hp->dims;
    int n_shared;
    double scale;
    TRY(read_dense_width(r, hp));
    if (hp->n_dense == hp->n_layers) return OK;
    TRY(read_i(r, "expert_count", 1, LIMIT_EXPERTS, &d->n_experts));
    TRY(read_i(r, "expert_used_count", 1, d->n_experts, &d->n_used));
    TRY(read_i(r, "expert_shared_count", 1, 64, &n_shared));
    TRY(read_i(r, "expert_feed_forward_length", 1, WIDTH_MAX / 64, &hp->f_expert));
    hp->f_shared = n_shared * hp->f_expert;
    TRY(read_groups(r, d));
    TRY(read_i_or(r, "expert_gating_func", 0, 2, 0, &d->gating));
    if (d->gating == 0) d->gating = r->arch->gating;
    int rc = gguf_get_bool(r->g, full_key(r, "expert_weights_norm"), &d->norm_weights, r->err);
    if (rc < 0 && rc != ERR_NOT_FOUND) return rc;
    TRY(read_float(r, "expert_weights_scale", 0, 1e6, 0, &scale));
    d->weights_scale = scale > 0 ? (float)scale : 1;
    return OK;
}

static int read_vocabulary(struct reader *r, struct hparams *hp) {
    const struct gguf_kv *tokens = gguf_find(r->g, "tokenizer.ggml.tokens");
    const struct gguf_kv *types = gguf_find(r->g, "tokenizer.ggml.token_type");
    int64_t otherwise = tokens && tokens->type == GGUF_ARRAY ? (int64_t)tokens->count : 0;
    TRY(read_int_or(r, "vocab_size", 1, 1 << 24, otherwise, &hp->vocab));
    if (hp->vocab < 1 || hp->vocab > 1 << 24)
        return err_set(r->err, ERR_FORMAT,
                       "%s: expected a number or tokenizer.ggml.tokens, found neither",
                       full_key(r, "vocab_size"));
    hp->vocab_used = hp->vocab;
    if (!types) return OK;
    if (types->type != GGUF_ARRAY || types->count != (uint64_t)hp->vocab)
        return err_set(r->err, ERR_FORMAT,
                       "tokenizer.ggml.token_type: expected %lld elements, found %llu",
                       (long long)hp->vocab, (unsigned long long)types->count);
    for (int64_t type; hp->vocab_used > 1; hp->vocab_used--) {
        if (gguf_array_i64(types, (uint64_t)hp->vocab_used - 1, &type) < 0 || type < 1 || type > 6)
            return err_set(
                r->err, ERR_FORMAT,
                "tokenizer.ggml.token_type: expected numbers from 1 to 6, found another at %lld",
                (long long)hp->vocab_used - 1);
        if (type != 5) break;
    }
    return OK;
}

static int no_visit(void *user, const struct tensor_need *n, struct err_text *err) {
    UNUSED(user), UNUSED(n), UNUSED(err);
    return OK;
}

static int read_all(struct hparams *hp, const struct gguf *g, struct err_text *err) {
    struct reader r = {.g = g, .err = err};
    memset(hp, 0, sizeof *hp);
    TRY(read_arch(&r, hp));
    TRY(read_layers(&r, hp));
    TRY(read_attention(&r, hp));
    TRY(read_rope(&r, hp));
    TRY(read_indexer(&r, hp));
    TRY(read_experts(&r, hp));
    TRY(read_vocabulary(&r, hp));
    return tensors_each(hp, g, no_visit, NULL, err);
}

/* Whoever finds the fault knows key or tensor; the file is known here. */
int model_read_hparams(struct hparams *hp, const struct gguf *g, struct err_text *err) {
    struct err_text why = {0};
    int rc = read_all(hp, g, &why);
    return rc < 0 ? err_set(err, rc, "%.200s: %s", gguf_part_path(g, 0), why.text) : rc;
}
