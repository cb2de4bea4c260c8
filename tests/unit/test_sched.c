/* tests/unit/test_sched.c: the scheduler against a model of the workers.
 *
 * The model keeps what a device would keep: page tables by slot and, in each page, the token fed at
 * each of its 64 positions. The token it samples is a hash of the seed and of every token it finds
 * in the cache, so a page handed out too early, a wrong position or a lost token changes the text.
 * The expected text is computed beside it from prompt and seed alone; a request must get exactly
 * it, whatever was preempted, cancelled or lost meanwhile.
 *
 * OCTAVO_SEED=N repeats one simulation.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/sched.h"

#define VOCAB     61
#define PAGES_MAX 64
#define TEXT_MAX  1200
#define REQS_MAX  4000
#define ROWS_MAX  LIMIT_PAGE_TOKENS

struct req { /* what the client knows and is owed */
    uint64_t id, seed;
    int32_t prompt[TEXT_MAX];
    int n_prompt, max_total;
    int32_t stop_id; /* -1: none */
    bool ignore_eos;
    int32_t want[TEXT_MAX]; /* output, without the end token */
    int n_want;
    enum engine_finish want_reason;
    int n_got, ends;
    bool cancelled, finished; /* asked for by the client */
    struct sim *sim;
};

struct dslot {
    uint32_t generation;
    uint64_t seed;
    int32_t table[PAGES_MAX];
    int n_pages, n_fed;
    int32_t last;
};

struct pending { /* a step on its way to the device */
    struct sched_plan plan;
    struct msg_admit admits[LIMIT_SLOTS];
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
    int rows_fed, events, rank_losses;
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
    m->slots[a->slot] = (struct dslot){.generation = a->slot_generation, .seed = a->sampling.seed};
}

static int32_t device_sample(struct sim *m, const struct dslot *d) {
    uint64_t h = d->seed;
    for (int p = 0; p < d->n_fed; p++)
        h = mix(h, (uint64_t)m->cache[d->table[p / ROWS_MAX]][p % ROWS_MAX]);
    return (int32_t)(h % VOCAB);
}

static void device_run(struct sim *m, const struct msg_step *step, struct msg_tokens *out) {
    *out = (struct msg_tokens){.step_id = step->id};
    for (int i = 0; i < step->n_entries; i++) {
        const struct msg_entry *e = &step->entries[i];
        struct dslot *d = &m->slots[e->slot];
        CHECK_EQ(m, "slot generation", d->generation, e->slot_generation);
        CHECK_EQ(m, "position", d->n_fed, e->pos);
        CHECK_EQ(m, "page index", d->n_pages, e->page_first);
        for (int k = 0; k < e->n_pages; k++) d->table[d->n_pages++] = step->pages[e->page_at + k];
        for (int k = 0; k < e->count; k++, d->n_fed++) {
            CHECK(m, d->n_fed / ROWS_MAX < d->n_pages);
            m->cache[d->table[d->n_fed / ROWS_MAX]][d->n_fed % ROWS_MAX] =
                e->token_at < 0 ? d->last : step->tokens[e->token_at + k];
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
        for (int k = 0; k < e->count; k++, d->n_fed++)
            CHECK_EQ(m, "restored token",
                     m->cache[d->table[d->n_fed / ROWS_MAX]][d->n_fed % ROWS_MAX],
                     r->tokens[e->token_at + k]);
        d->last = -7; /* not to be fed: the coordinator knows better */
    }
}

/* ---- the coordinator's side ------------------------------------------------------------------ */

static void sim_sink(void *user, const struct engine_event *ev);

static struct req *sim_submit(struct sim *m, int n_prompt, int max_tokens, int priority,
                              int32_t stop_id, bool ignore_eos, int *rc) {
    assert_true(m->n_reqs < REQS_MAX && n_prompt < TEXT_MAX);
    struct req *r = &m->reqs[m->n_reqs];
    *r = (struct req){.sim = m, .n_prompt = n_prompt, .stop_id = stop_id, .ignore_eos = ignore_eos};
    for (int i = 0; i < n_prompt; i++) r->prompt[i] = below(m, VOCAB);
    r->seed = next_random(m);
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
                                .sink = sim_sink,
                                .user = r};
    q.sampling.seed = r->seed;
    int code = sched_submit(m->s, &q, m->now_us, &r->id);
    if (rc) *rc = code;
    if (code < 0) return NULL;
    expect(r);
    m->n_reqs++;
    return r;
}

static void sim_submit_random(struct sim *m) {
    if (m->n_reqs >= REQS_MAX) return;
    int n_prompt = 1 + below(m, below(m, 4) ? 90 : 400);
    int max_tokens = 1 + below(m, below(m, 4) ? 60 : 300);
    int rc;
    sim_submit(m, n_prompt, max_tokens, below(m, 5) ? 0 : below(m, 3) - 1,
               below(m, 4) ? -1 : below(m, VOCAB), below(m, 6) == 0, &rc);
    if (rc != OK && rc != ERR_FULL) CHECK_EQ(m, "submit", OK, rc);
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
    for (int i = 0; i < p->plan.n_admits; i++) sched_admit(m->s, p->plan.admits[i], &p->admits[i]);
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
            CHECK(m, m->named[page] <= m->answered);
        }
    }
    CHECK(m, rows <= m->o.max_step_rows);
    m->n_queue++;
    /* the tables as the device will have them, to know which pages this step names */
    static struct dslot view[LIMIT_SLOTS];
    memcpy(view, m->slots, sizeof view);
    for (int q = 0; q < m->n_queue; q++) {
        const struct pending *w = &m->queue[q];
        for (int i = 0; i < w->plan.n_admits; i++) view[w->admits[i].slot].n_pages = 0;
        for (int i = 0; i < w->plan.msg.step.n_entries; i++) {
            const struct msg_entry *e = &w->plan.msg.step.entries[i];
            struct dslot *d = &view[e->slot];
            for (int k = 0; k < e->n_pages; k++)
                d->table[d->n_pages++] = w->plan.msg.step.pages[e->page_at + k];
            for (int k = 0; k < d->n_pages; k++) m->named[d->table[k]] = w->plan.msg.step.id;
        }
    }
    return true;
}

static void sim_answer(struct sim *m) {
    static struct msg_tokens out;
    struct pending *p = &m->queue[0];
    for (int i = 0; i < p->plan.n_admits; i++) device_admit(m, &p->admits[i]);
    device_run(m, &p->plan.msg.step, &out);
    m->answered = out.step_id;
    m->n_queue--;
    memmove(&m->queue[0], &m->queue[1], (size_t)m->n_queue * sizeof *p);
    struct err_text err = {0};
    int rc = sched_commit(m->s, &out, m->now_us, &err);
    if (rc != OK) print_error("%s\n", err.text);
    CHECK_EQ(m, "commit", OK, rc);
    CHECK_EQ(m, "an answer given twice", ERR_STATE, sched_commit(m->s, &out, m->now_us, &err));
    sim_deliver(m);
}

static void sim_lose_device(struct sim *m) {
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
static void sim_lose_rank(struct sim *m) {
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
        for (int k = 0; k < p->plan.n_admits; k++) device_admit(m, &p->admits[k]);
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
                                  .eog = eog,
                                  .n_eog = 1};
    assert_int_equal(sched_new(&m->s, &m->o), OK);
    assert_int_equal(sched_set_pages(m->s, n_pages), OK);
    return m;
}

static void sim_free(struct sim *m) {
    sched_free(m->s);
    free(m->queue);
    free(m->reqs);
    free(m);
}

static void sim_drain(struct sim *m) {
    for (int turns = 0; !sched_idle(m->s); turns++) {
        CHECK(m, turns < 200000);
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

static void simulate(uint64_t seed) {
    struct sim *shape = &(struct sim){.rng = mix(seed, 3) | 1};
    int max_seqs = 1 + below(shape, 20), depth = 1 + below(shape, 3);
    int rows = max_seqs + below(shape, 120), pages = 8 + below(shape, PAGES_MAX - 8);
    int context = 200 + below(shape, 600);
    struct sim *m = sim_new(seed, max_seqs, rows, depth, pages, MAX(context, 410));
    m->meddle = true;
    int arrivals = 1 + below(m, 4);
    for (int turn = 0; turn < 1500; turn++) {
        m->now_us += (uint64_t)below(m, 1000);
        if (below(m, 8) < arrivals) sim_submit_random(m);
        if (below(m, 20) == 0 && m->n_reqs) {
            struct req *r = &m->reqs[below(m, m->n_reqs)];
            if (!r->ends) r->cancelled = true;
            sched_cancel(m->s, r->id);
        }
        if (below(m, 300) == 0) sim_lose_device(m);
        if (below(m, 60) == 0) sim_lose_rank(m);
        if (below(m, 4) == 0) sched_sweep(m->s), sim_deliver(m);
        if (below(m, 3)) sim_plan(m);
        if (m->n_queue && below(m, 3)) sim_answer(m);
    }
    sim_drain(m);
    sim_free(m);
}

static void random_arrivals_cancels_and_losses_leave_every_text_as_it_should_be(void **state) {
    UNUSED(state);
    const char *one = getenv("OCTAVO_SEED");
    if (one) {
        simulate(strtoull(one, NULL, 10));
        return;
    }
    for (uint64_t seed = 1; seed <= 24; seed++) simulate(seed);
}

/* ---- rules, one by one ----------------------------------------------------------------------- */

static void decode_rows_come_first_and_prompts_share_the_rest_of_the_budget(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(1, 8, 100, 1, 64, 1000);
    sim_submit(m, 10, 50, 0, -1, true, NULL);
    assert_true(sim_plan(m));
    sim_answer(m);
    sim_submit(m, 250, 50, 0, -1, true, NULL);
    sim_submit(m, 30, 50, 0, -1, true, NULL);
    const int32_t counts[4][3] = {{1, 99, 0}, {1, 99, 0}, {1, 52, 30}, {1, 1, 1}};
    for (int i = 0; i < 4; i++) {
        assert_true(sim_plan(m));
        const struct msg_step *step = &m->queue[0].plan.msg.step;
        for (int k = 0; k < step->n_entries; k++)
            assert_int_equal(step->entries[k].count, counts[i][k]);
        assert_int_equal(step->entries[1].samples, i >= 2);
        sim_answer(m);
    }
    sim_drain(m);
    sim_free(m);
}

static void admission_is_by_priority_then_by_arrival(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(2, 1, 100, 1, 64, 1000);
    struct req *r[4];
    const int priority[4] = {1, 0, 0, -1}, order[4] = {3, 1, 2, 0};
    for (int i = 0; i < 4; i++) r[i] = sim_submit(m, 5 + i, 3, priority[i], -1, true, NULL);
    for (int i = 0; i < 4; i++) {
        while (!r[order[i]]->ends) {
            assert_true(sim_plan(m));
            sim_answer(m);
        }
        for (int k = i + 1; k < 4; k++) assert_int_equal(r[order[k]]->n_got, 0);
    }
    sim_free(m);
}

static void a_full_queue_refuses_in_requests_and_in_tokens(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(3, 1, 100, 1, 64, 1200);
    int rc;
    for (int i = 0; i < 100; i++) assert_non_null(sim_submit(m, 2, 1, 0, -1, false, &rc));
    assert_null(sim_submit(m, 2, 1, 0, -1, false, &rc));
    assert_int_equal(rc, ERR_FULL);
    sim_drain(m);
    for (int i = 0; i < 20; i++) assert_non_null(sim_submit(m, 1000, 1, 0, -1, false, &rc));
    assert_null(sim_submit(m, 1, 1, 0, -1, false, &rc));
    assert_int_equal(rc, ERR_FULL);
    assert_true(sched_retry_after_s(m->s) >= 1);
    sim_drain(m);
    assert_non_null(sim_submit(m, 1199, 1, 0, -1, false, &rc));
    sim_drain(m);
    sim_free(m);
}

static void a_prompt_that_leaves_no_room_is_refused_and_a_long_answer_is_clipped(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(4, 2, 100, 1, 64, 100);
    int rc;
    assert_null(sim_submit(m, 100, 1, 0, -1, true, &rc));
    assert_int_equal(rc, ERR_LIMIT);
    struct req *r = sim_submit(m, 90, 500, 0, -1, true, &rc);
    sim_drain(m);
    assert_int_equal(r->n_got, 10);
    assert_int_equal(r->want_reason, ENGINE_LENGTH);
    sim_free(m);
}

static void a_sequence_as_long_as_the_whole_cache_is_served_beside_others(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(5, 4, 64, 2, 4, 1000);
    struct req *r = sim_submit(m, 256, 10, 0, -1, true, NULL);
    for (int i = 0; i < 3; i++) sim_submit(m, 20, 200, 0, -1, true, NULL);
    sim_drain(m);
    assert_int_equal(r->n_got, 1);
    struct sched_counts c;
    sched_counts(m->s, &c);
    assert_true(c.preemptions > 0);
    sim_free(m);
}

static void a_late_stop_costs_one_row_that_no_client_sees(void **state) {
    UNUSED(state);
    int rows[3] = {0};
    for (int depth = 1; depth <= 2; depth++) {
        struct sim *m = sim_new(6, 4, 64, depth, 8, 400);
        struct req *r = sim_submit(m, 9, 300, 0, -1, false, NULL);
        sim_drain(m);
        assert_int_equal(r->want_reason, ENGINE_STOP);
        rows[depth] = m->rows_fed;
        assert_int_equal(m->events, r->n_want + 1);
        sim_free(m);
    }
    assert_int_equal(rows[2], rows[1] + 1);
}

static void a_cancelled_request_gives_its_slot_and_pages_to_the_next_step(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(7, 1, 300, 1, 4, 300);
    struct req *a = sim_submit(m, 200, 50, 0, -1, true, NULL);
    struct req *b = sim_submit(m, 200, 50, 0, -1, true, NULL);
    assert_true(sim_plan(m));
    a->cancelled = true;
    sched_cancel(m->s, a->id);
    sched_sweep(m->s);
    sim_answer(m);
    assert_int_equal(a->n_got, 0);
    assert_true(sim_plan(m));
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].count, 200);
    sim_answer(m);
    assert_int_equal(b->n_got, 1);
    sim_drain(m);
    sim_free(m);
}

static void after_a_lost_device_the_prompt_and_the_tokens_so_far_are_fed_again(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(8, 4, 300, 2, 16, 300);
    struct req *a = sim_submit(m, 70, 50, 0, -1, true, NULL);
    for (int i = 0; i < 6; i++) {
        sim_plan(m);
        sim_answer(m);
    }
    assert_int_equal(a->n_got, 6);
    sim_plan(m);
    sim_lose_device(m);
    assert_true(sim_plan(m));
    assert_int_equal(m->queue[0].plan.n_admits, 1);
    assert_int_equal(m->queue[0].admits[0].n_prompt, 70);
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].pos, 0);
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].count, 76);
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].page_first, 0);
    sim_drain(m);
    assert_int_equal(a->n_got, 50);
    sim_free(m);
}

/* Every row is fed once, and once more if its step was not answered. */
static void after_a_lost_rank_only_what_was_not_answered_is_fed_again(void **state) {
    UNUSED(state);
    for (int depth = 1; depth <= 2; depth++) {
        struct sim *m = sim_new(12, 4, 64, depth, 16, 300);
        struct req *a = sim_submit(m, 70, 50, 0, -1, true, NULL);
        struct req *b = sim_submit(m, 150, 20, 0, -1, true, NULL);
        int lost_rows = 0;
        for (int i = 0; !sched_idle(m->s); i++) {
            while (sim_plan(m)) continue;
            if (i % 3 == 1) {
                for (int q = 0; q < m->n_queue; q++) {
                    const struct msg_step *step = &m->queue[q].plan.msg.step;
                    for (int k = 0; k < step->n_entries; k++) lost_rows += step->entries[k].count;
                }
                sim_lose_rank(m);
                while (sim_plan(m)) continue;
                const struct msg_entry *e = &m->queue[0].plan.msg.step.entries[0];
                assert_int_equal(m->queue[0].plan.n_admits, 0);
                assert_true(e->token_at >= 0);
            }
            sim_answer(m);
        }
        assert_int_equal(a->n_got, 50);
        assert_int_equal(b->n_got, 20);
        assert_true(lost_rows > 0);
        struct sched_counts c;
        sched_counts(m->s, &c);
        assert_int_equal(c.replays, 0);
        assert_true(c.resumed > 0);
        assert_int_equal(m->rows_fed, 70 + 49 + 150 + 19 + (depth == 1 ? 0 : m->rows_fed - 288));
        sim_drain(m);
        sim_free(m);
    }
}

static void a_stop_string_met_on_the_last_token_still_reads_stop(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(9, 4, 300, 1, 16, 300);
    struct req *a = sim_submit(m, 7, 1, 0, -1, true, NULL);
    static struct msg_tokens t;
    assert_true(sim_plan(m));
    const struct msg_entry *e = &m->queue[0].plan.msg.step.entries[0];
    t = (struct msg_tokens){.step_id = m->queue[0].plan.msg.step.id, .n = 1};
    t.tokens[0] = (struct msg_token){
        .slot = e->slot, .slot_generation = e->slot_generation, .pos = 7, .token = 5};
    assert_int_equal(sched_commit(m->s, &t, 0, NULL), OK);
    int n;
    const struct sched_event *ev = sched_events(m->s, &n);
    assert_int_equal(n, 2);
    assert_int_equal(ev[1].ev.reason, ENGINE_LENGTH);
    sched_finish(m->s, a->id);
    assert_int_equal(ev[1].ev.reason, ENGINE_STOP);
    assert_false(ev[1].dead);
    sched_cancel(m->s, a->id);
    assert_true(ev[1].dead);
    sim_free(m);
}

static void answers_that_do_not_fit_the_step_are_refused_with_a_sentence(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(10, 4, 300, 1, 16, 300);
    sim_submit(m, 7, 9, 0, -1, true, NULL);
    static struct msg_tokens good, t;
    assert_true(sim_plan(m));
    const struct msg_entry *e = &m->queue[0].plan.msg.step.entries[0];
    good = (struct msg_tokens){.step_id = m->queue[0].plan.msg.step.id, .n = 1};
    good.tokens[0] = (struct msg_token){
        .slot = e->slot, .slot_generation = e->slot_generation, .pos = 7, .token = 5};
    struct err_text err;
    for (int wrong = 0; wrong < 5; wrong++) {
        t = good;
        if (wrong == 0) t.n = 0;
        if (wrong == 1) t.tokens[0].slot++;
        if (wrong == 2) t.tokens[0].slot_generation++;
        if (wrong == 3) t.tokens[0].pos++;
        if (wrong == 4) t.tokens[0].slot = -5;
        err.text[0] = 0;
        assert_int_equal(sched_commit(m->s, &t, 0, &err), ERR_FORMAT);
        assert_true(err.text[0] != 0);
    }
    t = good;
    t.tokens[0].token = -1; /* this sequence cannot go on; the others can */
    assert_int_equal(sched_commit(m->s, &t, 0, &err), OK);
    int n;
    const struct sched_event *ev = sched_events(m->s, &n);
    assert_int_equal(n, 1);
    assert_true(ev[0].ev.finished);
    assert_int_equal(ev[0].ev.reason, ENGINE_ERROR);
    assert_non_null(ev[0].ev.error);
    sim_free(m);
}

static void stopping_ends_everybody_once(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(11, 2, 300, 1, 16, 300);
    for (int i = 0; i < 5; i++) sim_submit(m, 7, 9, 0, -1, true, NULL);
    sim_plan(m);
    m->reqs[1].cancelled = true;
    sched_cancel(m->s, m->reqs[1].id);
    sched_end_all(m->s, ENGINE_CANCELLED, NULL);
    int n;
    const struct sched_event *ev = sched_events(m->s, &n);
    assert_int_equal(n, 4);
    for (int i = 0; i < n; i++) assert_int_equal(ev[i].ev.reason, ENGINE_CANCELLED);
    assert_true(sched_idle(m->s));
    sim_free(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_rows_come_first_and_prompts_share_the_rest_of_the_budget),
        cmocka_unit_test(admission_is_by_priority_then_by_arrival),
        cmocka_unit_test(a_full_queue_refuses_in_requests_and_in_tokens),
        cmocka_unit_test(a_prompt_that_leaves_no_room_is_refused_and_a_long_answer_is_clipped),
        cmocka_unit_test(a_sequence_as_long_as_the_whole_cache_is_served_beside_others),
        cmocka_unit_test(a_late_stop_costs_one_row_that_no_client_sees),
        cmocka_unit_test(a_cancelled_request_gives_its_slot_and_pages_to_the_next_step),
        cmocka_unit_test(after_a_lost_device_the_prompt_and_the_tokens_so_far_are_fed_again),
        cmocka_unit_test(after_a_lost_rank_only_what_was_not_answered_is_fed_again),
        cmocka_unit_test(a_stop_string_met_on_the_last_token_still_reads_stop),
        cmocka_unit_test(answers_that_do_not_fit_the_step_are_refused_with_a_sentence),
        cmocka_unit_test(stopping_ends_everybody_once),
        cmocka_unit_test(random_arrivals_cancels_and_losses_leave_every_text_as_it_should_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
