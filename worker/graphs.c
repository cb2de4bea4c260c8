/* worker/graphs.c: which steps are kept as graphs, and what they cost. See graphs.h.
 *
 * Owns: nothing.  Called by: load.c, main.c, step.c, forward.c.  Fails how: see graphs.h.
 * Limits: the context's number of graphs; what does not fit is captured later, or never.
 * Tested by: tests/unit/test_graphs.c
 *
 * Memory is counted before anything is allocated by capturing steps of the extreme shapes with
 * pointers to nothing and throwing the captures away: what the backend launches is then known from
 * what it launches, and not from a second copy of its arithmetic. This also loads every kernel, so
 * that the free memory that cache pages are planned from is what is free indeed.
 */
#include <time.h>

#include "worker/graphs.h"

#define TIER_FACTOR 4
#define DENSE_TIER  2048  /* for models that attend to everything */
#define SLACK       5 / 4 /* graphs hold the collectives too, which are not open yet */

static const int buckets[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, GRAPHS_ROWS_MAX};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

int graphs_bucket(int rows) {
    for (size_t i = 0; i < ARRAY_LEN(buckets); i++)
        if (buckets[i] >= rows) return buckets[i];
    return 0;
}

int graphs_next_bucket(int bucket) {
    return graphs_bucket(bucket + 1);
}

int graphs_padded(const struct model *m, int rows) {
    int bucket = graphs_bucket(rows);
    return bucket > 0 && bucket <= m->max_rows && bucket <= m->max_outs ? bucket : rows;
}

int graphs_tier(const struct model *m, int context) {
    int whole = m->hp.dims.ix_topk > 0 ? m->hp.dims.ix_topk : DENSE_TIER;
    int64_t tier = MAX(whole / 4, K_PAGE);
    while (tier < context) tier *= tier < whole ? 2 : TIER_FACTOR;
    return (int)MIN(tier, MAX(m->max_context, context));
}

/* Largest bucket that a step of one row per slot can need. */
static int widest(const struct model *m) {
    int most = MIN(MIN(m->seqs.max_slots, GRAPHS_ROWS_MAX), MIN(m->max_rows, m->max_outs));
    return graphs_padded(m, most);
}

/* Calls `each` with every pair of bucket and tier. */
static int each_shape(const struct model *m, int (*each)(void *user, int rows, int tier),
                      void *user) {
    for (int rows = 1; rows > 0 && rows <= widest(m); rows = graphs_next_bucket(rows))
        for (int context = 1, tier; context <= m->max_context; context = tier + 1) {
            tier = graphs_tier(m, context);
            TRY(each(user, rows, tier));
        }
    return OK;
}

static int count_one(void *user, int rows, int tier) {
    (void)rows, (void)tier;
    ++*(int *)user;
    return OK;
}

int graphs_count(const struct model *m) {
    int n = 0;
    (void)each_shape(m, count_one, &n);
    return n;
}

/* ---- before memory is allocated ---------------------------------------------------------- */

/* With nothing where the collectives will be. */
static void measure_shape(struct model *m, int rows, int outs, int tier, size_t *graph) {
    struct coll coll = {.ops = &coll_absent_ops, .rank = m->rank, .world = m->world};
    struct kneeds needs = {0};
    int rc = forward_measure(m, &coll, rows, outs, tier, &needs);
    assert(rc == OK);
    m->work_bytes = MAX(m->work_bytes, needs.work_bytes);
    *graph = needs.graph_bytes;
}

static int measure_one(void *user, int rows, int tier) {
    struct model *m = user;
    size_t graph = 0;
    measure_shape(m, rows, rows, tier, &graph);
    m->graph_bytes += graph * SLACK;
    m->n_graphs++;
    return OK;
}

void graphs_measure(struct model *m) {
    size_t graph;
    m->work_bytes = m->graph_bytes = 0;
    m->n_graphs = 0;
    if (!m->k->measure_begin) return;
    (void)each_shape(m, measure_one, m);
    for (int rows = m->max_rows; rows > 0; rows /= 2) {
        measure_shape(m, rows, MIN(rows, m->max_outs), m->max_context, &graph);
        if (rows == m->max_rows) m->graph_bytes += K_GRAPHS_LATER * graph * SLACK;
    }
}

/* ---- at the start ------------------------------------------------------------------------ */

struct capture {
    struct model *m;
    struct coll *coll;
    bool (*stop)(void *user);
    void *user;
    struct graphs_report *out;
};

static int capture_one(void *user, int rows, int tier) {
    struct capture *x = user;
    bool kept;
    if (x->stop && x->stop(x->user)) return ERR_ABORTED;
    TRY(forward_prepare(x->m, x->coll, rows, tier, &kept));
    x->out->made += kept;
    return OK;
}

static uint64_t free_bytes(const struct model *m) {
    struct kdevice_info info;
    m->k->sync(m->ctx);
    m->k->info(m->ctx, &info);
    return info.free_bytes;
}

int graphs_capture(struct model *m, struct coll *coll, bool (*stop)(void *user), void *user,
                   struct graphs_report *out) {
    struct capture x = {m, coll, stop, user, out};
    *out = (struct graphs_report){0};
    if (!forward_in_graphs(m, coll, NULL)) return OK;
    uint64_t start = now_us(), before = free_bytes(m);
    int rc = each_shape(m, capture_one, &x);
    uint64_t after = free_bytes(m);
    out->bytes = before > after ? before - after : 0;
    out->seconds = (double)(now_us() - start) / 1e6;
    return rc;
}
