/* coordinator/pages.h: which cache page holds what, and who still needs it.
 *
 *             get                    put, last one            answered
 *   (free) ─────────> held (refs > 0) ────────────> retired ────────────> (free), or if named:
 *      ^                 ^      share                  │ share               kept
 *      │                 └─────────────────────────────┴───────────────────── │
 *      └──────────────────────── taken, least recently used first ────────────┘
 *
 * A page holds LIMIT_PAGE_TOKENS positions of one sequence, in every layer and on every rank alike,
 * so one account in the coordinator speaks for all ranks. A full page can be given a name: the
 * digest of every token up to its end. Who needs the same tokens shares it.
 *
 * Owns: the state of each page, the free stack, the retired and the kept list, the table of names.
 * Called by: sched*.c.  Pure.
 * Fails how: pages_get gives all or nothing (ERR_FULL); a page given back more often than it was
 * taken is a bug, so an assert.  Limits: 2^31 pages.
 * Tested by: tests/unit/test_pages.c, tests/unit/test_sched_sim.c
 */
#ifndef OCTAVO_COORDINATOR_PAGES_H
#define OCTAVO_COORDINATOR_PAGES_H

#include "proto/base.h"

struct digest {
    uint64_t a, b;
};

enum page_state { PAGE_FREE, PAGE_HELD, PAGE_RETIRED, PAGE_KEPT };

struct page {
    enum page_state state;
    int32_t refs;
    int32_t prev, next; /* of the list of its state */
    uint64_t step;      /* the last step known to name it */
    bool named;
    struct digest name;
    int32_t next_named; /* in the same bucket */
};

struct page_list {
    int32_t head, tail;
    int64_t n;
};

struct pages {
    int64_t n;
    struct page *page;              /* [n] */
    struct page_list free;          /* taken from the head, given to the head */
    struct page_list retired, kept; /* given to the tail */
    int32_t *bucket;                /* [n_buckets] first page of that name's hash, or PAGES_NONE */
    int64_t n_buckets;              /* a power of two */
    uint64_t answered;              /* steps up to this one are behind us */
};

#define PAGES_NONE (-1)

int pages_init(struct pages *p, int64_t n);
void pages_deinit(struct pages *p);

/* Everything is free and nameless again, nothing is in flight: the device was lost. */
void pages_reset(struct pages *p);

/* Takes n pages that nobody needs into out[n]: OK, or ERR_FULL and nothing is taken. */
int pages_get(struct pages *p, int64_t n, int32_t *out);

/* One more holder of a page that was found by its name. */
void pages_share(struct pages *p, int32_t page);

/* One holder less of each. A page that nobody holds can be taken again once the last step that
 * names it has been answered; `last_step` is the last one of this holder. */
void pages_put(struct pages *p, const int32_t *ids, int64_t n, uint64_t last_step);

/* Steps up to `step` have been answered. */
void pages_answered(struct pages *p, uint64_t step);

/* A held page, full and answered, is known by this name from now on, unless it has one already or
 * another page has that name. */
void pages_name(struct pages *p, int32_t page, struct digest name);

/* A held page cannot be found any more; who holds it keeps it. */
void pages_unname(struct pages *p, int32_t page);

/* The page of that name, or PAGES_NONE. */
int32_t pages_find(const struct pages *p, struct digest name);

static inline bool digest_equal(struct digest x, struct digest y) {
    return x.a == y.a && x.b == y.b;
}

/* Pages that can be had now. */
static inline int64_t pages_room(const struct pages *p) {
    return p->free.n + p->kept.n;
}

/* Pages that somebody holds or a step in flight names. */
static inline int64_t pages_used(const struct pages *p) {
    return p->n - pages_room(p);
}

#endif
