/* coordinator/pages.h: which cache page belongs to whom.
 *
 * A page holds LIMIT_PAGE_TOKENS positions of one sequence, in every layer and on every rank alike,
 * so one account in the coordinator speaks for all ranks.
 *
 * Owns: the free stack, the owner of each page, the queue of retired pages.
 * Called by: sched.c.  Pure.
 * Fails how: pages_get gives all or nothing (ERR_FULL); a page given back by somebody who does not
 * own it is a bug, so an assert.  Limits: 2^31 pages.
 * Tested by: tests/unit/test_pages.c, tests/unit/test_sched.c (simulation)
 */
#ifndef OCTAVO_COORDINATOR_PAGES_H
#define OCTAVO_COORDINATOR_PAGES_H

#include "proto/base.h"

struct pages_retired {
    int32_t page;
    uint64_t step;
};

struct pages {
    int64_t n, n_free, n_retired;
    int32_t *free;  /* [n] a stack, n_free deep */
    int64_t *owner; /* [n] who holds it, PAGES_FREE or PAGES_RETIRED */
    struct pages_retired *retired; /* [n] a ring */
    int64_t retired_head;
    uint64_t answered; /* steps up to this one are behind us */
};

#define PAGES_FREE    (-1)
#define PAGES_RETIRED (-2)

int pages_init(struct pages *p, int64_t n);
void pages_deinit(struct pages *p);

/* Everything is free again, nothing is in flight: the device was lost. */
void pages_reset(struct pages *p);

/* Takes n pages for owner (>= 0) into out[n]: OK, or ERR_FULL and nothing is taken. */
int pages_get(struct pages *p, int64_t owner, int64_t n, int32_t *out);

/* Gives n pages back. They can be taken again once step `last_step`, the last one planned that
 * names them, has been answered (at once if it already was). */
void pages_put(struct pages *p, int64_t owner, const int32_t *ids, int64_t n, uint64_t last_step);

/* Steps up to `step` have been answered. */
void pages_answered(struct pages *p, uint64_t step);

static inline int64_t pages_used(const struct pages *p) { return p->n - p->n_free; }

#endif
