/* worker/coll_mix.c: small messages over one collective, large ones over another.
 *
 * Owns: the two beneath.  Called by: coll_open_cuda.cu; forward.c and step.c through struct coll.
 * Fails how: as the two beneath.  Limits: none of its own.
 * Tested by: tests/unit/test_coll_mix.c
 *
 * Our own all-reduce has the fewer trips, NCCL the better use of a wire, and where one overtakes
 * the other depends on the box, so it is measured. Both queue on one stream, so they never run at
 * the same time, and every rank takes the same way because only the size decides. It also decides
 * while a graph is captured: a step must give the same bits replayed as it gave run.
 *
 * A step is spoilt by an abort only if it used what the abort breaks: `large` says ERR_ABORTED for
 * everything once its generation is over, so it is asked only after steps that went over it. When
 * one is queued others may be in flight before it, and whose check comes next is not known here, so
 * it is asked at as many checks as there can be steps.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/limits.h"
#include "proto/log.h"
#include "worker/coll_mix.h"
#include "worker/step.h"

struct coll_mix {
    struct coll base;
    struct coll *small, *large;
    int64_t large_from;
    const bool *capturing;
    int to_ask;    /* checks to come that may be of a step that used large */
    bool captured; /* large, by a graph: it may be used without our knowing */
    char name[16];
    struct coll_ops ops;
};

static struct coll_mix *mix_of(struct coll *c) {
    return (struct coll_mix *)c;
}

static struct coll *way_of(struct coll_mix *m, int64_t bytes) {
    if (bytes < m->large_from) return m->small;
    m->to_ask = STEPPER_DEPTH;
    m->captured |= m->capturing && *m->capturing;
    return m->large;
}

/* What the two waited is what this one waited. */
static int mix_waited(struct coll_mix *m, int rc) {
    m->base.wait_us += m->small->wait_us + m->large->wait_us;
    m->small->wait_us = m->large->wait_us = 0;
    return rc;
}

static int mix_all_reduce(struct coll *c, float *x, int64_t n) {
    struct coll_mix *m = mix_of(c);
    return mix_waited(m, coll_all_reduce(way_of(m, n * (int64_t)sizeof *x), x, n));
}

static int mix_all_gather(struct coll *c, const void *src, void *dst, int64_t bytes) {
    struct coll_mix *m = mix_of(c);
    return mix_waited(m, coll_all_gather(way_of(m, bytes * c->world), src, dst, bytes));
}

static int mix_broadcast(struct coll *c, void *x, int64_t bytes, int root) {
    struct coll_mix *m = mix_of(c);
    return mix_waited(m, coll_broadcast(way_of(m, bytes), x, bytes, root));
}

static int mix_check(struct coll *c) {
    struct coll_mix *m = mix_of(c);
    const bool used = m->to_ask > 0 || m->captured;
    if (m->to_ask > 0) m->to_ask--;
    TRY(mix_waited(m, coll_check(m->small)));
    return used ? mix_waited(m, coll_check(m->large)) : OK;
}

/* That of small waits for all that is queued, on whichever way. */
static int mix_barrier(struct coll *c) {
    struct coll_mix *m = mix_of(c);
    return mix_waited(m, coll_barrier(m->small));
}

static void mix_abort(struct coll *c) {
    coll_abort(mix_of(c)->small);
}

static void mix_close(struct coll *c) {
    struct coll_mix *m = mix_of(c);
    coll_close(m->large);
    coll_close(m->small);
    free(m);
}

int coll_open_mix(struct coll **out, struct coll *small, struct coll *large, int64_t large_from,
                  const bool *capturing, struct err_text *err) {
    assert(small->world == large->world && small->generation == large->generation);
    struct coll_mix *m = calloc(1, sizeof *m);
    if (!m) return err_set(err, ERR_NOMEM, "collective mix: expected memory, found none");
    snprintf(m->name, sizeof m->name, "%.7s+%.7s", small->ops->name, large->ops->name);
    m->ops = (struct coll_ops){
        .name = m->name,
        .in_graphs = small->ops->in_graphs && large->ops->in_graphs,
        .all_reduce = mix_all_reduce,
        .all_gather = mix_all_gather,
        .broadcast = mix_broadcast,
        .barrier = mix_barrier,
        .abort = mix_abort,
        .close = mix_close,
        .check = mix_check,
    };
    m->base = (struct coll){.ops = &m->ops,
                            .rank = small->rank,
                            .world = small->world,
                            .generation = small->generation};
    m->small = small;
    m->large = large;
    m->large_from = large_from;
    m->capturing = capturing;
    *out = &m->base;
    return OK;
}

/* ---- where the one overtakes the other ----------------------------------------------------- */

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

struct mix_prober {
    struct coll *shm;
    float (*time_sum)(void *, bool, int64_t);
    void *user;
    uint64_t start_us;
};

/* Of the slowest rank. ERR_AGAIN, on every rank, when the time of one is up. */
static int measure(struct mix_prober *p, bool large, int64_t bytes, float *us) {
    float mine[2], all[2 * LIMIT_RANKS], spent = 0;
    mine[0] = p->time_sum(p->user, large, bytes);
    mine[1] = (float)(now_us() - p->start_us);
    TRY(coll_all_gather(p->shm, mine, all, sizeof mine));
    *us = 0;
    for (int r = 0; r < p->shm->world; r++) {
        if (all[2 * r] < 0) return ERR_TIMEOUT;
        *us = MAX(*us, all[2 * r]);
        spent = MAX(spent, all[2 * r + 1]);
    }
    return spent < MIX_PROBE_US ? OK : ERR_AGAIN;
}

int mix_probe(int64_t *large_from, struct coll *shm,
              float (*time_sum)(void *user, bool large, int64_t bytes), void *user) {
    static const int64_t sizes[] = {MIX_BYTES_MAX, 1 << 20, 256 << 10};
    struct mix_prober p = {shm, time_sum, user, now_us()};
    *large_from = MIX_NEVER;
    for (size_t s = 0; s < ARRAY_LEN(sizes); s++) {
        float small_us, large_us;
        int rc = measure(&p, true, sizes[s], &large_us);
        if (rc == OK) rc = measure(&p, false, sizes[s], &small_us);
        if (rc == ERR_AGAIN)
            return OK; /* what was found holds, for every larger size was measured */
        TRY(rc);
        if (shm->rank == 0)
            log_debug("collective_probe", "bytes=%lld small_us=%.1f large_us=%.1f",
                      (long long)sizes[s], (double)small_us, (double)large_us);
        if (large_us >= small_us) return OK;
        *large_from = sizes[s];
    }
    return OK;
}
