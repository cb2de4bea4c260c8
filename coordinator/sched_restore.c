/* coordinator/sched_restore.c: back to what was committed, when a rank is replaced. See sched.h.
 *
 * Owns: nothing of its own.  Called by: engine.c through sched.h.  Pure.
 * Fails how: cannot.  Limits: LIMIT_COPY_RUNS, LIMIT_STEP_ROWS per message.
 * Tested by: tests/unit/test_sched.c
 *
 * A step that was not answered may have run on some ranks, in part or in full, and on others not at
 * all. Nothing is asked about it: the coordinator's account is the only truth, and every rank,
 * survivor or newborn, is brought to it. What such a step wrote into the caches lies at positions
 * that were not committed, so it is written again before anybody reads it; what it did to a slot
 * (the token sampled last, the counts for penalties) is undone by admitting the sequence anew and
 * telling its history. So a sequence goes on exactly as it would have.
 *
 * Named pages are copied whether or not somebody holds them: to copy is a thousand times cheaper than
 * to compute. A page that nobody needs is not, but a short gap between two runs is: ranks that meet once
 * more lose more time than a few pages cost.
 */
#include <string.h>

#include "coordinator/sched_state.h"

#define GAP_PAGES 3 /* of nobody's, copied rather than left out */

void sched_take_back(struct sched *s) {
    while (s->n_flight > 0) { /* the newest first: the oldest says where its sequence stands */
        const struct flight *f = &s->flight[(s->flight_head + --s->n_flight) % SCHED_DEPTH_MAX];
        for (int i = 0; i < f->n; i++) {
            const struct flight_entry *e = &f->e[i];
            const struct slot *slot = &s->slots[e->slot];
            if (slot->seq == NONE || slot->generation != e->generation) continue;
            struct seq *q = &s->seqs[slot->seq];
            assert(q->n_fed >= e->pos && q->n_pending >= e->samples);
            q->n_fed = e->pos;
            q->n_pending -= e->samples;
        }
    }
    for (int i = 0; i < s->n_running; i++) {
        struct seq *q = &s->seqs[s->running[i]];
        if (q->mark != MARK_NONE) q->n_fed = q->n_pending = 0; /* its answers were not taken */
        assert(q->n_pending == 0 && q->n_fed <= q->n_tokens);
        s->slots[q->slot].generation++;
        q->n_announced = sched_pages_for(q->n_fed);
        s->count.resumed++;
    }
    if (s->pages.n) pages_answered(&s->pages, s->last_id); /* whatever named them never ends */
}

void sched_restore_begin(struct sched *s) {
    struct sched_restore *r = &s->restore;
    r->page = r->running = 0;
    r->pos = NONE;
    if (s->pages.n) memset(r->live, 0, (size_t)s->pages.n);
    for (int i = 0; i < s->n_running; i++) {
        const struct seq *q = &s->seqs[s->running[i]];
        for (int32_t k = 0; k < sched_pages_for(q->n_fed); k++) r->live[q->pages[k]] = 1;
    }
    for (int64_t i = 0; i < s->pages.n; i++) r->live[i] |= s->pages.page[i].named;
}

/* The next run of live pages: false when there is none. */
static bool next_run(struct sched *s, struct msg_run *run) {
    struct sched_restore *r = &s->restore;
    while (r->page < s->pages.n && !r->live[r->page]) r->page++;
    if (r->page == s->pages.n) return false;
    int64_t first = r->page, last = first;
    for (r->page++; r->page < s->pages.n && r->page - last <= GAP_PAGES + 1; r->page++)
        if (r->live[r->page]) last = r->page;
    r->page = last + 1;
    *run = (struct msg_run){(int32_t)first, (int32_t)(last - first + 1)};
    return true;
}

static bool next_copy(struct sched *s, struct msg_copy *c) {
    c->n_runs = 0;
    c->id = 0;
    c->needs = c->generation = 0;
    c->root = 0;
    while (c->n_runs < LIMIT_COPY_RUNS && next_run(s, &c->runs[c->n_runs])) c->n_runs++;
    return c->n_runs > 0;
}

int32_t sched_history(const struct sched *s, const struct seq *q, int32_t pos, int32_t end,
                      struct msg_step *m) {
    int32_t n = MIN(end - pos, LIMIT_STEP_ROWS); /* whole pages but for the last */
    int32_t page = pos / LIMIT_PAGE_TOKENS;
    static_assert(LIMIT_STEP_ROWS % LIMIT_PAGE_TOKENS == 0, "a message ends where a page does");
    m->id = s->last_id;
    m->generation = 0;
    m->n_entries = 1;
    m->n_tokens = n;
    m->n_pages = sched_pages_for(pos + n) - page;
    m->entries[0] = (struct msg_entry){.slot = q->slot,
                                       .slot_generation = s->slots[q->slot].generation,
                                       .pos = pos,
                                       .count = n,
                                       .page_first = page,
                                       .n_pages = m->n_pages};
    memcpy(m->tokens, q->tokens + pos, (size_t)n * sizeof *m->tokens);
    memcpy(m->pages, q->pages + page, (size_t)m->n_pages * sizeof *m->pages);
    return n;
}

bool sched_restore_next(struct sched *s, struct msg *m) {
    struct sched_restore *r = &s->restore;
    m->type = MSG_COPY;
    if (r->page < s->pages.n && next_copy(s, &m->copy)) return true;
    for (; r->running < s->n_running; r->running++, r->pos = NONE) {
        const struct seq *q = &s->seqs[s->running[r->running]];
        if (r->pos == NONE) {
            m->type = MSG_ADMIT;
            seq_admit(s, q, &m->admit);
            r->pos = 0;
            return true;
        }
        if (r->pos < q->n_fed) {
            m->type = MSG_RESTORE;
            r->pos += sched_history(s, q, r->pos, q->n_fed, &m->restore);
            return true;
        }
    }
    return false;
}
