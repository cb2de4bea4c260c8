/* worker/bench_ops.c: each operation of the table alone.
 *
 * Owns: nothing.  Called by: bench.c.  Fails how: ends the process.
 * Limits: one measurement at a time.  Tested by: tests/tree/test_bench.py
 *
 * The same forward pass, with a table in which all operations but one do nothing, captured as a
 * graph where there are graphs. Weights differ from layer to layer and the caches are flushed
 * before each turn, so that nothing is found there that a real step would not find. Time is the
 * device's own, from mark to mark, less that of a graph with feed, the least operation; on a
 * backend without a clock it is the host's.
 *
 * Bytes are those that must move: weights, rows read and written; of experts those chosen.
 */
#include <stdlib.h>
#include <string.h>

#include "worker/bench.h"

enum {
    OP_FEED,
    OP_ANGLES,
    OP_EMBED,
    OP_NORM,
    OP_MATMUL,
    OP_HEADS,
    OP_PREP,
    OP_ROPE,
    OP_SELECT,
    OP_ATTEND,
    OP_SWIGLU,
    OP_UP,
    OP_DOWN,
    OP_GATHER,
    OP_SAMPLE,
    OP_SUM,
    OP_Q_A,
    OP_Q_B,
    OP_O,
    OP_SHARED,
    OP_HEAD,
    OP_DENSE,
    OP_DENSE_DOWN /* products, by their first */
};

static const struct {
    int op;
    const char *name;
} op_names[] = {{OP_NORM, "norm"},
                {OP_HEADS, "head_matmul (k_b, v_b)"},
                {OP_PREP, "attn_prep"},
                {OP_ROPE, "rope"},
                {OP_SELECT, "select"},
                {OP_ATTEND, "attend"},
                {OP_SWIGLU, "swiglu"},
                {OP_UP, "experts_up"},
                {OP_DOWN, "experts_down"},
                {OP_GATHER, "gather"},
                {OP_SAMPLE, "sample"},
                {OP_SUM, "all_reduce"},
                {OP_FEED, "feed"},
                {OP_ANGLES, "angles"},
                {OP_EMBED, "embed"},
                {OP_MATMUL, "matmul, all"},
                {OP_Q_A, "matmul q_a, kv_a, ik, iw"},
                {OP_Q_B, "matmul q_b (and iq_b)"},
                {OP_O, "matmul o"},
                {OP_SHARED, "matmul shared gate, up, router"},
                {OP_HEAD, "matmul head"},
                {OP_DENSE, "matmul dense gate, up"},
                {OP_DENSE_DOWN, "matmul dense down"}};

/* The one that is measured, and what it was called with in one pass. */
static struct {
    struct bench *b;
    const struct kernels *real;
    struct coll *coll;
    int only, calls;
    double bytes, flops, distinct;
} alone;

static bool is_turn(int op, double bytes, double flops) {
    if (alone.only != op) return false;
    alone.calls++;
    alone.bytes += bytes;
    alone.flops += flops;
    return true;
}

static double mat_bytes(const struct kmat *m) {
    return (double)alone.real->mat_bytes(m->type, m->count, m->rows, m->cols);
}

static double chosen_bytes(const struct kmat *m) {
    return mat_bytes(m) / (double)m->count * alone.distinct;
}

#define F4(n) (4.0 * (double)(n)) /* bytes of n floats */

static void alone_feed(struct kctx *c, const struct kop_feed *o) {
    if (is_turn(OP_FEED, F4(5 * o->batch->n_rows), 0)) alone.real->feed(c, o);
}

static void alone_angles(struct kctx *c, const struct kop_angles *o) {
    if (is_turn(OP_ANGLES, F4(2 * o->batch->n_rows * o->n_pairs), 0)) alone.real->angles(c, o);
}

static void alone_embed(struct kctx *c, const struct kop_embed *o) {
    double row = mat_bytes(o->table) / (double)o->table->rows + F4(o->table->cols);
    if (is_turn(OP_EMBED, row * o->batch->n_rows, 0)) alone.real->embed(c, o);
}

static void alone_norm(struct kctx *c, const struct kop_norm *o) {
    int times = o->add ? 4 : 2;
    if (is_turn(OP_NORM, F4((int64_t)o->n_rows * o->width * times), 0)) alone.real->norm(c, o);
}

/* Which products go together with this first one. */
static int product_of(const struct kmat *w) {
    const struct model *m = &alone.b->m;
    if (w == &m->output) return OP_HEAD;
    size_t at = (size_t)((const char *)w - (const char *)m->layers);
    const struct layer *l = &m->layers[at / sizeof *l];
    if (w == &l->q_a) return OP_Q_A;
    if (w == &l->q_b) return OP_Q_B;
    if (w == &l->o) return OP_O;
    if (w == &l->gate) return l->dense ? OP_DENSE : OP_SHARED;
    return OP_DENSE_DOWN;
}

static void alone_matmul(struct kctx *c, const struct kop_matmul *j, int n) {
    double bytes = 0, flops = 0;
    for (int i = 0; i < n; i++) {
        bytes += mat_bytes(j[i].w) + F4(j[i].n_rows * (j[i].w->rows + (i ? 0 : j[i].w->cols)));
        flops += 2.0 * j[i].n_rows * (double)(j[i].w->rows * j[i].w->cols);
    }
    if (is_turn(OP_MATMUL, bytes, flops) || is_turn(product_of(j[0].w), bytes, flops))
        alone.real->matmul(c, j, n);
}

static void alone_head_matmul(struct kctx *c, const struct kop_head_matmul *o) {
    double values = (double)o->n_rows * (double)(o->w->count * (o->w->rows + o->w->cols));
    double flops = 2.0 * o->n_rows * (double)(o->w->count * o->w->rows * o->w->cols);
    if (is_turn(OP_HEADS, mat_bytes(o->w) + 4 * values, flops)) alone.real->head_matmul(c, o);
}

static void alone_attn_prep(struct kctx *c, const struct kop_attn_prep *o) {
    const struct kdims *d = o->dims;
    double row = F4(2 * d->r_q + d->r_kv + d->d_rope + d->ix_dim) +
                 (double)(alone.real->latent_bytes(d) + alone.real->index_bytes(d));
    if (is_turn(OP_PREP, row * o->batch->n_rows, 0)) alone.real->attn_prep(c, o);
}

static void alone_rope(struct kctx *c, const struct kop_rope *o) {
    const struct kdims *d = o->dims;
    double row = F4(2 * d->n_heads * d->d_rope + (o->iq ? 2 * d->ix_heads * d->d_rope : 0));
    if (is_turn(OP_ROPE, row * o->batch->n_rows, 0)) alone.real->rope(c, o);
}

/* Positions that the rows of the step look at, all together: as a sequence, or each at its own. */
static double positions(const struct kbatch *batch, int most) {
    double n = 0;
    int each = batch->n_rows / MAX(batch->n_out, 1);
    for (int t = 0; t < batch->n_rows; t++)
        n += MIN(alone.b->pos[t] + 1, most > 0 ? most : INT32_MAX);
    return each > 0 ? n : 0;
}

static void alone_select(struct kctx *c, const struct kop_select *o) {
    const struct kdims *d = o->dims;
    double n = positions(o->batch, 0);
    double keys = o->batch->n_out == o->batch->n_rows ? n : o->batch->max_context;
    if (is_turn(OP_SELECT, keys * (double)alone.real->index_bytes(d),
                2 * n * d->ix_heads * d->ix_dim))
        alone.real->select(c, o);
}

static void alone_attend(struct kctx *c, const struct kop_attend *o) {
    const struct kdims *d = o->dims;
    double n = positions(o->batch, o->selected ? d->ix_topk : 0);
    double read = o->batch->n_out == o->batch->n_rows ? n : o->batch->max_context;
    double row = F4(d->n_heads * (2 * d->r_kv + d->d_rope));
    if (is_turn(OP_ATTEND, read * (double)alone.real->latent_bytes(d) + row * o->batch->n_rows,
                2 * n * d->n_heads * (2 * d->r_kv + d->d_rope)))
        alone.real->attend(c, o);
}

static void alone_swiglu(struct kctx *c, const struct kop_swiglu *o) {
    if (is_turn(OP_SWIGLU, F4(3 * (int64_t)o->n_rows * o->width), 0)) alone.real->swiglu(c, o);
}

static void alone_experts_up(struct kctx *c, const struct kop_experts_up *o) {
    double T = o->batch->n_rows, F = (double)o->gate->rows, D = (double)o->gate->cols;
    double bytes = chosen_bytes(o->gate) + chosen_bytes(o->up) +
                   F4(T * (D + o->dims->n_used * F + o->dims->n_experts));
    if (is_turn(OP_UP, bytes, 4 * T * o->dims->n_used * F * D)) alone.real->experts_up(c, o);
}

static void alone_experts_down(struct kctx *c, const struct kop_experts_down *o) {
    double T = o->batch->n_rows, F = (double)o->down->cols, D = (double)o->down->rows;
    double Fs = o->shared_down ? (double)o->shared_down->cols : 0;
    double bytes = chosen_bytes(o->down) + (o->shared_down ? mat_bytes(o->shared_down) : 0) +
                   F4(T * (D + o->dims->n_used * F + Fs));
    if (is_turn(OP_DOWN, bytes, 2 * T * D * (o->dims->n_used * F + Fs)))
        alone.real->experts_down(c, o);
}

static void alone_gather(struct kctx *c, const struct kop_gather *o) {
    if (is_turn(OP_GATHER, F4(2 * o->batch->n_out * o->width), 0)) alone.real->gather(c, o);
}

static void alone_sample(struct kctx *c, const struct kop_sample *o) {
    if (is_turn(OP_SAMPLE, F4(o->batch->n_out * o->vocab), 0)) alone.real->sample(c, o);
}

static int alone_sum(struct coll *c, float *x, int64_t n) {
    UNUSED(c);
    return is_turn(OP_SUM, F4(2 * n), 0) ? coll_all_reduce(alone.coll, x, n) : OK;
}

static void make_table(struct kernels *t) {
    *t = *alone.real;
    t->graph_begin = NULL;
    t->feed = alone_feed, t->angles = alone_angles, t->embed = alone_embed, t->norm = alone_norm;
    t->matmul = alone_matmul, t->head_matmul = alone_head_matmul, t->attn_prep = alone_attn_prep;
    t->rope = alone_rope, t->select = alone_select, t->attend = alone_attend;
    t->swiglu = alone_swiglu, t->experts_up = alone_experts_up;
    t->experts_down = alone_experts_down, t->gather = alone_gather, t->sample = alone_sample;
}

/* ---- measuring ------------------------------------------------------------------------------- */

static void one_pass(struct bench *b) {
    struct coll_ops ops = coll_absent_ops;
    ops.all_reduce = alone_sum;
    struct coll coll = {.ops = &ops, .world = b->m.world};
    alone.calls = 0;
    alone.bytes = alone.flops = 0;
    bench_run(b, &coll);
}

/* Nobody else's keys: those of steps end below bit 60. */
static uint64_t key_of(const struct kbatch *b) {
    return (uint64_t)1 << 60 | (uint64_t)b->n_rows << 40 | (uint64_t)b->max_context << 20 |
           (uint64_t)alone.only;
}

static double timed_pass(struct bench *b, bool graph) {
    const struct kernels *k = alone.real;
    bench_flush(b->m.ctx); /* and while that runs, what follows is queued */
    double start = bench_now_us();
    k->mark(b->m.ctx, 0);
    if (!graph || !k->graph_begin(b->m.ctx, key_of(&b->m.batch))) one_pass(b);
    k->mark(b->m.ctx, 1);
    k->wait(b->m.ctx, 1);
    double host = bench_now_us() - start, device = (double)k->span_us(b->m.ctx, 0, 1);
    return device > 0 ? device : host;
}

/* Median of a pass with only `only`, less base; what it was called with stands in `alone`. */
static double measure(struct bench *b, int only, double us[BENCH_TURNS]) {
    const struct kernels *k = alone.real;
    bool graph = k->graph_prepare != NULL;
    alone.only = only;
    if (graph && k->graph_prepare(b->m.ctx, key_of(&b->m.batch))) {
        one_pass(b);
        k->graph_end(b->m.ctx, key_of(&b->m.batch));
    } else {
        graph = false;
        one_pass(b);
    }
    if (alone.calls == 0) return 0;
    int calls = alone.calls;
    double bytes = alone.bytes, flops = alone.flops;
    for (int i = -2; i < BENCH_TURNS; i++) us[i < 0 ? 0 : i] = timed_pass(b, graph);
    alone.calls = calls, alone.bytes = bytes, alone.flops = flops;
    return bench_median(us, BENCH_TURNS);
}

static void report(struct bench *b, int only, const char *name, int context, double base) {
    double us[BENCH_TURNS], median = measure(b, only, us);
    int n = alone.calls;
    if (n == 0) return;
    for (int i = 0; i < BENCH_TURNS; i++) us[i] = MAX(us[i] - base, 0.01) / n;
    bench_table_put(b, &(struct bench_row){.section = "op",
                                           .name = name,
                                           .rows = b->m.batch.n_rows,
                                           .context = context,
                                           .calls = n,
                                           .us = MAX(median - base, 0.01) / n,
                                           .fastest_us = us[0],
                                           .slowest_us = us[BENCH_TURNS - 1],
                                           .bytes = alone.bytes / n,
                                           .flops = alone.flops / n});
}

void bench_ops(struct bench *b, int rows, int context, bool prompt) {
    static struct kernels t;
    char title[64];
    double us[BENCH_TURNS];
    if (!bench_pages(b, prompt ? 1 : rows, context + (prompt ? rows : 1))) {
        bench_table_note(b, "op", rows, context, "caches do not fit");
        return;
    }
    struct coll absent = {.ops = &coll_absent_ops}; /* a prompt's sums are too large to loop back */
    struct coll *coll = prompt && b->ranks > 1 ? &absent : b->coll;
    snprintf(title, sizeof title, "operations alone, %s", prompt ? "one prompt" : "decode");
    bench_table_head(b, title);
    if (prompt)
        bench_rows(b, 1, rows, context);
    else
        bench_rows(b, rows, 1, context);
    bench_run(b, coll); /* inputs of every operation */
    alone.b = b;
    alone.real = b->m.k;
    alone.coll = coll;
    alone.distinct = bench_distinct(b);
    make_table(&t);
    b->m.k = &t;
    double base = alone.real->graph_prepare ? measure(b, OP_FEED, us) : 0;
    for (size_t i = 0; i < ARRAY_LEN(op_names); i++) {
        if (op_names[i].op == OP_SUM && b->m.world == 1) continue;
        report(b, op_names[i].op, op_names[i].name, context, op_names[i].op == OP_FEED ? 0 : base);
    }
    b->m.k = alone.real;
}
