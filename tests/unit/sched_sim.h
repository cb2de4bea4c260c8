/* tests/unit/sched_sim.h: a model of the workers for the scheduler's tests; included once by each.
 *
 * The model keeps what a device would keep: page tables by slot and, in each page, the token fed at
 * each of its 64 positions. The token it samples is a hash of the seed and of every token it finds
 * in the cache, so a page handed out too early, shared wrongly or written while shared, a wrong
 * position or a lost token changes the text. The expected text is computed beside it from prompt and
 * seed alone; a request must get exactly it, whatever was preempted, found in the cache, cancelled
 * or lost meanwhile. A sequence with a penalty must also have been told, or fed, every token: then
 * the hash is over what its slot has counted instead.
 *
 * After every event the scheduler's books are checked: each page is held as often as page tables
 * name it, is in one list alone, and free only when no step in flight names it.
 */
#ifndef OCTAVO_TESTS_SCHED_SIM_H
#define OCTAVO_TESTS_SCHED_SIM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/sched_state.h"

#define VOCAB     61
#define PAGES_MAX 64
#define TEXT_MAX  1200
#define REQS_MAX  4000
#define ROWS_MAX  LIMIT_PAGE_TOKENS

struct req { /* what the client knows and is owed */
    uint64_t id, seed;
    int32_t prompt[TEXT_MAX];
    int n_prompt, max_total;
    int salt;     /* 0: none */
    bool penalty; /* its device must hear every token */
    bool lockstep;
    uint64_t timeout_us, deadline_us; /* 0: none */
    int32_t stop_id; /* -1: none */
    bool ignore_eos;
    int32_t want[TEXT_MAX]; /* output, without the end token */
    int n_want;
    enum engine_finish want_reason;
    int n_got, ends, n_cached;
    bool cancelled, finished; /* asked for by the client */
    struct sim *sim;
};

struct dslot {
    uint32_t generation;
    uint64_t seed;
    int32_t table[PAGES_MAX];
    int n_pages, n_fed;
    int32_t last;
    bool penalty;
    int n_counted;     /* tokens fed or told */
    uint64_t counted;  /* their hash */
};

struct pending { /* a step on its way to the device */
    struct sched_plan plan;
    struct msg *before; /* what was said before it */
    int n_before, cap_before;
};

struct sim {
    uint64_t seed, rng, now_us;
    struct sched *s;
    struct sched_options o;
    int64_t n_pages;
    struct dslot slots[LIMIT_SLOTS];
    int32_t cache[PAGES_MAX][ROWS_MAX];
    uint64_t named[PAGES_MAX]; /* last step that names the page */
    uint64_t answered;
    struct pending *queue; /* [SCHED_DEPTH_MAX] */
    int n_queue;
    struct req *reqs; /* [REQS_MAX] */
    int n_reqs;
    bool meddle; /* callbacks finish, cancel and submit */
    int rows_fed, events, rank_losses, cached, expired;
};

static const int32_t eog[] = {0};

static void fail_at(const struct sim *m, const char *what, int64_t expected, int64_t found) {
    print_error("%s: expected %lld, found %lld; repeat with OCTAVO_SEED=%llu\n", what,
                (long long)expected, (long long)found, (unsigned long long)m->seed);
    sched_print(stderr, m->s);
    fail();
}
#define CHECK_EQ(m, what, expected, found)                                                         \
    do {                                                                                           \
        int64_t e_ = (int64_t)(expected), f_ = (int64_t)(found);                                   \
        if (e_ != f_) fail_at(m, what, e_, f_);                                                    \
    } while (0)
#define CHECK(m, what) CHECK_EQ(m, #what, 1, (what) ? 1 : 0)

static uint64_t mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9E3779B97F4A7C15ull;
    return h ^ h >> 29;
}

static uint64_t next_random(struct sim *m) {
    return m->rng = mix(m->rng + 1, 0xA5A5A5A5u) | 1;
}
static int below(struct sim *m, int n) {
    return (int)((next_random(m) >> 20) % (uint64_t)n);
}

/* The text a request is owed. */
static void expect(struct req *r) {
    int n = r->n_prompt;
    uint64_t h = r->seed;
    for (int i = 0; i < n; i++) h = mix(h, (uint64_t)r->prompt[i]);
    for (r->n_want = 0;; n++) {
        int32_t token = (int32_t)(h % VOCAB);
        r->want_reason = ENGINE_STOP;
        if ((token == eog[0] && !r->ignore_eos) || token == r->stop_id) return;
        r->want[r->n_want++] = token;
        r->want_reason = ENGINE_LENGTH;
        if (n + 1 == r->max_total) return;
        h = mix(h, (uint64_t)token);
    }
}

/* ---- the device ------------------------------------------------------------------------------ */

static void device_admit(struct sim *m, const struct msg_admit *a) {
    CHECK(m, a->slot >= 0 && a->slot < m->o.max_seqs);
    m->slots[a->slot] = (struct dslot){.generation = a->slot_generation,
                                       .seed = a->sampling.seed,
                                       .penalty = a->sampling.repetition != 1,
                                       .counted = a->sampling.seed};
}

static void device_count(struct dslot *d, int32_t token) {
    d->counted = mix(d->counted, (uint64_t)token);
    d->n_counted++;
}

static int32_t device_sample(struct sim *m, const struct dslot *d) {
    uint64_t h = d->seed;
    for (int p = 0; p < d->n_fed; p++)
        h = mix(h, (uint64_t)m->cache[d->table[p / ROWS_MAX]][p % ROWS_MAX]);
    if (d->penalty) {
        CHECK_EQ(m, "tokens counted", d->n_fed, d->n_counted);
        CHECK_EQ(m, "hash of tokens counted", h, d->counted);
    }
    return (int32_t)(h % VOCAB);
}

static void device_run(struct sim *m, const struct msg_step *step, struct msg_tokens *out) {
    *out = (struct msg_tokens){.step_id = step->id};
    for (int i = 0; i < step->n_entries; i++) {
        const struct msg_entry *e = &step->entries[i];
        struct dslot *d = &m->slots[e->slot];
        CHECK_EQ(m, "slot generation", d->generation, e->slot_generation);
        CHECK_EQ(m, "page index", d->n_pages, e->page_first);
        if (d->n_fed == 0) d->n_fed = e->pos; /* what lies before was found in the cache */
        CHECK_EQ(m, "position", d->n_fed, e->pos);
        for (int k = 0; k < e->n_pages; k++) d->table[d->n_pages++] = step->pages[e->page_at + k];
        for (int k = 0; k < e->count; k++, d->n_fed++) {
            CHECK(m, d->n_fed / ROWS_MAX < d->n_pages);
            int32_t token = e->token_at < 0 ? d->last : step->tokens[e->token_at + k];
            m->cache[d->table[d->n_fed / ROWS_MAX]][d->n_fed % ROWS_MAX] = token;
            device_count(d, token);
        }
        m->rows_fed += e->count;
        if (!e->samples) continue;
        d->last = device_sample(m, d);
        out->tokens[out->n++] = (struct msg_token){.slot = e->slot,
                                                   .slot_generation = e->slot_generation,
                                                   .pos = e->pos + e->count,
                                                   .token = d->last};
    }
}

/* The history that is told is what lies in the cache. */
static void device_restore(struct sim *m, const struct msg_step *r) {
    for (int i = 0; i < r->n_entries; i++) {
        const struct msg_entry *e = &r->entries[i];
        struct dslot *d = &m->slots[e->slot];
        CHECK_EQ(m, "restored slot generation", d->generation, e->slot_generation);
        CHECK_EQ(m, "restored position", d->n_fed, e->pos);
        CHECK_EQ(m, "restored page index", d->n_pages, e->page_first);
        for (int k = 0; k < e->n_pages; k++) d->table[d->n_pages++] = r->pages[e->page_at + k];
        for (int k = 0; k < e->count; k++, d->n_fed++) {
            CHECK_EQ(m, "restored token",
                     m->cache[d->table[d->n_fed / ROWS_MAX]][d->n_fed % ROWS_MAX],
                     r->tokens[e->token_at + k]);
            device_count(d, r->tokens[e->token_at + k]);
        }
        d->last = -7; /* not to be fed: the coordinator knows better */
    }
}

static void device_hear(struct sim *m, const struct pending *p) {
    for (int i = 0; i < p->n_before; i++)
        p->before[i].type == MSG_ADMIT ? device_admit(m, &p->before[i].admit)
                                       : device_restore(m, &p->before[i].restore);
}

/* ---- the books ------------------------------------------------------------------------------- */

static void check_list(const struct sim *m, const struct page_list *l, enum page_state state) {
    const struct pages *p = &m->s->pages;
    int64_t n = 0;
    for (int32_t i = l->head, before = PAGES_NONE; i != PAGES_NONE; before = i, i = p->page[i].next) {
        CHECK_EQ(m, "state of a page in a list", state, p->page[i].state);
        CHECK_EQ(m, "page before", before, p->page[i].prev);
        if (state == PAGE_FREE) CHECK(m, !p->page[i].named);
        if (state == PAGE_KEPT) CHECK(m, p->page[i].named);
        n++;
        CHECK(m, n <= p->n);
    }
    CHECK_EQ(m, "pages in a list", l->n, n);
}

static void check_books(const struct sim *m) {
    const struct pages *p = &m->s->pages;
    int refs[PAGES_MAX] = {0}, held = 0;
    for (int i = 0; i < m->s->n_running; i++) {
        const struct seq *q = &m->s->seqs[m->s->running[i]];
        for (int k = 0; k < q->n_pages; k++) refs[q->pages[k]]++;
        CHECK(m, q->n_named * LIMIT_PAGE_TOKENS <= q->n_fed || q->mark != MARK_NONE);
    }
    for (int i = 0; i < p->n; i++) {
        CHECK_EQ(m, "holders of a page", refs[i], p->page[i].refs);
        CHECK_EQ(m, "held", p->page[i].refs > 0, p->page[i].state == PAGE_HELD);
        held += p->page[i].refs > 0;
        if (p->page[i].named)
            CHECK_EQ(m, "page found by its name", i, pages_find(p, p->page[i].name));
        if (p->page[i].state == PAGE_FREE || p->page[i].state == PAGE_KEPT)
            CHECK(m, m->named[i] <= m->answered);
    }
    check_list(m, &p->free, PAGE_FREE);
    check_list(m, &p->retired, PAGE_RETIRED);
    check_list(m, &p->kept, PAGE_KEPT);
    CHECK_EQ(m, "all pages", p->n, held + p->free.n + p->retired.n + p->kept.n);
}

/* ---- the coordinator's side ------------------------------------------------------------------ */

static void sim_sink(void *user, const struct engine_event *ev);

/* The next request's text is in m->reqs[m->n_reqs].prompt already, its seed too. */
static struct req *sim_submit_text(struct sim *m, int n_prompt, int max_tokens, int priority,
                                   int32_t stop_id, bool ignore_eos, int *rc) {
    assert_true(m->n_reqs < REQS_MAX && n_prompt < TEXT_MAX);
    struct req *r = &m->reqs[m->n_reqs];
    r->n_prompt = n_prompt;
    r->stop_id = stop_id;
    r->ignore_eos = ignore_eos;
    r->sim = m;
    int64_t most = MIN(m->o.context, m->n_pages * LIMIT_PAGE_TOKENS + 1);
    r->max_total = (int)MIN((int64_t)n_prompt + max_tokens, most);
    static struct engine_request q;
    q = (struct engine_request){.tokens = r->prompt,
                                .n_tokens = n_prompt,
                                .max_tokens = max_tokens,
                                .ignore_eos = ignore_eos,
                                .stop_ids = &r->stop_id,
                                .n_stop_ids = stop_id >= 0 ? 1 : 0,
                                .priority = priority,
                                .cache_salt = &r->salt,
                                .n_cache_salt = r->salt ? sizeof r->salt : 0,
                                .sink = sim_sink,
                                .user = r};
    q.timeout_us = r->timeout_us;
    q.lockstep = r->lockstep;
    r->deadline_us = m->now_us + r->timeout_us;
    q.sampling.seed = r->seed;
    q.sampling.repetition = r->penalty ? 2 : 1;
    int code = sched_submit(m->s, &q, m->now_us, &r->id);
    if (rc) *rc = code;
    if (code < 0) return NULL;
    expect(r);
    m->n_reqs++;
    return r;
}

static struct req *sim_next(struct sim *m) {
    struct req *r = &m->reqs[m->n_reqs];
    *r = (struct req){.seed = next_random(m)};
    return r;
}

static inline struct req *sim_submit(struct sim *m, int n_prompt, int max_tokens, int priority,
                                     int32_t stop_id, bool ignore_eos, int *rc) {
    struct req *r = sim_next(m);
    for (int i = 0; i < n_prompt; i++) r->prompt[i] = below(m, VOCAB);
    return sim_submit_text(m, n_prompt, max_tokens, priority, stop_id, ignore_eos, rc);
}

/* The same prompt once more, or its first n tokens, with another seed. */
static inline struct req *sim_again(struct sim *m, const struct req *old, int n, int max_tokens) {
    struct req *r = sim_next(m);
    r->salt = old->salt;
    memcpy(r->prompt, old->prompt, (size_t)n * sizeof *r->prompt);
    return sim_submit_text(m, n, max_tokens, 0, -1, true, NULL);
}

/* Text of an earlier request, prompt and answer, as the beginning of the next one's. */
static int borrow(struct sim *m, struct req *r, int most) {
    if (!m->n_reqs || below(m, 3) == 0) return 0;
    const struct req *old = &m->reqs[m->n_reqs - 1 - below(m, MIN(m->n_reqs, 12))];
    int all = MIN(old->n_prompt + old->n_want, most);
    int n = below(m, 3) ? all : below(m, all + 1);
    for (int i = 0; i < n; i++)
        r->prompt[i] = i < old->n_prompt ? old->prompt[i] : old->want[i - old->n_prompt];
    if (below(m, 4)) r->salt = old->salt;
    return n;
}

static void sim_submit_random(struct sim *m) {
    if (m->n_reqs >= REQS_MAX) return;
    int n_prompt = 1 + below(m, below(m, 4) ? 90 : 400);
    struct req *r = sim_next(m);
    r->penalty = below(m, 2);
    r->lockstep = below(m, 4) == 0;
    r->salt = below(m, 4) ? 0 : 1 + below(m, 2);
    r->timeout_us = below(m, 6) ? 0 : 1 + (uint64_t)below(m, 50000);
    int n = borrow(m, r, 400);
    int less = below(m, 2);
    if (n > 1 && below(m, 3) == 0) n_prompt = n - less; /* nothing new, or one less */
    for (int i = n; i < n_prompt; i++) r->prompt[i] = below(m, VOCAB);
    int max_tokens = 1 + below(m, below(m, 4) ? 60 : 300);
    int rc;
    sim_submit_text(m, n_prompt, max_tokens, below(m, 5) ? 0 : below(m, 3) - 1,
               below(m, 4) ? -1 : below(m, VOCAB), below(m, 6) == 0, &rc);
    if (rc != OK && rc != ERR_FULL) CHECK_EQ(m, "submit", OK, rc);
}

/* What was found had been said before, under the same salt. */
static void check_cached(struct sim *m, const struct req *r, int n) {
    m->cached += n;
    CHECK(m, n % LIMIT_PAGE_TOKENS == 0 && n < r->n_prompt);
    bool seen = n == 0;
    for (int i = 0; !seen && i < m->n_reqs; i++) {
        const struct req *o = &m->reqs[i];
        if (o == r || o->salt != r->salt || o->n_prompt + o->n_want < n) continue;
        int same = 0;
        while (same < n && r->prompt[same] == (same < o->n_prompt ? o->prompt[same]
                                                                  : o->want[same - o->n_prompt]))
            same++;
        seen = same == n;
    }
    CHECK(m, seen);
}

static void sim_sink(void *user, const struct engine_event *ev) {
    struct req *r = user;
    struct sim *m = r->sim;
    m->events++;
    CHECK(m, !r->cancelled);
    CHECK_EQ(m, "ends so far", 0, r->ends);
    if (!ev->finished) {
        CHECK(m, !r->finished && r->n_got < r->n_want);
        CHECK_EQ(m, "token", r->want[r->n_got], ev->token->token);
        r->n_got++;
        if (!m->meddle) return;
        if (below(m, 150) == 0) r->finished = true, sched_finish(m->s, r->id);
        if (below(m, 150) == 0) r->cancelled = true, sched_cancel(m->s, r->id);
        if (below(m, 150) == 0) sim_submit_random(m);
        return;
    }
    r->ends++;
    if (ev->reason == ENGINE_TIMEOUT) {
        CHECK(m, r->timeout_us && r->deadline_us <= m->now_us);
        m->expired++;
        return;
    }
    check_cached(m, r, ev->n_cached);
    r->n_cached = ev->n_cached;
    CHECK_EQ(m, "n_prompt", r->n_prompt, ev->n_prompt);
    CHECK_EQ(m, "reason", r->finished ? ENGINE_STOP : r->want_reason, ev->reason);
    if (r->finished) return;
    CHECK_EQ(m, "tokens delivered", r->n_want, r->n_got);
    CHECK_EQ(m, "n_output", r->n_want + (ev->stop_token >= 0), ev->n_output);
    CHECK_EQ(m, "stop token", r->want_reason == ENGINE_STOP, ev->stop_token >= 0);
}

static void sim_deliver(struct sim *m) {
    int n;
    const struct sched_event *e = sched_events(m->s, &n);
    for (int i = 0; i < n; i++)
        if (!e[i].dead) e[i].sink(e[i].user, &e[i].ev);
    sched_events_clear(m->s);
}

/* Plans a step and checks everything about it that does not need the device. */
static bool sim_plan(struct sim *m) {
    struct pending *p = &m->queue[m->n_queue];
    if (sched_in_flight(m->s) >= m->o.depth) {
        CHECK_EQ(m, "planned beyond depth", 0, sched_plan(m->s, m->now_us, &p->plan));
        return false;
    }
    if (!sched_plan(m->s, m->now_us, &p->plan)) return false;
    for (p->n_before = 0;; p->n_before++) {
        if (p->n_before == p->cap_before) {
            p->cap_before = 2 * p->cap_before + 4;
            p->before = realloc(p->before, (size_t)p->cap_before * sizeof *p->before);
            assert_non_null(p->before);
        }
        if (!sched_plan_next(m->s, &p->plan, &p->before[p->n_before])) break;
    }
    const struct msg_step *step = &p->plan.msg.step;
    int rows = 0;
    bool prefill_seen = false;
    for (int i = 0; i < step->n_entries; i++) {
        const struct msg_entry *e = &step->entries[i];
        rows += e->count;
        if (e->count > 1) prefill_seen = true;
        if (e->token_at < 0) CHECK(m, !prefill_seen && e->count == 1);
        for (int k = 0; k < e->n_pages; k++) {
            int32_t page = step->pages[e->page_at + k];
            CHECK(m, page >= 0 && page < m->n_pages);
            if ((e->page_first + k + 1) * ROWS_MAX > e->pos) CHECK(m, m->named[page] <= m->answered);
        }
        const struct seq *q = &m->s->seqs[m->s->slots[e->slot].seq];
        CHECK(m, !q->lockstep || e->token_at >= 0);
        for (int k = e->pos / ROWS_MAX; k <= (e->pos + e->count - 1) / ROWS_MAX; k++) {
            CHECK_EQ(m, "holders of a page that is written", 1, m->s->pages.page[q->pages[k]].refs);
            CHECK(m, !m->s->pages.page[q->pages[k]].named);
        }
    }
    CHECK(m, rows <= m->o.max_step_rows);
    m->n_queue++;
    /* the tables as the device will have them, to know which pages this step names */
    static struct dslot view[LIMIT_SLOTS];
    memcpy(view, m->slots, sizeof view);
    for (int q = 0; q < m->n_queue; q++) {
        const struct pending *w = &m->queue[q];
        for (int i = 0; i < w->n_before; i++) {
            const struct msg *b = &w->before[i];
            if (b->type == MSG_ADMIT) view[b->admit.slot].n_pages = 0;
            for (int k = 0; b->type == MSG_RESTORE && k < b->restore.n_pages; k++) {
                struct dslot *d = &view[b->restore.entries[0].slot];
                d->table[d->n_pages++] = b->restore.pages[k];
            }
        }
        for (int i = 0; i < w->plan.msg.step.n_entries; i++) {
            const struct msg_entry *e = &w->plan.msg.step.entries[i];
            struct dslot *d = &view[e->slot];
            for (int k = 0; k < e->n_pages; k++)
                d->table[d->n_pages++] = w->plan.msg.step.pages[e->page_at + k];
            for (int k = 0; k < d->n_pages; k++) m->named[d->table[k]] = w->plan.msg.step.id;
        }
    }
    check_books(m);
    return true;
}

static void sim_answer(struct sim *m) {
    static struct msg_tokens out;
    struct pending *p = &m->queue[0];
    static struct pending done;
    device_hear(m, p);
    device_run(m, &p->plan.msg.step, &out);
    m->answered = out.step_id;
    done = *p;
    m->n_queue--;
    memmove(&m->queue[0], &m->queue[1], (size_t)m->n_queue * sizeof *p);
    m->queue[m->n_queue] = done; /* its memory is used again */
    struct err_text err = {0};
    int rc = sched_commit(m->s, &out, m->now_us, &err);
    if (rc != OK) print_error("%s\n", err.text);
    CHECK_EQ(m, "commit", OK, rc);
    CHECK_EQ(m, "an answer given twice", ERR_STATE, sched_commit(m->s, &out, m->now_us, &err));
    check_books(m);
    sim_deliver(m);
}

static inline void sim_lose_device(struct sim *m) {
    static struct msg_tokens late;
    bool any = m->n_queue > 0;
    if (any) late = (struct msg_tokens){.step_id = m->queue[0].plan.msg.step.id};
    sched_forget_device(m->s);
    m->n_queue = 0;
    memset(m->slots, 0, sizeof m->slots);
    memset(m->cache, 0xFF, sizeof m->cache);
    memset(m->named, 0, sizeof m->named);
    if (any) CHECK_EQ(m, "late answer", ERR_STATE, sched_commit(m->s, &late, m->now_us, NULL));
}

/* One rank dies. What was in flight runs on a survivor never, in part or in full, and nobody will
 * hear of it. Afterwards the device is that survivor, or the newborn that got only what COPY named
 * and RESTORE told. */
static inline void sim_lose_rank(struct sim *m) {
    static struct msg_tokens late;
    static int32_t before[PAGES_MAX][ROWS_MAX];
    static struct msg msg;
    bool any = m->n_queue > 0, survivor = below(m, 2);
    if (any) late = (struct msg_tokens){.step_id = m->queue[0].plan.msg.step.id};
    int ran = below(m, m->n_queue + 1);
    for (int i = 0; i < ran; i++) {
        struct pending *p = &m->queue[i];
        struct msg_step *step = &p->plan.msg.step;
        static struct msg_tokens unheard;
        int rows = m->rows_fed;
        device_hear(m, p);
        if (i + 1 == ran && below(m, 2)) step->n_entries = below(m, step->n_entries + 1);
        device_run(m, step, &unheard);
        m->rows_fed = rows;
    }
    m->n_queue = 0;
    sched_take_back(m->s);
    if (any) CHECK_EQ(m, "late answer", ERR_STATE, sched_commit(m->s, &late, m->now_us, NULL));
    if (below(m, 2)) sched_sweep(m->s), sim_deliver(m); /* clients leave while it is restored */
    if (below(m, 4) == 0) sched_take_back(m->s);        /* another rank dies meanwhile */
    memcpy(before, m->cache, sizeof before);
    if (!survivor) memset(m->cache, 0xFF, sizeof m->cache);
    memset(m->named, 0, sizeof m->named);
    for (int i = 0; i < LIMIT_SLOTS; i++)
        if (!survivor) m->slots[i] = (struct dslot){0};
    sched_restore_begin(m->s);
    while (sched_restore_next(m->s, &msg)) {
        if (msg.type == MSG_ADMIT) device_admit(m, &msg.admit);
        if (msg.type == MSG_RESTORE) device_restore(m, &msg.restore);
        if (msg.type != MSG_COPY) continue;
        for (int i = 0; i < msg.copy.n_runs; i++) {
            struct msg_run run = msg.copy.runs[i];
            CHECK(m, run.first >= 0 && run.first + run.count <= m->n_pages);
            memcpy(m->cache[run.first], before[run.first], (size_t)run.count * sizeof before[0]);
        }
    }
    m->rank_losses++;
}

static struct sim *sim_new(uint64_t seed, int max_seqs, int rows, int depth, int64_t n_pages,
                           int64_t context) {
    struct sim *m = calloc(1, sizeof *m);
    assert_non_null(m);
    m->seed = seed;
    m->rng = mix(seed, 77) | 1;
    m->queue = calloc(SCHED_DEPTH_MAX + 1, sizeof *m->queue);
    m->reqs = calloc(REQS_MAX, sizeof *m->reqs);
    assert_true(m->queue && m->reqs && n_pages <= PAGES_MAX);
    m->n_pages = n_pages;
    m->o = (struct sched_options){.max_seqs = max_seqs,
                                  .max_step_rows = rows,
                                  .depth = depth,
                                  .queue_requests = 100,
                                  .queue_tokens = 20000,
                                  .context = context,
                                  .prefix_cache = true,
                                  .secret = {seed, 99},
                                  .eog = eog,
                                  .n_eog = 1};
    assert_int_equal(sched_new(&m->s, &m->o), OK);
    assert_int_equal(sched_set_pages(m->s, n_pages), OK);
    return m;
}

static void sim_free(struct sim *m) {
    sched_free(m->s);
    for (int i = 0; i <= SCHED_DEPTH_MAX; i++) free(m->queue[i].before);
    free(m->queue);
    free(m->reqs);
    free(m);
}

static void sim_drain(struct sim *m) {
    for (int turns = 0; !sched_idle(m->s); turns++) {
        CHECK(m, turns < 200000);
        sched_expire(m->s, m->now_us);
        sched_sweep(m->s);
        sim_deliver(m);
        while (sim_plan(m)) m->now_us += 10;
        if (m->n_queue) sim_answer(m);
    }
    while (m->n_queue) sim_answer(m); /* rows planned behind the last stop */
    struct sched_counts c;
    sched_counts(m->s, &c);
    CHECK_EQ(m, "pages used in the end", 0, c.pages_used);
    CHECK_EQ(m, "tokens waiting in the end", 0, c.waiting_tokens);
    for (int i = 0; i < m->n_reqs; i++)
        CHECK_EQ(m, "ends of a request", m->reqs[i].cancelled ? 0 : 1, m->reqs[i].ends);
}

#endif
