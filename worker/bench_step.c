/* worker/bench_step.c: whole steps: decode at a batch and a context, prompts at a length.
 *
 * Owns: nothing.  Called by: bench.c.  Fails how: ends the process.
 * Limits: BENCH_SLOTS sequences, BENCH_ROWS rows.  Tested by: tests/tree/test_bench.py
 *
 * Tokens are fresh and random in each step, so that routing differs from step to step; the distinct
 * experts of the last layer are counted, and the bytes of a step are those of what it must read:
 * all shared weights, that many experts per layer, the rows' caches.
 */
#include <stdlib.h>
#include <time.h>

#include "worker/bench.h"
#include "worker/graphs.h"

double bench_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double bench_median(double *us, int n) {
    qsort(us, (size_t)n, sizeof *us, by_size);
    return us[n / 2];
}

static int32_t random_token(struct bench *b) {
    uint64_t z = b->seed += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return (int32_t)((z ^ z >> 31) % (uint64_t)b->m.hp.vocab);
}

/* ---- rows and pages -------------------------------------------------------------------------- */

int64_t bench_pages_of(int slots, int positions) {
    return (int64_t)slots * ((positions + K_PAGE - 1) / K_PAGE);
}

int bench_together(int prompts, int each, int max_rows) {
    return MAX(1, MIN(MIN(prompts, BENCH_SLOTS), max_rows / each));
}

bool bench_pages(struct bench *b, int slots, int positions) {
    struct model *m = &b->m;
    int64_t each = bench_pages_of(1, positions);
    if (each * slots > m->n_pages) return false;
    size_t n = (size_t)slots * (size_t)m->seqs.max_pages;
    int32_t *table = calloc(n, sizeof *table);
    if (!table) exit(1);
    for (int s = 0; s < slots; s++)
        for (int64_t i = 0; i < each; i++)
            table[(int64_t)s * m->seqs.max_pages + i] = (int32_t)(s * each + i);
    m->k->put(m->ctx, m->seqs.page_table, table, n * sizeof *table);
    m->k->sync(m->ctx);
    free(table);
    return true;
}

void bench_rows(struct bench *b, int prompts, int each, int at) {
    struct model *m = &b->m;
    int rows = prompts * each;
    for (int t = 0; t < rows; t++) {
        b->token[t] = random_token(b);
        b->pos[t] = at + t % each;
        b->slot[t] = t / each;
    }
    for (int s = 0; s < prompts; s++) b->out_row[s] = (s + 1) * each - 1;
    m->batch.n_rows = rows;
    m->batch.n_out = prompts;
    m->batch.max_context = at + each;
    size_t n = (size_t)rows * 4;
    m->k->put(m->ctx, m->batch.token, b->token, n);
    m->k->put(m->ctx, m->batch.pos, b->pos, n);
    m->k->put(m->ctx, m->batch.slot, b->slot, n);
    m->k->put(m->ctx, m->batch.out_row, b->out_row, (size_t)prompts * 4);
}

void bench_run(struct bench *b, struct coll *coll) {
    if (forward(&b->m, coll, NULL) == OK) return;
    fprintf(stderr, "bench: the forward pass failed\n");
    exit(1);
}

int bench_distinct(struct bench *b) {
    int n = b->m.batch.n_rows * b->m.hp.dims.n_used, found = 0;
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    bool seen[LIMIT_EXPERTS] = {false};
    if (!ids) exit(1);
    b->m.k->get(b->m.ctx, ids, b->m.s.ids, (size_t)n * sizeof *ids);
    for (int i = 0; i < n; i++)
        if (ids[i] >= 0 && ids[i] < LIMIT_EXPERTS && !seen[ids[i]]) seen[ids[i]] = true, found++;
    free(ids);
    return found;
}

/* ---- what a step must do --------------------------------------------------------------------- */

static double cache_bytes(const struct bench *b, int rows, int context) {
    const struct kdims *d = &b->m.hp.dims;
    const struct kernels *k = b->m.k;
    bool sparse = context > d->ix_topk;
    double position = (double)k->latent_bytes(d) * (sparse ? d->ix_topk : context) +
                      (sparse ? (double)k->index_bytes(d) * context : 0);
    return position * rows * b->m.hp.n_layers + (sparse ? (double)b->select_bytes : 0);
}

static double weight_bytes(const struct bench *b, double distinct) {
    return (double)b->fixed_bytes + distinct * (double)b->expert_bytes * b->moe_layers;
}

/* Operations of attention and indexer for a row at position p, one layer. */
static double attention_flops(const struct kdims *d, int p, bool sparse) {
    double seen = sparse ? MIN(p + 1, d->ix_topk) : p + 1;
    double flops = 2.0 * d->n_heads * (2 * d->r_kv + d->d_rope) * seen;
    if (sparse) flops += 2.0 * d->ix_heads * d->ix_dim * (p + 1);
    return flops;
}

static double prompt_flops(const struct bench *b, int prompts, int each) {
    const struct kdims *d = &b->m.hp.dims;
    double one = 0;
    for (int p = 0; p < each; p++) one += attention_flops(d, p, each > d->ix_topk);
    double products = b->fixed_macs + b->expert_macs * d->n_used * b->moe_layers;
    return prompts * (2 * products * each + one * b->m.hp.n_layers);
}

/* ---- decode ---------------------------------------------------------------------------------- */

/* As the service does before it is ready. */
static void prepare(struct bench *b, int rows, int context) {
    bool kept;
    if (!forward_in_graphs(&b->m, b->coll, NULL)) return;
    struct kbatch before = b->m.batch;
    if (forward_prepare(&b->m, b->coll, rows, context, &kept) != OK) exit(1);
    b->m.batch = before;
}

/* Steps are queued in groups, as a server queues the next before the last is answered. */
void bench_decode(struct bench *b, int rows, int context) {
    double us[BENCH_TURNS], distinct = 0;
    if (!bench_pages(b, rows, context + BENCH_GROUP)) {
        bench_table_note(b, "decode", rows, context, "caches do not fit");
        return;
    }
    prepare(b, rows, graphs_tier(&b->m, context + 1));
    prepare(b, rows, graphs_tier(&b->m, context + BENCH_GROUP));
    for (int i = -1; i < BENCH_TURNS; i++) {
        b->m.k->sync(b->m.ctx);
        double start = bench_now_us();
        for (int j = 0; j < BENCH_GROUP; j++) {
            bench_rows(b, rows, 1, context + j);
            bench_run(b, b->coll);
        }
        b->m.k->sync(b->m.ctx);
        if (i < 0) continue;
        us[i] = (bench_now_us() - start) / BENCH_GROUP;
        distinct += (double)bench_distinct(b) / BENCH_TURNS;
    }
    double median = bench_median(us, BENCH_TURNS);
    bench_table_put(
        b, &(struct bench_row){.section = "decode",
                               .name = "",
                               .rows = rows,
                               .context = context,
                               .us = median,
                               .fastest_us = us[0],
                               .slowest_us = us[BENCH_TURNS - 1],
                               .bytes = weight_bytes(b, distinct) + cache_bytes(b, rows, context),
                               .distinct = distinct,
                               .tokens = rows});
}

/* ---- prompts --------------------------------------------------------------------------------- */

/* Feeds `prompts` prompts of `each` tokens: several to a step, or one in several steps. */
static void feed_prompts(struct bench *b, struct coll *coll, int prompts, int each) {
    int together = bench_together(prompts, each, b->m.max_rows);
    for (int p = 0; p < prompts; p += together)
        for (int at = 0; at < each; at += b->m.max_rows) {
            bench_rows(b, MIN(together, prompts - p), MIN(each - at, b->m.max_rows), at);
            bench_run(b, coll);
        }
}

void bench_prompts(struct bench *b, int prompts, int each) {
    enum { TURNS = 5, WARM = 2 }; /* the second time a step is captured, if ever */
    double us[TURNS];
    int rows = prompts * each;
    struct coll absent = {.ops = &coll_absent_ops}; /* such sums are too large to loop back */
    if (!bench_pages(b, bench_together(prompts, each, b->m.max_rows), each)) {
        bench_table_note(b, "prefill", rows, each, "caches do not fit");
        return;
    }
    for (int i = -WARM; i < TURNS; i++) {
        b->m.k->sync(b->m.ctx);
        double start = bench_now_us();
        feed_prompts(b, b->ranks > 1 ? &absent : b->coll, prompts, each);
        b->m.k->sync(b->m.ctx);
        if (i >= 0) us[i] = bench_now_us() - start;
    }
    double median = bench_median(us, TURNS);
    char name[48];
    snprintf(name, sizeof name, prompts > 1 ? "prefill, %d prompts" : "prefill", prompts);
    bench_table_put(b, &(struct bench_row){.section = "prefill",
                                           .name = name,
                                           .rows = rows,
                                           .context = each,
                                           .us = median,
                                           .fastest_us = us[0],
                                           .slowest_us = us[TURNS - 1],
                                           .bytes = weight_bytes(b, b->m.hp.dims.n_experts),
                                           .flops = prompt_flops(b, prompts, each),
                                           .tokens = rows});
}
