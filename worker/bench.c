/* worker/bench.c: the forward pass on synthetic models of GLM-5's true shapes.
 *
 * Owns: one model made of random device memory.  Called by: bench_main.
 * Fails how: exit 2 with a sentence for arguments, exit 1 when memory is refused.
 * Limits: one rank; collectives cost nothing here.  Tested by: being run (tests/bench/NOTES.md)
 *
 * Shapes: full:LAYERS is one dense layer and LAYERS - 1 of experts at full width; shard:N[:LAYERS] is
 * what one rank of N holds (3 dense layers, 78 in all, unless LAYERS says another number with one
 * dense layer). Experts are Q4_K with down Q5_K, attention, shared expert and indexer Q8_0, head
 * Q6_K, embedding Q4_K, router and indexer weights F32. Each decode step feeds fresh random tokens,
 * so that routing differs from step to step; the distinct experts of the last layer are counted and
 * the floor uses that count: bytes that must be read over the read bandwidth measured first.
 *
 * --ops ROWS times each operation of the table alone: the same forward pass with a table in which all
 * the others do nothing, captured as a graph. Weights differ from layer to layer, so nothing is read
 * from the cache that a real step would not find there.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "worker/bench.h"
#include "worker/model.h"

#define BENCH_LIST   16
#define BENCH_GROUP  8 /* steps queued at once */
#define BENCH_GROUPS 7

struct bench {
    struct model m;
    struct coll *coll;
    bool shard;
    int n, max_rows, max_slots;
    double bandwidth;
    uint64_t seed, fixed_bytes, expert_bytes; /* read by each step; by each distinct expert, layer */
    int moe_layers;
    int32_t *token, *pos, *slot, *out_row; /* host */
};

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

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
    struct kmat m = {type, count, rows, cols, take(b, bytes), type == KT_F32 ? 0 : 1};
    /* products of unit vectors keep unit size */
    bench_fill_weights(type, m.data, bytes, 1.7f / sqrtf((float)cols), b->seed++);
    return m;
}

static uint64_t bytes_of(const struct bench *b, const struct kmat *m) {
    return b->m.k->mat_bytes(m->type, m->count, m->rows, m->cols);
}

static void make_layer(struct bench *b, struct layer *l, bool dense) {
    const struct hparams *hp = &b->m.hp;
    const struct kdims *d = &hp->dims;
    int64_t D = d->d_model, H = d->n_heads, R = d->r_kv, P = d->d_rope, N = d->d_nope, V = d->d_v;
    memset(l, 0, sizeof *l);
    l->attn_norm = take_gain(b, D);
    l->q_a_norm = take_gain(b, d->r_q);
    l->kv_a_norm = take_gain(b, R);
    l->ffn_norm = take_gain(b, D);
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
    l->dense = dense;
    int64_t F = dense ? hp->f_dense : hp->f_shared;
    l->gate = take_matrix(b, KT_Q8_0, 1, F, D);
    l->up = take_matrix(b, KT_Q8_0, 1, F, D);
    l->down = take_matrix(b, KT_Q8_0, 1, D, F);
    const struct kmat *always[] = {&l->q_a, &l->q_b, &l->kv_a, &l->k_b, &l->v_b, &l->o, &l->ik,
                                   &l->iw,  &l->gate, &l->up, &l->down};
    for (size_t i = 0; i < sizeof always / sizeof *always; i++)
        b->fixed_bytes += bytes_of(b, always[i]);
    if (dense) return;
    l->router = take_matrix(b, KT_F32, 1, d->n_experts, D);
    l->gate_exps = take_matrix(b, KT_Q4_K, d->n_experts, hp->f_expert, D);
    l->up_exps = take_matrix(b, KT_Q4_K, d->n_experts, hp->f_expert, D);
    l->down_exps = take_matrix(b, KT_Q5_K, d->n_experts, D, hp->f_expert);
    b->fixed_bytes += bytes_of(b, &l->router);
    b->expert_bytes = (bytes_of(b, &l->gate_exps) + bytes_of(b, &l->up_exps) +
                       bytes_of(b, &l->down_exps)) / (uint64_t)d->n_experts;
    b->moe_layers++;
}

static void make_scratch(struct bench *b) {
    struct scratch *s = &b->m.s;
    const struct kdims *d = &b->m.hp.dims;
    int64_t T = b->max_rows, S = b->max_slots, D = d->d_model, H = d->n_heads, U = d->n_used;
    int64_t wide = b->m.hp.f_dense > b->m.hp.f_shared ? b->m.hp.f_dense : b->m.hp.f_shared;
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
    s->logits = s->logits_local = take_floats(b, S * b->m.hp.vocab);
    s->token = take(b, (size_t)S * 4), s->logprob = take(b, (size_t)S * 4);
    s->top_token = take(b, (size_t)(S * K_TOP_MAX) * 4);
    s->top_logprob = take(b, (size_t)(S * K_TOP_MAX) * 4);
    struct kbounds bounds = {(int)T, (int)S, b->m.max_context, (int)b->m.hp.vocab};
    s->op = take(b, b->m.k->scratch_bytes(d, &bounds));
}

static void make_tables(struct bench *b) {
    struct model *m = &b->m;
    const struct kernels *k = m->k;
    int S = b->max_slots, pages = (m->max_context + K_PAGE - 1) / K_PAGE;
    int32_t *table = calloc((size_t)(S * pages), 4);
    struct ksampling *p = calloc((size_t)S, sizeof *p);
    for (int i = 0; i < S * pages; i++) table[i] = i;
    for (int i = 0; i < S; i++) p[i].repetition = 1, p[i].top_p = 1;
    m->seqs = (struct kseqs){S, pages, (int)m->hp.vocab, take(b, (size_t)(S * pages) * 4),
                             take(b, (size_t)S * 4), NULL, NULL, take(b, (size_t)S * sizeof *p)};
    size_t counts = (size_t)S * (size_t)m->hp.vocab * 2;
    m->seqs.seen_prompt = take(b, counts), m->seqs.seen_output = take(b, counts);
    k->zero(m->ctx, m->seqs.seen_prompt, counts);
    k->zero(m->ctx, m->seqs.seen_output, counts);
    k->zero(m->ctx, m->seqs.last_token, (size_t)S * 4);
    k->put(m->ctx, m->seqs.page_table, table, (size_t)(S * pages) * 4);
    k->put(m->ctx, m->seqs.sampling, p, (size_t)S * sizeof *p);
    k->sync(m->ctx);
    free(table);
    free(p);
    size_t T = (size_t)b->max_rows;
    m->batch.token = take(b, T * 4), m->batch.pos = take(b, T * 4);
    m->batch.slot = take(b, T * 4), m->batch.out_row = take(b, T * 4);
    b->token = calloc(T, 4), b->pos = calloc(T, 4);
    b->slot = calloc(T, 4), b->out_row = calloc(T, 4);
    size_t cells = (size_t)(S * pages) * K_PAGE;
    size_t latent = k->latent_bytes(&m->hp.dims), index = k->index_bytes(&m->hp.dims);
    size_t element = latent / (size_t)(m->hp.dims.r_kv + m->hp.dims.d_rope);
    for (int l = 0; l < m->hp.n_layers; l++) {
        struct kcache *c = &m->layers[l].cache;
        c->latent = take(b, cells * latent), c->index = take(b, cells * index);
        bench_fill_cache(c->latent, cells * latent, element, b->seed++);
        bench_fill_cache(c->index, cells * index, element, b->seed++);
    }
}

static void make_model(struct bench *b, int n, int layers, int n_dense) {
    struct model *m = &b->m;
    struct hparams *hp = &m->hp;
    m->world = 1;
    hp->n_layers = layers, hp->n_dense = n_dense;
    hp->vocab = hp->vocab_used = 154880 / n;
    hp->n_heads = 64;
    hp->f_dense = 12288 / n, hp->f_expert = hp->f_shared = 2048 / n;
    hp->dims = (struct kdims){.d_model = 6144, .n_heads = 64 / n, .d_nope = 192, .d_rope = 64,
                              .d_v = 256, .r_q = 2048, .r_kv = 512, .ix_heads = 32, .ix_dim = 128,
                              .ix_topk = 2048, .ix_rope_interleaved = true, .rms_eps = 1e-5f,
                              .ix_eps = 1e-6f, .attn_scale = 0.0625f, .n_experts = 256,
                              .n_used = 8, .n_groups = 1, .n_groups_used = 1, .gating = 2,
                              .norm_weights = true, .weights_scale = 2.5f};
    m->layers = calloc((size_t)layers, sizeof *m->layers);
    for (int l = 0; l < layers; l++) {
        hp->index_full[l] = true;
        make_layer(b, &m->layers[l], l < n_dense);
    }
    m->token_embd = take_matrix(b, KT_Q4_K, 1, hp->vocab, 6144);
    m->output = take_matrix(b, KT_Q6_K, 1, hp->vocab, 6144);
    m->output_norm = take_gain(b, 6144);
    double freq[32];
    for (int i = 0; i < 32; i++) freq[i] = pow(1e6, -i / 32.0);
    m->rope_freq = take(b, sizeof freq);
    m->k->put(m->ctx, m->rope_freq, freq, sizeof freq);
    b->fixed_bytes += bytes_of(b, &m->output);
    make_scratch(b);
    make_tables(b);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static uint64_t bench_random(struct bench *b) {
    uint64_t z = b->seed += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

/* Rows of one step: `rows` slots at position `at` each, or one slot's positions at .. at + rows - 1. */
static void set_rows(struct bench *b, int rows, int at, bool prefill) {
    struct model *m = &b->m;
    for (int t = 0; t < rows; t++) {
        b->token[t] = (int32_t)(bench_random(b) % (uint64_t)m->hp.vocab);
        b->pos[t] = prefill ? at + t : at;
        b->slot[t] = prefill ? 0 : t;
        b->out_row[t] = prefill ? rows - 1 : t;
    }
    m->batch.n_rows = rows;
    m->batch.n_out = prefill ? 1 : rows;
    m->batch.max_context = prefill ? at + rows : at + 1;
    size_t n = (size_t)rows * 4;
    m->k->put(m->ctx, m->batch.token, b->token, n);
    m->k->put(m->ctx, m->batch.pos, b->pos, n);
    m->k->put(m->ctx, m->batch.slot, b->slot, n);
    m->k->put(m->ctx, m->batch.out_row, b->out_row, n);
}

static void run_step(struct bench *b) {
    if (forward(&b->m, b->coll, NULL) != OK) {
        fprintf(stderr, "bench: the forward pass failed\n");
        exit(1);
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Distinct experts that the last layer's rows chose. */
static int distinct_experts(struct bench *b, int rows) {
    int U = b->m.hp.dims.n_used, n = 0;
    int32_t *ids = malloc((size_t)(rows * U) * 4);
    bool seen[LIMIT_EXPERTS] = {false};
    b->m.k->get(b->m.ctx, ids, b->m.s.ids, (size_t)(rows * U) * 4);
    for (int i = 0; i < rows * U; i++)
        if (ids[i] >= 0 && !seen[ids[i]]) seen[ids[i]] = true, n++;
    free(ids);
    return n;
}

static double floor_us(const struct bench *b, int rows, int context, double distinct) {
    const struct kdims *d = &b->m.hp.dims;
    double latent = (double)rows * context * (double)b->m.k->latent_bytes(d) * b->m.hp.n_layers;
    double bytes = (double)b->fixed_bytes + latent +
                   distinct * (double)b->expert_bytes * b->moe_layers;
    return bytes / b->bandwidth * 1e6;
}

/* Steps are queued in groups, as a server queues the next before the last is answered. */
static void decode(struct bench *b, int rows, int context) {
    double us[BENCH_GROUPS], distinct = 0;
    int n = 0;
    for (int i = -1; i < BENCH_GROUPS; i++) {
        b->m.k->sync(b->m.ctx);
        double start = now_us();
        for (int j = 0; j < BENCH_GROUP; j++) {
            set_rows(b, rows, context + j, false);
            run_step(b);
        }
        b->m.k->sync(b->m.ctx);
        if (i < 0) continue;
        us[n++] = (now_us() - start) / BENCH_GROUP;
        distinct += (double)distinct_experts(b, rows) / BENCH_GROUPS;
    }
    qsort(us, (size_t)n, sizeof *us, by_size);
    double floor = floor_us(b, rows, context, distinct);
    printf("decode  batch %3d context %6d: %9.1f us  floor %8.1f us  x%.2f  (distinct experts %.0f, "
           "fastest %.1f, slowest %.1f)\n", rows, context, us[n / 2], floor, us[n / 2] / floor,
           distinct, us[0], us[n - 1]);
    fflush(stdout);
}

static void prefill(struct bench *b, int rows) {
    double us[5];
    for (int i = -1; i < 5; i++) {
        set_rows(b, rows, 0, true);
        b->m.k->sync(b->m.ctx);
        double start = now_us();
        run_step(b);
        b->m.k->sync(b->m.ctx);
        if (i >= 0) us[i] = now_us() - start;
    }
    qsort(us, 5, sizeof *us, by_size);
    printf("prefill %6d tokens: %9.1f us  %9.0f tokens/s  (fastest %.1f)\n", rows, us[2],
           rows / us[2] * 1e6, us[0]);
    fflush(stdout);
}

/* ---- operations alone -------------------------------------------------------------------------- */

static const struct kernels *real;
static int only, calls;

enum { OP_FEED, OP_ANGLES, OP_EMBED, OP_NORM, OP_MATMUL, OP_HEADS, OP_PREP, OP_ROPE, OP_SELECT,
       OP_ATTEND, OP_SWIGLU, OP_UP, OP_DOWN, OP_GATHER, OP_SAMPLE, OP_COUNT };
static const char *const op_names[OP_COUNT] = {
    "feed", "angles", "embed", "norm", "matmul", "head_matmul", "attn_prep", "rope", "select",
    "attend", "swiglu", "experts_up", "experts_down", "gather", "sample"};

#define ALONE(slot, op, type)                                                                      \
    static void alone_##slot(struct kctx *c, const struct type *o) {                               \
        if (only == op) real->slot(c, o), calls++;                                                 \
    }
ALONE(feed, OP_FEED, kop_feed)
ALONE(angles, OP_ANGLES, kop_angles)
ALONE(embed, OP_EMBED, kop_embed)
ALONE(norm, OP_NORM, kop_norm)
ALONE(head_matmul, OP_HEADS, kop_head_matmul)
ALONE(attn_prep, OP_PREP, kop_attn_prep)
ALONE(rope, OP_ROPE, kop_rope)
ALONE(select, OP_SELECT, kop_select)
ALONE(attend, OP_ATTEND, kop_attend)
ALONE(swiglu, OP_SWIGLU, kop_swiglu)
ALONE(experts_up, OP_UP, kop_experts_up)
ALONE(experts_down, OP_DOWN, kop_experts_down)
ALONE(gather, OP_GATHER, kop_gather)
ALONE(sample, OP_SAMPLE, kop_sample)

/* Products by their number of columns: `only` is OP_COUNT + columns, and rows for the head. */
static uint64_t alone_bytes;
static void alone_matmul(struct kctx *c, const struct kop_matmul *jobs, int n) {
    if (only != OP_MATMUL && only != OP_COUNT + (int)(jobs[0].w->cols + jobs[0].w->rows)) return;
    real->matmul(c, jobs, n);
    calls++;
    for (int i = 0; i < n; i++)
        alone_bytes += real->mat_bytes(jobs[i].w->type, 1, jobs[i].w->rows, jobs[i].w->cols);
}

static void time_alone(struct bench *b, const char *name, int rows, int at, bool pre) {
    double us[7];
    calls = 0;
    alone_bytes = 0;
    for (int i = -3; i < 7; i++) {
        if (i == -3) calls = 0, alone_bytes = 0;
        set_rows(b, rows, at, pre);
        b->m.k->sync(b->m.ctx);
        double start = now_us();
        uint64_t key = (uint64_t)1 << 60 | (uint64_t)rows << 40 | (uint64_t)only;
        bool replay = real->graph_begin(b->m.ctx, key);
        if (!replay) {
            calls = 0, alone_bytes = 0;
            run_step(b);
            real->graph_end(b->m.ctx, key);
        }
        b->m.k->sync(b->m.ctx);
        if (i >= 0) us[i] = now_us() - start;
    }
    qsort(us, 7, sizeof *us, by_size);
    if (calls == 0) return;
    printf("  %-28s %9.1f us in %3d calls  %8.2f us each", name, us[3], calls, us[3] / calls);
    if (alone_bytes)
        printf("  %7.0f GB/s", (double)alone_bytes / us[3] / 1e3);
    printf("\n");
    fflush(stdout);
}

static void ops_alone(struct bench *b, int rows, int at, bool pre) {
    static struct kernels t;
    real = b->m.k;
    t = *real;
    t.graph_begin = NULL, t.graph_end = NULL;
    t.feed = alone_feed, t.angles = alone_angles, t.embed = alone_embed, t.norm = alone_norm;
    t.matmul = alone_matmul, t.head_matmul = alone_head_matmul, t.attn_prep = alone_attn_prep;
    t.rope = alone_rope, t.select = alone_select, t.attend = alone_attend;
    t.swiglu = alone_swiglu, t.experts_up = alone_experts_up;
    t.experts_down = alone_experts_down, t.gather = alone_gather, t.sample = alone_sample;
    printf("operations alone, %d rows\n", rows);
    set_rows(b, rows, at, pre);
    run_step(b); /* inputs of every operation */
    b->m.k = &t;
    struct kctx *keep = b->m.ctx;
    for (only = 0; only < OP_COUNT; only++) time_alone(b, op_names[only], rows, at, pre);
    const struct layer *l = &b->m.layers[b->m.hp.n_layers - 1];
    const struct kmat *first[] = {&l->q_a, &l->q_b, &l->o, &l->gate, &b->m.output,
                                  &b->m.layers[0].gate, &b->m.layers[0].down};
    static const char *const names[] = {"matmul q_a, kv_a, ik, iw", "matmul q_b", "matmul o",
                                        "matmul shared gate, up, router", "matmul head",
                                        "matmul dense gate, up", "matmul dense down"};
    for (int i = 0; i < 7; i++) {
        only = OP_COUNT + (int)(first[i]->cols + first[i]->rows);
        time_alone(b, names[i], rows, at, pre);
    }
    b->m.ctx = keep;
    b->m.k = real;
}

/* ---- main ------------------------------------------------------------------------------------- */

static int list(const char *s, int *out) {
    int n = 0;
    while (*s && n < BENCH_LIST) {
        out[n++] = atoi(s);
        s += strcspn(s, ",");
        s += *s == ',';
    }
    return n;
}

static int usage(const char *what) {
    fprintf(stderr, "bench: %s\nusage: --shape full:LAYERS | shard:N[:LAYERS] [--decode B,…] "
            "[--context C,…] [--prefill T,…] [--ops T,…] [--ops-prefill T]\n", what);
    return 2;
}

int bench_main(int argc, char **argv) {
    static struct bench b;
    int decodes[BENCH_LIST] = {1, 2, 4, 8, 16, 32, 64}, n_decodes = 7;
    int contexts[BENCH_LIST] = {512}, n_contexts = 1, prefills[BENCH_LIST] = {512, 2048};
    int n_prefills = 2, ops[BENCH_LIST], n_ops = 0, n_pre = 0, ops_pre[BENCH_LIST];
    int ranks = 1, layers = 5, n_dense = 1;
    const char *shape = "full:5";
    for (int i = 0; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--shape")) shape = argv[i + 1];
        else if (!strcmp(argv[i], "--decode")) n_decodes = list(argv[i + 1], decodes);
        else if (!strcmp(argv[i], "--context")) n_contexts = list(argv[i + 1], contexts);
        else if (!strcmp(argv[i], "--prefill")) n_prefills = list(argv[i + 1], prefills);
        else if (!strcmp(argv[i], "--ops")) n_ops = list(argv[i + 1], ops);
        else if (!strcmp(argv[i], "--ops-prefill")) n_pre = list(argv[i + 1], ops_pre);
        else return usage(argv[i]);
    }
    if (sscanf(shape, "full:%d", &layers) != 1) {
        int n = sscanf(shape, "shard:%d:%d", &ranks, &layers);
        if (n < 1 || ranks < 1 || 64 % ranks) return usage(shape);
        if (n == 1) layers = 78, n_dense = 3;
    }
    char err[512] = "";
    b.m.k = kernels_table();
    b.m.ctx = b.m.k->open(0, err, sizeof err);
    if (!b.m.ctx) return usage(err);
    if (coll_open_none(&b.coll) != OK) return 1;
    b.seed = 1;
    b.bandwidth = bench_read_bandwidth();
    b.max_rows = 64, b.m.max_context = 64;
    for (int i = 0; i < n_prefills; i++)
        if (prefills[i] > b.max_rows) b.max_rows = prefills[i];
    for (int i = 0; i < n_pre; i++)
        if (ops_pre[i] > b.max_rows) b.max_rows = ops_pre[i];
    for (int i = 0; i < n_contexts; i++)
        if (contexts[i] + 64 > b.m.max_context) b.m.max_context = contexts[i] + 64;
    if (b.max_rows > b.m.max_context) b.m.max_context = b.max_rows;
    b.max_slots = 64;
    struct kdevice_info info;
    make_model(&b, ranks, layers, n_dense);
    b.m.k->info(b.m.ctx, &info);
    printf("%s\nshape %s: %d layers, read bandwidth %.0f GB/s, device memory used %.1f GB\n",
           info.name, shape, layers, b.bandwidth / 1e9,
           (double)(info.total_bytes - info.free_bytes) / 1e9);
    for (int i = 0; i < n_ops; i++) ops_alone(&b, ops[i], contexts[0], false);
    for (int i = 0; i < n_pre; i++) ops_alone(&b, ops_pre[i], 0, true);
    for (int c = 0; c < n_contexts; c++)
        for (int i = 0; i < n_decodes; i++) decode(&b, decodes[i], contexts[c]);
    for (int i = 0; i < n_prefills; i++) prefill(&b, prefills[i]);
    return 0;
}
