/* worker/coll_none.c: collectives of a world of one rank.
 *
 * Owns: its struct.  Called by: coll_open_cpu.c, coll_open_cuda.cu, benchmarks, tests.
 * Fails how: ERR_ABORTED after coll_abort, like the others, so that callers have one behaviour.
 * Limits: none.  Tested by: tests/unit/test_coll.c
 *
 * all_gather copies nothing: the memory may be a device's, and with one rank the caller uses its
 * own part in place (src == dst is asserted).
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "worker/coll.h"

struct coll_none {
    struct coll base;
    atomic_bool aborted;
};

static int none_state(struct coll *c) {
    return atomic_load(&((struct coll_none *)c)->aborted) ? ERR_ABORTED : OK;
}

static int none_all_reduce(struct coll *c, float *x, int64_t n) {
    UNUSED(x), UNUSED(n);
    return none_state(c);
}

static int none_all_gather(struct coll *c, const void *src, void *dst, int64_t bytes) {
    UNUSED(bytes);
    assert(src == dst);
    return none_state(c);
}

static int none_broadcast(struct coll *c, void *x, int64_t bytes, int root) {
    UNUSED(x), UNUSED(bytes), UNUSED(root);
    return none_state(c);
}

static void none_abort(struct coll *c) {
    atomic_store(&((struct coll_none *)c)->aborted, true);
}

static void none_close(struct coll *c) {
    free(c);
}

static const struct coll_ops none_ops = {
    .name = "none",
    .in_graphs = true,
    .all_reduce = none_all_reduce,
    .all_gather = none_all_gather,
    .broadcast = none_broadcast,
    .barrier = none_state,
    .abort = none_abort,
    .close = none_close,
};

int coll_open_none(struct coll **out) {
    struct coll_none *n = calloc(1, sizeof *n);
    if (!n) return ERR_NOMEM;
    n->base.ops = &none_ops;
    n->base.world = 1;
    *out = &n->base;
    return OK;
}

/* ---- not even one rank's ----------------------------------------------------------------- */

static int absent_sum(struct coll *c, float *x, int64_t n) {
    UNUSED(c), UNUSED(x), UNUSED(n);
    return OK;
}

static int absent_gather(struct coll *c, const void *src, void *dst, int64_t bytes) {
    UNUSED(c), UNUSED(src), UNUSED(dst), UNUSED(bytes);
    return OK;
}

const struct coll_ops coll_absent_ops = {
    .name = "absent",
    .in_graphs = true,
    .all_reduce = absent_sum,
    .all_gather = absent_gather,
};
