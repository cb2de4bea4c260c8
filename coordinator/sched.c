/* coordinator/sched.c: who runs, what the next step feeds, and what an answer means. See sched.h.
 *
 * Owns: the pool of requests, the slots, the page account, the records of steps in flight.
 * Called by: engine.c.  Pure.
 * Fails how: ERR_FULL, ERR_LIMIT, ERR_NOMEM on submit; ERR_STATE, ERR_FORMAT on commit.
 * Limits: LIMIT_QUEUE_*, LIMIT_SLOTS, LIMIT_STEP_*.  Tested by: tests/unit/test_sched.c
 *
 * How a step is filled. There is no prefill phase and no decode phase, only a budget of rows (tokens
 * fed) that each step may spend, because a row costs a reader of the stream about the same whoever
 * it belongs to. First every sequence that has one token to feed gets its row: those rows are cheap,
 * somebody is watching each of them, and there are never more of them than max_seqs, which the
 * budget always holds. What is left goes to prompts, oldest first, in chunks as large as the budget
 * allows: so a long prompt delays the streams beside it by one step of bounded size at a time, and
 * a step is never empty while anybody has work. New sequences take a slot only when the pages of
 * their whole prompt are there: a prompt half prefilled and then preempted is work done twice.
 *
 * Positions. tokens[0..n_tokens) are known. n_fed positions have been put into some step; n_pending
 * of the steps in flight will each answer one more token. So the sequence will soon be n_tokens +
 * n_pending long, and what remains to be fed is that minus n_fed; when the one token to feed is not
 * known yet it is -1, "the one you sampled last", and stays on the device. Nothing else here knows
 * how deep the pipeline is. A stop found late costs the row that was planned behind it: its answer
 * carries a slot generation that nobody has any more, and is dropped.
 *
 * Pages. A sequence's pages are given back the moment it leaves its slot, but become free only when
 * the last step that names them is answered (pages.c). When a decoding sequence needs a page and
 * none is free, the youngest of the least urgent gives up its slot and waits to be computed again;
 * if that is the one who asks, it sits this step out. The oldest always gets on, and submit clips
 * every sequence to the size of the whole cache, so waiting always ends.
 */
#include "coordinator/sched.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/pages.h"

#define NONE       (-1)
#define INDEX_BITS 16

enum seq_state { SEQ_FREE, SEQ_WAITING, SEQ_RUNNING };
enum seq_mark { MARK_NONE, MARK_FINISH, MARK_CANCEL };

struct seq {
    enum seq_state state;
    enum seq_mark mark;   /* asked for from outside, done in sched_sweep */
    uint32_t generation;  /* upper part of the id */
    int32_t prev, next;   /* waiting list; next also links the free list */
    int32_t next_marked;
    engine_sink *sink;
    void *user;
    int priority;
    uint64_t arrival;
    int32_t *tokens;      /* prompt, then output */
    int32_t n_tokens, n_prompt, max_total, cap_tokens;
    int32_t *stop_ids;
    int n_stop_ids;
    bool ignore_eos;
    struct msg_sampling sampling;
    /* while it has a slot */
    int32_t slot;
    int32_t n_fed, n_pending;
    int32_t *pages;       /* its page table */
    int32_t n_pages, n_announced, cap_pages;
    uint64_t last_step;   /* the last planned step that names it */
};

struct slot {
    int32_t seq; /* NONE: free */
    uint32_t generation;
};

struct flight_entry {
    int32_t slot;
    uint32_t generation;
    int32_t next_pos; /* the position its sample takes */
    bool samples;
};

struct flight { /* a step in flight */
    uint64_t id, planned_us;
    int n_rows, n;
    struct flight_entry e[LIMIT_STEP_ENTRIES];
    int16_t by_slot[LIMIT_SLOTS]; /* index into e, or NONE */
};

struct sched {
    struct sched_options o;
    int32_t *eog;
    struct seq *seqs; /* [n_pool] */
    int n_pool;
    int32_t free_head, wait_head, wait_tail, marked_head;
    int n_waiting;
    int64_t waiting_tokens;
    int32_t running[LIMIT_SLOTS]; /* in order: most urgent, then oldest first */
    int n_running;
    struct slot slots[LIMIT_SLOTS];
    struct pages pages; /* n 0 until sched_set_pages */
    struct flight flight[SCHED_DEPTH_MAX]; /* a ring */
    int flight_head, n_flight;
    uint64_t last_id, arrivals;
    struct sched_event *events;
    int n_events, cap_events;
    double rows_per_s; /* smoothed */
    struct sched_counts count; /* the running totals only */
};

/* ---- life ------------------------------------------------------------------------------------ */

int sched_new(struct sched **out, const struct sched_options *o) {
    assert(o->max_seqs >= 1 && o->max_seqs <= LIMIT_SLOTS);
    assert(o->max_step_rows >= o->max_seqs && o->max_step_rows <= LIMIT_STEP_ROWS);
    assert(o->depth >= 1 && o->depth <= SCHED_DEPTH_MAX);
    assert(o->queue_requests >= 1 && o->queue_requests <= LIMIT_QUEUE_REQUESTS);
    struct sched *s = calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM;
    s->o = *o;
    s->n_pool = o->queue_requests + o->max_seqs;
    assert(s->n_pool < 1 << INDEX_BITS);
    s->cap_events = s->n_pool + 2 * LIMIT_STEP_SAMPLES;
    s->seqs = calloc((size_t)s->n_pool, sizeof *s->seqs);
    s->events = calloc((size_t)s->cap_events, sizeof *s->events);
    s->eog = calloc((size_t)o->n_eog + 1, sizeof *s->eog);
    if (!s->seqs || !s->events || !s->eog) {
        sched_free(s);
        return ERR_NOMEM;
    }
    if (o->n_eog) memcpy(s->eog, o->eog, (size_t)o->n_eog * sizeof *s->eog);
    s->o.eog = s->eog;
    s->free_head = s->wait_head = s->wait_tail = s->marked_head = NONE;
    for (int i = s->n_pool - 1; i >= 0; i--) {
        s->seqs[i].next = s->free_head;
        s->free_head = i;
    }
    for (int i = 0; i < LIMIT_SLOTS; i++) s->slots[i].seq = NONE;
    *out = s;
    return OK;
}

void sched_free(struct sched *s) {
    if (!s) return;
    for (int i = 0; s->seqs && i < s->n_pool; i++) {
        free(s->seqs[i].tokens);
        free(s->seqs[i].stop_ids);
        free(s->seqs[i].pages);
    }
    pages_deinit(&s->pages);
    free(s->seqs);
    free(s->events);
    free(s->eog);
    free(s);
}

static int32_t index_of(const struct sched *s, const struct seq *q) {
    return (int32_t)(q - s->seqs);
}

static uint64_t id_of(const struct sched *s, const struct seq *q) {
    return (uint64_t)q->generation << INDEX_BITS | (uint64_t)index_of(s, q);
}

static struct seq *find(const struct sched *s, uint64_t id) {
    uint64_t i = id & ((1u << INDEX_BITS) - 1);
    if (i >= (uint64_t)s->n_pool) return NULL;
    struct seq *q = &s->seqs[i];
    return q->state != SEQ_FREE && q->generation == id >> INDEX_BITS ? q : NULL;
}

/* The one order of everything: lower priority value first, then earlier arrival. */
static bool before(const struct seq *a, const struct seq *b) {
    return a->priority != b->priority ? a->priority < b->priority : a->arrival < b->arrival;
}

static int32_t pages_for(int64_t tokens) {
    return (int32_t)((tokens + LIMIT_PAGE_TOKENS - 1) / LIMIT_PAGE_TOKENS);
}

/* Tokens one sequence may have: the last one sampled is never fed, so it needs no place. */
static int64_t total_max(const struct sched *s) {
    int64_t cache = s->pages.n * LIMIT_PAGE_TOKENS + 1;
    return s->pages.n && cache < s->o.context ? cache : s->o.context;
}

/* ---- events ---------------------------------------------------------------------------------- */

static struct sched_event *event_new(struct sched *s, const struct seq *q) {
    assert(s->n_events < s->cap_events); /* the caller delivers before it goes on */
    struct sched_event *e = &s->events[s->n_events++];
    e->id = id_of(s, q);
    e->sink = q->sink;
    e->user = q->user;
    e->dead = false;
    e->error[0] = 0;
    e->ev = (struct engine_event){.stop_token = -1,
                                  .n_prompt = q->n_prompt,
                                  .n_output = q->n_tokens - q->n_prompt};
    return e;
}

const struct sched_event *sched_events(const struct sched *s, int *n) {
    *n = s->n_events;
    return s->events;
}

void sched_events_clear(struct sched *s) { s->n_events = 0; }

/* ---- the waiting list and the running list --------------------------------------------------- */

static void wait_insert(struct sched *s, struct seq *q) {
    int32_t after = s->wait_tail; /* nearly always the place */
    while (after != NONE && before(q, &s->seqs[after])) after = s->seqs[after].prev;
    int32_t i = index_of(s, q);
    q->prev = after;
    q->next = after == NONE ? s->wait_head : s->seqs[after].next;
    *(q->prev == NONE ? &s->wait_head : &s->seqs[q->prev].next) = i;
    *(q->next == NONE ? &s->wait_tail : &s->seqs[q->next].prev) = i;
    q->state = SEQ_WAITING;
    s->n_waiting++;
    s->waiting_tokens += q->n_tokens;
}

static void wait_remove(struct sched *s, struct seq *q) {
    assert(q->state == SEQ_WAITING);
    *(q->prev == NONE ? &s->wait_head : &s->seqs[q->prev].next) = q->next;
    *(q->next == NONE ? &s->wait_tail : &s->seqs[q->next].prev) = q->prev;
    s->n_waiting--;
    s->waiting_tokens -= q->n_tokens;
}

static void run_insert(struct sched *s, struct seq *q) {
    int at = s->n_running++;
    for (; at > 0 && before(q, &s->seqs[s->running[at - 1]]); at--)
        s->running[at] = s->running[at - 1];
    s->running[at] = index_of(s, q);
    q->state = SEQ_RUNNING;
}

/* Out of the running list and its slot, its pages given back. */
static void run_remove(struct sched *s, struct seq *q) {
    assert(q->state == SEQ_RUNNING && s->slots[q->slot].seq == index_of(s, q));
    int at = 0;
    while (s->running[at] != index_of(s, q)) at++;
    s->n_running--;
    memmove(&s->running[at], &s->running[at + 1], (size_t)(s->n_running - at) * sizeof(int32_t));
    pages_put(&s->pages, index_of(s, q), q->pages, q->n_pages, q->last_step);
    s->slots[q->slot].seq = NONE;
    q->slot = NONE;
    q->n_pages = q->n_announced = q->n_fed = q->n_pending = 0;
}

static void drop(struct sched *s, struct seq *q) {
    if (q->state == SEQ_RUNNING) run_remove(s, q);
    else wait_remove(s, q);
    free(q->tokens);
    free(q->stop_ids);
    free(q->pages);
    q->tokens = q->stop_ids = q->pages = NULL;
    q->cap_tokens = q->cap_pages = 0;
    q->state = SEQ_FREE;
    q->next = s->free_head;
    s->free_head = index_of(s, q);
}

static void end(struct sched *s, struct seq *q, enum engine_finish reason, int32_t stop_token,
                const char *error) {
    struct sched_event *e = event_new(s, q);
    e->ev.finished = true;
    e->ev.reason = reason;
    e->ev.stop_token = stop_token;
    if (error) {
        snprintf(e->error, sizeof e->error, "%s", error);
        e->ev.error = e->error;
    }
    if (q->mark != MARK_NONE) return; /* sched_sweep is about to drop it */
    drop(s, q);
}

/* ---- from outside ---------------------------------------------------------------------------- */

int sched_set_pages(struct sched *s, int64_t n_pages) {
    if (s->pages.n == n_pages) return OK;
    if (s->pages.n) {
        sched_forget_device(s);
        pages_deinit(&s->pages);
    }
    TRY(pages_init(&s->pages, n_pages));
    int64_t most = total_max(s);
    for (int32_t i = s->wait_head, next; i != NONE; i = next) {
        struct seq *q = &s->seqs[i];
        next = q->next;
        if (q->mark == MARK_NONE && q->n_tokens >= most)
            end(s, q, q->n_tokens > q->n_prompt ? ENGINE_LENGTH : ENGINE_ERROR, -1,
                q->n_tokens > q->n_prompt ? NULL : "the prompt does not fit into the cache");
        else q->max_total = (int32_t)MIN(q->max_total, most);
    }
    return OK;
}

int sched_submit(struct sched *s, const struct engine_request *r, uint64_t now_us, uint64_t *id) {
    UNUSED(now_us);
    assert(r->n_tokens > 0 && r->max_tokens > 0 && r->sink);
    if (r->n_tokens >= total_max(s)) return ERR_LIMIT;
    if (s->n_waiting >= s->o.queue_requests || s->free_head == NONE) return ERR_FULL;
    if (s->waiting_tokens + r->n_tokens > s->o.queue_tokens) return ERR_FULL;
    struct seq *q = &s->seqs[s->free_head];
    int32_t *tokens = malloc((size_t)r->n_tokens * sizeof *tokens);
    int32_t *stops = malloc(((size_t)r->n_stop_ids + 1) * sizeof *stops);
    if (!tokens || !stops) {
        free(tokens);
        free(stops);
        return ERR_NOMEM;
    }
    memcpy(tokens, r->tokens, (size_t)r->n_tokens * sizeof *tokens);
    if (r->n_stop_ids) memcpy(stops, r->stop_ids, (size_t)r->n_stop_ids * sizeof *stops);
    s->free_head = q->next;
    *q = (struct seq){.generation = q->generation + 1,
                      .sink = r->sink,
                      .user = r->user,
                      .priority = r->priority,
                      .arrival = ++s->arrivals,
                      .tokens = tokens,
                      .n_tokens = r->n_tokens,
                      .n_prompt = r->n_tokens,
                      .cap_tokens = r->n_tokens,
                      .max_total = (int32_t)MIN((int64_t)r->n_tokens + r->max_tokens, total_max(s)),
                      .stop_ids = stops,
                      .n_stop_ids = r->n_stop_ids,
                      .ignore_eos = r->ignore_eos,
                      .sampling = r->sampling,
                      .slot = NONE};
    wait_insert(s, q);
    *id = id_of(s, q);
    return OK;
}

static void mark(struct sched *s, uint64_t id, enum seq_mark m) {
    for (int i = 0; i < s->n_events; i++) {
        struct sched_event *e = &s->events[i];
        if (e->id != id) continue;
        if (m == MARK_CANCEL || !e->ev.finished) e->dead = true;
        else if (e->ev.reason == ENGINE_LENGTH) e->ev.reason = ENGINE_STOP; /* met on the last one */
    }
    struct seq *q = find(s, id);
    if (!q) return;
    if (q->mark == MARK_NONE) {
        q->next_marked = s->marked_head;
        s->marked_head = index_of(s, q);
    }
    q->mark = MAX(q->mark, m); /* who cancels what was finished hears nothing */
}

void sched_finish(struct sched *s, uint64_t id) { mark(s, id, MARK_FINISH); }
void sched_cancel(struct sched *s, uint64_t id) { mark(s, id, MARK_CANCEL); }

void sched_sweep(struct sched *s) {
    while (s->marked_head != NONE) {
        struct seq *q = &s->seqs[s->marked_head];
        s->marked_head = q->next_marked;
        if (q->mark == MARK_FINISH) end(s, q, ENGINE_STOP, -1, NULL);
        drop(s, q);
    }
}

void sched_end_all(struct sched *s, enum engine_finish reason, const char *error) {
    sched_sweep(s);
    while (s->n_running) end(s, &s->seqs[s->running[0]], reason, -1, error);
    while (s->wait_head != NONE) end(s, &s->seqs[s->wait_head], reason, -1, error);
}

void sched_forget_device(struct sched *s) {
    s->n_flight = 0;
    while (s->n_running) {
        struct seq *q = &s->seqs[s->running[s->n_running - 1]];
        run_remove(s, q);
        wait_insert(s, q);
        s->count.replays++;
    }
    if (s->pages.n) pages_reset(&s->pages);
}

/* ---- filling a step -------------------------------------------------------------------------- */

/* Room for the sequence at its longest, so that nothing is allocated per token. */
static int reserve(struct seq *q) {
    int32_t n_pages = pages_for(q->max_total);
    if (q->cap_tokens < q->max_total) {
        int32_t *t = realloc(q->tokens, (size_t)q->max_total * sizeof *t);
        if (!t) return ERR_NOMEM;
        q->tokens = t;
        q->cap_tokens = q->max_total;
    }
    if (q->cap_pages < n_pages) {
        int32_t *p = realloc(q->pages, (size_t)n_pages * sizeof *p);
        if (!p) return ERR_NOMEM;
        q->pages = p;
        q->cap_pages = n_pages;
    }
    return OK;
}

/* Positions that can be fed now; 0 when the last sample allowed is already on its way. */
static int32_t to_feed(const struct seq *q) {
    int32_t length = q->n_tokens + q->n_pending;
    return q->mark != MARK_NONE || length >= q->max_total ? 0 : length - q->n_fed;
}

static void entry_add(struct sched *s, struct seq *q, int32_t count, struct msg_step *step,
                      struct flight *f) {
    assert(step->n_entries < LIMIT_STEP_ENTRIES && count > 0);
    struct msg_entry *e = &step->entries[step->n_entries];
    bool last = q->n_fed + count == q->n_tokens + q->n_pending;
    int32_t n_pages = pages_for(q->n_fed + count);
    assert(n_pages <= q->n_pages);
    *e = (struct msg_entry){.slot = q->slot,
                            .slot_generation = s->slots[q->slot].generation,
                            .pos = q->n_fed,
                            .count = count,
                            .samples = last ? 1 : 0,
                            .token_at = -1,
                            .page_first = q->n_announced,
                            .page_at = step->n_pages,
                            .n_pages = MAX(0, n_pages - q->n_announced)};
    if (q->n_fed < q->n_tokens) {
        assert(q->n_fed + count <= q->n_tokens && step->n_tokens + count <= LIMIT_STEP_ROWS);
        e->token_at = step->n_tokens;
        memcpy(&step->tokens[step->n_tokens], &q->tokens[q->n_fed], (size_t)count * sizeof(int32_t));
        step->n_tokens += count;
    }
    assert(step->n_pages + e->n_pages <= LIMIT_STEP_PAGES);
    memcpy(&step->pages[step->n_pages], &q->pages[q->n_announced],
           (size_t)e->n_pages * sizeof(int32_t));
    step->n_pages += e->n_pages;
    q->n_announced += e->n_pages;
    q->n_fed += count;
    q->n_pending += last ? 1 : 0;
    q->last_step = step->id;
    f->by_slot[q->slot] = (int16_t)step->n_entries;
    f->e[step->n_entries++] = (struct flight_entry){
        .slot = q->slot, .generation = e->slot_generation, .next_pos = q->n_fed, .samples = last};
    f->n_rows += count;
}

/* A page for the row that q feeds next: true, or q sits this step out. */
static bool page_for_row(struct sched *s, struct seq *q) {
    if (pages_for(q->n_fed + 1) <= q->n_pages) return true;
    while (s->pages.n_free == 0) {
        if (s->pages.n_retired > 0) return false; /* an answer will free some: nobody need suffer */
        struct seq *victim = &s->seqs[s->running[s->n_running - 1]];
        if (victim == q) return false;
        run_remove(s, victim);
        wait_insert(s, victim);
        s->count.preemptions++;
    }
    assert(q->n_pages < q->cap_pages);
    pages_get(&s->pages, index_of(s, q), 1, &q->pages[q->n_pages]);
    q->n_pages++;
    return true;
}

/* Gives the first of the waiting a slot and the pages of all its tokens: it, or NULL. One page per
 * running sequence is left over, or the newcomer would be preempted by the next row. */
static struct seq *admit_next(struct sched *s, struct sched_plan *plan) {
    while (s->wait_head != NONE && s->seqs[s->wait_head].mark == MARK_NONE) {
        struct seq *q = &s->seqs[s->wait_head];
        int32_t need = pages_for(q->n_tokens);
        if (s->n_running >= s->o.max_seqs || need + s->n_running > s->pages.n_free) return NULL;
        if (reserve(q) < 0) {
            end(s, q, ENGINE_ERROR, -1, "out of memory");
            continue;
        }
        int slot = 0;
        while (s->slots[slot].seq != NONE) slot++;
        wait_remove(s, q);
        pages_get(&s->pages, index_of(s, q), need, q->pages);
        q->n_pages = need;
        q->slot = slot;
        s->slots[slot].seq = index_of(s, q);
        s->slots[slot].generation++;
        run_insert(s, q);
        plan->admits[plan->n_admits++] = slot;
        return q;
    }
    return NULL;
}

/* token path 4/9: the token is put into the next step, beside everybody else's. */
int sched_plan(struct sched *s, uint64_t now_us, struct sched_plan *plan) {
    if (s->n_flight >= s->o.depth || s->pages.n == 0) return 0;
    struct msg_step *step = &plan->msg.step;
    plan->msg.type = MSG_STEP;
    struct flight *f = &s->flight[(s->flight_head + s->n_flight) % SCHED_DEPTH_MAX];
    f->id = step->id = s->last_id + 1;
    f->planned_us = now_us;
    f->n_rows = 0;
    for (int i = 0; i < LIMIT_SLOTS; i++) f->by_slot[i] = NONE;
    plan->n_admits = step->n_entries = step->n_tokens = step->n_pages = 0;
    step->generation = 0;

    int n_decode = 0; /* running[] may shrink at its end under this loop, never before i */
    for (int i = 0; i < s->n_running; i++) {
        struct seq *q = &s->seqs[s->running[i]];
        if (to_feed(q) != 1 || !page_for_row(s, q)) continue;
        entry_add(s, q, 1, step, f);
        n_decode++;
    }
    int budget = s->o.max_step_rows - n_decode;
    for (int i = 0; i < s->n_running && budget > 0; i++) {
        struct seq *q = &s->seqs[s->running[i]];
        int32_t n = to_feed(q);
        if (n <= 1) continue; /* fed above, or sitting out */
        n = MIN(n, budget);
        entry_add(s, q, n, step, f);
        budget -= n;
    }
    for (struct seq *q; budget > 0 && (q = admit_next(s, plan));) {
        int32_t n = MIN(to_feed(q), budget);
        entry_add(s, q, n, step, f);
        budget -= n;
    }
    f->n = step->n_entries;
    if (step->n_entries == 0) return 0;
    s->last_id++;
    s->n_flight++;
    return 1;
}

void sched_admit(const struct sched *s, int slot, struct msg_admit *out) {
    assert(slot >= 0 && slot < LIMIT_SLOTS && s->slots[slot].seq != NONE);
    const struct seq *q = &s->seqs[s->slots[slot].seq];
    out->slot = slot;
    out->slot_generation = s->slots[slot].generation;
    out->n_prompt = q->n_prompt;
    out->sampling = q->sampling;
}

int sched_in_flight(const struct sched *s) { return s->n_flight; }
bool sched_idle(const struct sched *s) { return s->n_running + s->n_waiting == 0; }

/* ---- the answer ------------------------------------------------------------------------------ */

/* Every sample asked for is there, once, and nothing else. */
static int check_answer(const struct flight *f, const struct msg_tokens *t, struct err_text *err) {
    bool seen[LIMIT_STEP_ENTRIES] = {false};
    int expected = 0;
    for (int i = 0; i < f->n; i++) expected += f->e[i].samples;
    if (t->n != expected)
        return err_set(err, ERR_FORMAT, "step %" PRIu64 ": expected %d samples, found %d", f->id,
                       expected, t->n);
    for (int i = 0; i < t->n; i++) {
        const struct msg_token *k = &t->tokens[i];
        int at = k->slot >= 0 && k->slot < LIMIT_SLOTS ? f->by_slot[k->slot] : NONE;
        if (at == NONE || seen[at] || !f->e[at].samples)
            return err_set(err, ERR_FORMAT, "step %" PRIu64 ": unexpected sample for slot %d", f->id,
                           k->slot);
        const struct flight_entry *e = &f->e[at];
        if (e->generation != k->slot_generation || e->next_pos != k->pos || k->token < -1)
            return err_set(err, ERR_FORMAT,
                           "step %" PRIu64 ": slot %d: expected generation %u position %d, "
                           "found generation %u position %d token %d",
                           f->id, k->slot, e->generation, e->next_pos, k->slot_generation, k->pos,
                           k->token);
        seen[at] = true;
    }
    return OK;
}

static bool is_stop(const struct sched *s, const struct seq *q, int32_t token) {
    for (int i = 0; i < q->n_stop_ids; i++)
        if (q->stop_ids[i] == token) return true;
    for (int i = 0; i < s->o.n_eog && !q->ignore_eos; i++)
        if (s->o.eog[i] == token) return true;
    return false;
}

static void commit_token(struct sched *s, struct seq *q, const struct msg_token *k) {
    assert(q->n_tokens == k->pos && q->n_pending > 0 && q->n_tokens < q->max_total);
    if (k->token < 0) {
        end(s, q, ENGINE_ERROR, -1, "the model gave no finite logit for this sequence");
        return;
    }
    if (q->n_tokens == q->n_prompt) s->count.prompt_tokens += (uint64_t)q->n_prompt;
    q->tokens[q->n_tokens++] = k->token;
    q->n_pending--;
    s->count.output_tokens++;
    if (is_stop(s, q, k->token)) {
        end(s, q, ENGINE_STOP, k->token, NULL);
        return;
    }
    struct sched_event *e = event_new(s, q);
    e->token = *k;
    e->ev.token = &e->token;
    if (q->n_tokens == q->max_total) end(s, q, ENGINE_LENGTH, -1, NULL);
}

int sched_commit(struct sched *s, const struct msg_tokens *t, uint64_t now_us,
                 struct err_text *err) {
    struct flight *f = &s->flight[s->flight_head];
    if (s->n_flight == 0 || f->id != t->step_id) return ERR_STATE;
    TRY(check_answer(f, t, err));
    s->flight_head = (s->flight_head + 1) % SCHED_DEPTH_MAX;
    s->n_flight--;
    s->count.steps++;
    pages_answered(&s->pages, f->id);
    if (now_us > f->planned_us) {
        double now_rate = f->n_rows * 1e6 / (double)(now_us - f->planned_us);
        s->rows_per_s = s->rows_per_s > 0 ? 0.9 * s->rows_per_s + 0.1 * now_rate : now_rate;
    }
    for (int i = 0; i < t->n; i++) {
        const struct msg_token *k = &t->tokens[i];
        const struct slot *slot = &s->slots[k->slot];
        if (slot->seq == NONE || slot->generation != k->slot_generation) continue; /* too late */
        struct seq *q = &s->seqs[slot->seq];
        if (q->mark == MARK_NONE) commit_token(s, q, k);
    }
    return OK;
}

/* ---- looking --------------------------------------------------------------------------------- */

int sched_retry_after_s(const struct sched *s) {
    double rate = s->rows_per_s > 1 ? s->rows_per_s : 100;
    double seconds = (double)s->waiting_tokens / rate;
    return seconds < 1 ? 1 : seconds > 600 ? 600 : (int)(seconds + 0.5);
}

void sched_counts(const struct sched *s, struct sched_counts *out) {
    *out = s->count;
    out->running = s->n_running;
    out->waiting = s->n_waiting;
    out->waiting_tokens = s->waiting_tokens;
    out->pages_used = pages_used(&s->pages);
    out->pages_total = s->pages.n;
}

void sched_print(FILE *f, const struct sched *s) {
    fprintf(f, "sched running=%d waiting=%d in_flight=%d step=%" PRIu64 " pages=%" PRId64 "/%" PRId64
               " retired=%" PRId64 "\n",
            s->n_running, s->n_waiting, s->n_flight, s->last_id, pages_used(&s->pages), s->pages.n,
            s->pages.n_retired);
    for (int i = 0; i < s->n_running; i++) {
        const struct seq *q = &s->seqs[s->running[i]];
        fprintf(f, "  slot=%d generation=%u id=%" PRIx64 " priority=%d prompt=%d tokens=%d/%d fed=%d"
                   " pending=%d pages=%d\n",
                q->slot, s->slots[q->slot].generation, id_of(s, q), q->priority, q->n_prompt,
                q->n_tokens, q->max_total, q->n_fed, q->n_pending, q->n_pages);
    }
}
