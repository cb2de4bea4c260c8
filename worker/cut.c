/* worker/cut.c: which part of a tensor a rank holds. See cut.h.
 *
 * Owns: nothing.  Called by: load.c.  Fails how: see cut.h.  Limits: none.
 * Tested by: tests/kernels/test_cuts.c
 *
 * A cut by columns must fall between quantised blocks, and the rows of gate and up are the columns
 * of down, so the three are cut by the blocks of down (need.grain). Where those do not divide by
 * the ranks, nothing is quantised again: experts are dealt out whole, in runs, and the width of a
 * dense layer or a shared expert is cut into runs of blocks that differ by one, some of them empty.
 * Either way the sum over ranks that follows is the same. Heads are never dealt out unevenly: the
 * scratch, the caches' readers and the graphs count on one number of them.
 */
#include "worker/cut.h"

static int refuse(const struct tensor_need *n, const char *what, int64_t whole, int world,
                  struct err_text *err) {
    return err_set(err, ERR_SETUP, "%s: expected %s to divide by %d ranks, found %lld",
                   n->tensor->name, what, world, (long long)whole);
}

static int refuse_blocks(const struct tensor_need *n, int64_t whole, int world,
                         struct err_text *err) {
    bool rows = n->cut == CUT_ROWS;
    return err_set(
        err, ERR_SETUP,
        "%s: expected %lld %s over %d ranks to be whole blocks of %lld%s%s%s, found %lld "
        "each",
        n->tensor->name, (long long)whole, rows ? "rows" : "columns", world, (long long)n->grain,
        rows ? " of ffn_down" : " (", rows ? "" : ktype_name((int)n->tensor->type), rows ? "" : ")",
        (long long)(whole / world));
}

/* Run number `rank` of n things in `world` runs that differ by at most one. */
static void deal(int64_t n, int rank, int world, int64_t *first, int64_t *share) {
    *first = n * rank / world;
    *share = n * (rank + 1) / world - *first;
}

static bool is_width(const struct tensor_need *n) {
    return n->group == PLAN_DENSE || n->group == PLAN_SHARED || n->group == PLAN_EXPERTS;
}

/* Rows or columns of *part, `grain` of which stay together. */
static int cut_width(struct plan_item *it, int64_t *part, int rank, int world, bool uneven,
                     struct err_text *err) {
    struct tensor_need *n = &it->need;
    int64_t whole = *part, grain = n->grain;
    if (whole % (grain * world) == 0) {
        *part = whole / world;
        it->first = rank * *part;
        return OK;
    }
    if (!is_width(n) || !uneven || whole % grain)
        return whole % world ? refuse(n, n->cut == CUT_ROWS ? "rows" : "columns", whole, world, err)
                             : refuse_blocks(n, whole, world, err);
    if (n->group == PLAN_EXPERTS) {
        n->cut = CUT_STACK;
        deal(n->count, rank, world, &it->first, &it->count);
        return OK;
    }
    deal(whole / grain, rank, world, &it->first, part);
    it->first *= grain;
    *part *= grain;
    return OK;
}

int cut_share(struct plan_item *it, int rank, int world, bool uneven, struct err_text *err) {
    const struct tensor_need *n = &it->need;
    it->cols = n->cols;
    it->rows = n->rows;
    it->count = n->count;
    it->first = 0;
    switch (n->cut) {
    case CUT_NONE:
        return OK;
    case CUT_STACK:
        if (n->count % world) return refuse(n, "heads", n->count, world, err);
        it->count = n->count / world;
        it->first = rank * it->count;
        return OK;
    case CUT_ROWS:
        return cut_width(it, &it->rows, rank, world, uneven, err);
    case CUT_COLS:
        return cut_width(it, &it->cols, rank, world, uneven, err);
    }
    return OK;
}
