/* coordinator/pages.c: which cache page belongs to whom. See pages.h.
 *
 * Owns: the free stack, the owners, the ring of retired pages.  Called by: sched.c.
 * Fails how: ERR_FULL, ERR_NOMEM.  Limits: 2^31 pages.
 * Tested by: tests/unit/test_pages.c, tests/unit/test_sched.c
 *
 * Why a ring between "given back" and "free": a step in flight may still read or write the pages of
 * a sequence that has just ended (a stop found late, a client that left). Handing such a page to
 * somebody else would be harmless only as long as every rank runs steps strictly one after the
 * other; the rule here does not depend on how a worker overlaps them. The ring is drained in order
 * of retirement, not of step: a page may wait one step longer than it must, never shorter.
 *
 * The stack is last in, first out on purpose: the page freed most recently is the one whose memory
 * is most likely still warm, and an error of accounting shows itself soon instead of late.
 */
#include "coordinator/pages.h"

#include <stdlib.h>

int pages_init(struct pages *p, int64_t n) {
    assert(n > 0 && n <= INT32_MAX);
    *p = (struct pages){.n = n};
    p->free = calloc((size_t)n, sizeof *p->free);
    p->owner = calloc((size_t)n, sizeof *p->owner);
    p->retired = calloc((size_t)n, sizeof *p->retired);
    if (!p->free || !p->owner || !p->retired) {
        pages_deinit(p);
        return ERR_NOMEM;
    }
    pages_reset(p);
    return OK;
}

void pages_deinit(struct pages *p) {
    free(p->free);
    free(p->owner);
    free(p->retired);
    *p = (struct pages){0};
}

void pages_reset(struct pages *p) {
    for (int64_t i = 0; i < p->n; i++) {
        p->free[i] = (int32_t)(p->n - 1 - i); /* page 0 is taken first */
        p->owner[i] = PAGES_FREE;
    }
    p->n_free = p->n;
    p->n_retired = p->retired_head = 0;
}

int pages_get(struct pages *p, int64_t owner, int64_t n, int32_t *out) {
    assert(owner >= 0 && n >= 0);
    if (n > p->n_free) return ERR_FULL;
    for (int64_t i = 0; i < n; i++) {
        int32_t page = p->free[--p->n_free];
        assert(p->owner[page] == PAGES_FREE);
        p->owner[page] = owner;
        out[i] = page;
    }
    return OK;
}

static void release(struct pages *p, int32_t page) {
    p->owner[page] = PAGES_FREE;
    p->free[p->n_free++] = page;
}

void pages_put(struct pages *p, int64_t owner, const int32_t *ids, int64_t n, uint64_t last_step) {
    for (int64_t i = 0; i < n; i++) {
        int32_t page = ids[i];
        assert(page >= 0 && page < p->n);
        assert(p->owner[page] == owner);
        if (last_step <= p->answered) {
            release(p, page);
            continue;
        }
        p->owner[page] = PAGES_RETIRED;
        int64_t at = (p->retired_head + p->n_retired++) % p->n;
        p->retired[at] = (struct pages_retired){page, last_step};
    }
}

void pages_answered(struct pages *p, uint64_t step) {
    assert(step >= p->answered);
    p->answered = step;
    while (p->n_retired > 0 && p->retired[p->retired_head].step <= step) {
        release(p, p->retired[p->retired_head].page);
        p->retired_head = (p->retired_head + 1) % p->n;
        p->n_retired--;
    }
}
