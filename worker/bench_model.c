/* worker/bench_model.c: a model of random weights in device memory, in GLM-5's true shapes.
 *
 * Owns: its memory, until the process ends.  Called by: bench.c.
 * Fails how: exit 1 when memory is refused; caches that do not fit are made smaller.
 * Limits: one rank.  Tested by: tests/tree/test_bench.py
 *
 * full:LAYERS is one dense layer and LAYERS - 1 of experts at full width; shard:N[:LAYERS] is what
 * one rank of N holds (3 dense layers, 78 in all, unless LAYERS says another number with one dense
 * layer). Experts are Q4_K with down Q5_K, attention, shared expert and indexer Q8_0, head Q6_K,
 * embedding Q4_K, router and indexer weights F32. tiny is for tests: the same kinds of everything,
 * on any machine at once.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "worker/bench.h"
#include "worker/graphs.h"

#define SPARE_BYTES ((uint64_t)2 << 30) /* left free on a device: libraries, what runs beside us   \
                                         */

static void *take(struct bench *b, size_t bytes) {
    void *p = b->m.k->alloc(b->m.ctx, bytes);
    if (!p) {
        fprintf(stderr, "bench: the device refused %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

static float *take_floats(struct bench *b, int64_t n) {
    float *p = take(b, (size_t)n * sizeof *p);
    bench_fill_floats(p, (uint64_t)n, 1, b->seed++);
    return p;
}

static float *take_gain(struct bench *b, int64_t n) {
    float *p = take(b, (size_t)n * sizeof *p);
    bench_fill_constant(p, (uint64_t)n, 1);
    return p;
}

static struct kmat take_matrix(struct bench *b, int type, int64_t count, int64_t rows,
                               int64_t cols) {
    size_t bytes = b->m.k->mat_bytes(type, count, rows, cols);
    struct kmat m = {type, count, rows, cols, take(b, bytes), type == KT_F32 ? 0 : 1, 0, NULL};
    /* products of unit vectors keep unit size */
    bench_fill_weights(type, m.data, bytes, 1.7f / sqrtf((float)cols), b->seed++);
    return m;
}

static uint64_t bytes_of(const struct bench *b, const struct kmat *m) {
    return b->m.k->mat_bytes(m->type, m->count, m->rows, m->cols);
}

static double macs_of(const struct kmat *m) {
    return (double)m->count * (double)m->rows * (double)m->cols;
}

/* Matrices that every step reads. */
static void count_always(struct bench *b, const struct kmat *const *m, int n) {
    for (int i = 0; i < n; i++) b->fixed_bytes += bytes_of(b, m[i]), b->fixed_macs += macs_of(m[i]);
}

static void make_attention(struct bench *b, struct layer *l) {
    const struct kdims *d = &b->m.hp.dims;
    int64_t D = d->d_model, H = d->n_heads, R = d->r_kv, P = d->d_rope, N = d->d_nope, V = d->d_v;
    l->attn_norm = take_gain(b, D);
    l->q_a_norm = take_gain(b, d->r_q);
    l->kv_a_norm = take_gain(b, R);
    l->q_a = take_matrix(b, KT_Q8_0, 1, d->r_q, D);
    l->q_b = take_matrix(b, KT_Q8_0, 1, H * (N + P), d->r_q);
    l->kv_a = take_matrix(b, KT_Q8_0, 1, R + P, D);
    l->k_b = take_matrix(b, KT_Q8_0, H, R, N);
    l->v_b = take_matrix(b, KT_Q8_0, H, V, R);
    l->o = take_matrix(b, KT_Q8_0, 1, D, H * V);
    l->has_index = true;
    l->iq_b = take_matrix(b, KT_Q8_0, 1, (int64_t)d->ix_heads * d->ix_dim, d->r_q);
    l->ik = take_matrix(b, KT_Q8_0, 1, d->ix_dim, D);
    l->iw = take_matrix(b, KT_F32, 1, d->ix_heads, D);
    l->ik_gain = take_gain(b, d->ix_dim);
    l->ik_bias = take_floats(b, d->ix_dim);
    b->select_bytes += bytes_of(b, &l->iq_b);
    count_always(b,
                 (const struct kmat *[]){&l->q_a, &l->q_b, &l->kv_a, &l->k_b, &l->v_b, &l->o,
                                         &l->ik, &l->iw},
                 8);
}

static void make_layer(struct bench *b, struct layer *l, bool dense) {
    const struct hparams *hp = &b->m.hp;
    int64_t D = hp->dims.d_model, E = hp->dims.n_experts, F = dense ? hp->f_dense : hp->f_shared;
    memset(l, 0, sizeof *l);
    make_attention(b, l);
    l->ffn_norm = take_gain(b, D);
    l->dense = dense;
    l->gate = take_matrix(b, KT_Q8_0, 1, F, D);
    l->up = take_matrix(b, KT_Q8_0, 1, F, D);
    l->down = take_matrix(b, KT_Q8_0, 1, D, F);
    count_always(b, (const struct kmat *[]){&l->gate, &l->up, &l->down}, 3);
    if (dense) return;
    l->router = take_matrix(b, KT_F32, 1, E, D);
    l->gate_exps = take_matrix(b, KT_Q4_K, E, hp->f_expert, D);
    l->up_exps = take_matrix(b, KT_Q4_K, E, hp->f_expert, D);
    l->down_exps = take_matrix(b, KT_Q5_K, E, D, hp->f_expert);
    count_always(b, (const struct kmat *[]){&l->router}, 1);
    b->expert_bytes =
        (bytes_of(b, &l->gate_exps) + bytes_of(b, &l->up_exps) + bytes_of(b, &l->down_exps)) /
        (uint64_t)E;
    b->expert_macs = 3.0 * (double)hp->f_expert * (double)D;
    b->moe_layers++;
}

static void make_scratch(struct bench *b) {
    struct scratch *s = &b->m.s;
    const struct kdims *d = &b->m.hp.dims;
    int64_t T = b->m.max_rows, S = b->m.max_outs, D = d->d_model, H = d->n_heads, U = d->n_used;
    int64_t wide = MAX(b->m.hp.f_dense, b->m.hp.f_shared);
    s->h = take_floats(b, T * D), s->x = take_floats(b, T * D), s->y = take_floats(b, T * D);
    s->q_a = take_floats(b, T * d->r_q);
    s->kv = take_floats(b, T * (d->r_kv + d->d_rope));
    s->ik = take_floats(b, T * d->ix_dim), s->iw = take_floats(b, T * d->ix_heads);
    s->q = take_floats(b, T * H * (d->d_nope + d->d_rope));
    s->qk = take_floats(b, T * H * (d->r_kv + d->d_rope));
    s->ol = take_floats(b, T * H * d->r_kv), s->ov = take_floats(b, T * H * d->d_v);
    s->iq = take_floats(b, T * d->ix_heads * d->ix_dim);
    s->selected = take(b, (size_t)(T * d->ix_topk) * 4);
    s->n_selected = take(b, (size_t)T * 4);
    s->logits_r = take_floats(b, T * d->n_experts);
    s->ids = take(b, (size_t)(T * U) * 4), s->weights = take_floats(b, T * U);
    s->act = take_floats(b, T * U * b->m.hp.f_expert);
    s->gate = take_floats(b, T * wide), s->up = take_floats(b, T * wide);
    s->angles = take_floats(b, T * d->d_rope);
    s->out_h = take_floats(b, S * D);
    s->logits = s->logits_local = take_floats(b, S * b->m.output.rows);
    if (b->m.world > 1) s->logits = take_floats(b, S * b->m.hp.vocab);
    s->token = take(b, (size_t)S * 4), s->logprob = take(b, (size_t)S * 4);
    s->top_token = take(b, (size_t)(S * K_TOP_MAX) * 4);
    s->top_logprob = take(b, (size_t)(S * K_TOP_MAX) * 4);
    struct kbounds bounds = {(int)T, (int)S, b->m.max_context, (int)b->m.hp.vocab};
    s->op = take(b, b->m.k->scratch_bytes(d, &bounds));
}

static void make_tables(struct bench *b) {
    struct model *m = &b->m;
    const struct kernels *k = m->k;
    int S = BENCH_SLOTS, pages = (m->max_context + K_PAGE - 1) / K_PAGE;
    struct ksampling *p = calloc((size_t)S, sizeof *p);
    if (!p) exit(1);
    for (int i = 0; i < S; i++) p[i].repetition = 1, p[i].top_p = 1;
    m->seqs = (struct kseqs){S,
                             pages,
                             (int)m->hp.vocab,
                             take(b, (size_t)(S * pages) * 4),
                             take(b, (size_t)S * 4),
                             NULL,
                             NULL,
                             take(b, (size_t)S * sizeof *p)};
    size_t counts = (size_t)S * (size_t)m->hp.vocab * 2;
    m->seqs.seen_prompt = take(b, counts), m->seqs.seen_output = take(b, counts);
    k->zero(m->ctx, m->seqs.seen_prompt, counts);
    k->zero(m->ctx, m->seqs.seen_output, counts);
    k->zero(m->ctx, m->seqs.last_token, (size_t)S * 4);
    k->put(m->ctx, m->seqs.sampling, p, (size_t)S * sizeof *p);
    k->sync(m->ctx);
    free(p);
    size_t T = (size_t)m->max_rows;
    m->batch.token = take(b, T * 4), m->batch.pos = take(b, T * 4);
    m->batch.slot = take(b, T * 4), m->batch.out_row = take(b, T * 4);
    b->token = calloc(4 * T, 4);
    if (!b->token) exit(1);
    b->pos = b->token + T, b->slot = b->pos + T, b->out_row = b->slot + T;
}

/* As many pages as are asked for and fit. */
static void make_caches(struct bench *b, int64_t pages) {
    struct model *m = &b->m;
    struct kdevice_info info;
    size_t latent = K_PAGE * m->k->latent_bytes(&m->hp.dims);
    size_t index = K_PAGE * m->k->index_bytes(&m->hp.dims);
    size_t element = latent / K_PAGE / (size_t)(m->hp.dims.r_kv + m->hp.dims.d_rope);
    m->k->info(m->ctx, &info);
    uint64_t spare = MIN(SPARE_BYTES, info.free_bytes / 2) + m->graph_bytes;
    uint64_t page = (uint64_t)m->hp.n_layers * (latent + index);
    m->n_pages = MIN(pages, (int64_t)((info.free_bytes - MIN(spare, info.free_bytes)) / page));
    m->page_bytes = page;
    if (m->n_pages < 1) {
        fprintf(stderr, "bench: expected room for a cache page, found none\n");
        exit(1);
    }
    for (int l = 0; l < m->hp.n_layers; l++) {
        struct kcache *c = &m->layers[l].cache;
        size_t n = (size_t)m->n_pages;
        c->latent = take(b, n * latent), c->index = take(b, n * index);
        bench_fill_cache(c->latent, n * latent, element, b->seed++);
        bench_fill_cache(c->index, n * index, element, b->seed++);
    }
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static const struct kdims full_dims = {.d_model = 6144,
                                       .n_heads = 64,
                                       .d_nope = 192,
                                       .d_rope = 64,
                                       .d_v = 256,
                                       .r_q = 2048,
                                       .r_kv = 512,
                                       .ix_heads = 32,
                                       .ix_dim = 128,
                                       .ix_topk = 2048,
                                       .ix_rope_interleaved = true,
                                       .rms_eps = 1e-5f,
                                       .ix_eps = 1e-6f,
                                       .attn_scale = 0.0625f,
                                       .n_experts = 256,
                                       .n_used = 8,
                                       .n_groups = 1,
                                       .n_groups_used = 1,
                                       .gating = 2,
                                       .norm_weights = true,
                                       .weights_scale = 2.5f};

static void shape_tiny(struct hparams *hp) {
    hp->n_layers = 3, hp->n_dense = 1;
    hp->vocab = 1024;
    hp->f_dense = 512, hp->f_expert = hp->f_shared = 256;
    hp->dims.d_model = 512, hp->dims.n_heads = 2, hp->dims.r_q = 256, hp->dims.ix_heads = 4;
    hp->dims.ix_topk = 256, hp->dims.n_experts = 8, hp->dims.n_used = 2;
}

/* n ranks' share of each width; false: it is no shape, or does not divide. */
static bool shape_of(struct bench *b, const char *shape) {
    struct hparams *hp = &b->m.hp;
    int layers, n = 1;
    hp->dims = full_dims;
    hp->vocab = 154880;
    hp->f_dense = 12288, hp->f_expert = hp->f_shared = 2048;
    hp->n_layers = 78, hp->n_dense = 3;
    if (!strcmp(shape, "tiny")) {
        shape_tiny(hp);
    } else if (sscanf(shape, "full:%d", &layers) == 1) {
        hp->n_layers = layers, hp->n_dense = 1;
    } else {
        int found = sscanf(shape, "shard:%d:%d", &n, &layers);
        if (found < 1) return false;
        if (found == 2) hp->n_layers = layers, hp->n_dense = 1;
    }
    hp->vocab_used = hp->vocab;
    hp->n_heads = hp->dims.n_heads;
    b->ranks = n;
    snprintf(b->shape, sizeof b->shape, "%s", shape);
    return n >= 1 && n <= 8 && 64 % n == 0 && hp->n_layers >= 1 && hp->n_layers <= LIMIT_LAYERS;
}

static void make_weights(struct bench *b) {
    struct model *m = &b->m;
    struct hparams *hp = &m->hp;
    const int n = b->ranks;
    if (m->world == 1) hp->vocab = hp->vocab_used = hp->vocab / n; /* nobody gathers the rest */
    hp->dims.n_heads /= n;
    hp->f_dense /= n, hp->f_expert /= n, hp->f_shared /= n;
    m->layers = calloc((size_t)hp->n_layers, sizeof *m->layers);
    if (!m->layers) exit(1);
    for (int l = 0; l < hp->n_layers; l++) {
        hp->index_full[l] = true;
        make_layer(b, &m->layers[l], l < hp->n_dense);
    }
    m->token_embd = take_matrix(b, KT_Q4_K, 1, hp->vocab, hp->dims.d_model);
    m->output = take_matrix(b, KT_Q6_K, 1, hp->vocab / m->world, hp->dims.d_model);
    m->output_norm = take_gain(b, hp->dims.d_model);
    b->fixed_bytes += bytes_of(b, &m->output);
    double freq[32];
    for (int i = 0; i < 32; i++) freq[i] = pow(1e6, -i / 32.0);
    m->rope_freq = take(b, sizeof freq);
    m->k->put(m->ctx, m->rope_freq, freq, sizeof freq);
    m->k->sync(m->ctx);
}

bool bench_make(struct bench *b, const char *shape, const struct bench_size *size) {
    struct model *m = &b->m;
    if (!shape_of(b, shape)) return false;
    if (!bench_loopback(&b->coll, m->ctx, b->ranks) && coll_open_none(&b->coll) != OK) exit(1);
    m->world = b->coll->world;
    m->max_rows = size->max_rows;
    m->max_outs = BENCH_SLOTS;
    m->max_context = size->max_context;
    make_weights(b);
    make_scratch(b);
    make_tables(b);
    graphs_measure(m);
    if (m->work_bytes && !m->k->work_reserve(m->ctx, m->work_bytes)) {
        fprintf(stderr, "bench: the device refused a workspace of %llu bytes\n",
                (unsigned long long)m->work_bytes);
        exit(1);
    }
    make_caches(b, size->pages);
    return true;
}
