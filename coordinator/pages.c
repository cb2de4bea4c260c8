/* coordinator/pages.c: which cache page holds what, and who still needs it. See pages.h.
 *
 * Owns: see pages.h.  Called by: sched*.c.
 * Fails how: ERR_FULL, ERR_NOMEM.  Limits: 2^31 pages.
 * Tested by: tests/unit/test_pages.c, tests/unit/test_sched_sim.c
 *
 * Why "retired" between given back and free: a step in flight may still read or write the pages of
 * a sequence that has just ended (a stop found late, a client that left). Handing such a page to
 * somebody else would be harmless only as long as every rank runs steps strictly one after the
 * other; the rule here does not depend on how a worker overlaps them. The list is drained in order
 * of retirement, not of step: a page may wait a step longer than it must, never shorter.
 *
 * A named page is never written again: its holders only read it, and it loses its name before it is
 * taken for something else. Free pages go first, then the kept one that was used longest ago; a
 * sequence gives its pages back from the last to the first, so that a chain is eaten from its end
 * and what remains of it can still be found. The free pages are a stack on purpose: an error of
 * accounting shows itself soon instead of late.
 */
#include "coordinator/pages.h"

#include <stdlib.h>

int pages_init(struct pages *p, int64_t n) {
    assert(n > 0 && n <= INT32_MAX);
    *p = (struct pages){.n = n, .n_buckets = 1};
    while (p->n_buckets < n) p->n_buckets *= 2;
    p->page = calloc((size_t)n, sizeof *p->page);
    p->bucket = calloc((size_t)p->n_buckets, sizeof *p->bucket);
    if (!p->page || !p->bucket) {
        pages_deinit(p);
        return ERR_NOMEM;
    }
    pages_reset(p);
    return OK;
}

void pages_deinit(struct pages *p) {
    free(p->page);
    free(p->bucket);
    *p = (struct pages){0};
}

/* ---- the lists ------------------------------------------------------------------------------- */

static struct page_list *list_of(struct pages *p, enum page_state s) {
    assert(s != PAGE_HELD);
    return s == PAGE_FREE ? &p->free : s == PAGE_RETIRED ? &p->retired : &p->kept;
}

/* Out of its list; held pages are in none. */
static void leave(struct pages *p, int32_t id) {
    struct page *g = &p->page[id];
    if (g->state == PAGE_HELD) return;
    struct page_list *l = list_of(p, g->state);
    *(g->prev == PAGES_NONE ? &l->head : &p->page[g->prev].next) = g->next;
    *(g->next == PAGES_NONE ? &l->tail : &p->page[g->next].prev) = g->prev;
    l->n--;
    g->state = PAGE_HELD;
}

/* From held into the list of that state. */
static void enter(struct pages *p, int32_t id, enum page_state s) {
    struct page *g = &p->page[id];
    struct page_list *l = list_of(p, s);
    bool first = s == PAGE_FREE;
    assert(g->state == PAGE_HELD && g->refs == 0);
    g->state = s;
    g->prev = first ? PAGES_NONE : l->tail;
    g->next = first ? l->head : PAGES_NONE;
    *(g->prev == PAGES_NONE ? &l->head : &p->page[g->prev].next) = id;
    *(g->next == PAGES_NONE ? &l->tail : &p->page[g->next].prev) = id;
    l->n++;
}

void pages_reset(struct pages *p) {
    p->free = p->retired = p->kept = (struct page_list){PAGES_NONE, PAGES_NONE, 0};
    for (int64_t i = 0; i < p->n_buckets; i++) p->bucket[i] = PAGES_NONE;
    for (int64_t i = p->n - 1; i >= 0; i--) { /* page 0 is taken first */
        p->page[i] = (struct page){.state = PAGE_HELD};
        enter(p, (int32_t)i, PAGE_FREE);
    }
}

/* ---- names ----------------------------------------------------------------------------------- */

static int32_t *bucket_of(const struct pages *p, struct digest name) {
    return &p->bucket[name.a & (uint64_t)(p->n_buckets - 1)];
}

int32_t pages_find(const struct pages *p, struct digest name) {
    int32_t id = *bucket_of(p, name);
    while (id != PAGES_NONE && !digest_equal(p->page[id].name, name)) id = p->page[id].next_named;
    return id;
}

void pages_name(struct pages *p, int32_t page, struct digest name) {
    struct page *g = &p->page[page];
    assert(g->refs > 0);
    if (g->named || pages_find(p, name) != PAGES_NONE) return;
    g->named = true;
    g->name = name;
    g->next_named = *bucket_of(p, name);
    *bucket_of(p, name) = page;
}

void pages_unname(struct pages *p, int32_t page) {
    struct page *g = &p->page[page];
    assert(g->state == PAGE_HELD);
    if (!g->named) return;
    int32_t *at = bucket_of(p, g->name);
    while (*at != page) at = &p->page[*at].next_named;
    *at = g->next_named;
    g->named = false;
}

/* ---- taking and giving back ------------------------------------------------------------------ */

int pages_get(struct pages *p, int64_t n, int32_t *out) {
    assert(n >= 0);
    if (n > pages_room(p)) return ERR_FULL;
    for (int64_t i = 0; i < n; i++) {
        int32_t id = p->free.n ? p->free.head : p->kept.head;
        leave(p, id);
        pages_unname(p, id);
        assert(p->page[id].refs == 0 && p->page[id].step <= p->answered);
        p->page[id].refs = 1;
        out[i] = id;
    }
    return OK;
}

void pages_share(struct pages *p, int32_t page) {
    assert(p->page[page].named);
    leave(p, page);
    p->page[page].refs++;
}

/* Nobody holds it and no step in flight names it. */
static void release(struct pages *p, int32_t page) {
    enter(p, page, p->page[page].named ? PAGE_KEPT : PAGE_FREE);
}

void pages_put(struct pages *p, const int32_t *ids, int64_t n, uint64_t last_step) {
    for (int64_t i = n - 1; i >= 0; i--) {
        assert(ids[i] >= 0 && ids[i] < p->n);
        struct page *g = &p->page[ids[i]];
        assert(g->state == PAGE_HELD && g->refs > 0);
        g->step = MAX(g->step, last_step);
        if (--g->refs > 0) continue;
        if (g->step <= p->answered)
            release(p, ids[i]);
        else
            enter(p, ids[i], PAGE_RETIRED);
    }
}

void pages_answered(struct pages *p, uint64_t step) {
    assert(step >= p->answered);
    p->answered = step;
    while (p->retired.n > 0 && p->page[p->retired.head].step <= step) {
        int32_t id = p->retired.head;
        leave(p, id);
        release(p, id);
    }
}
