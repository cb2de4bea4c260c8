/* coordinator/sched_queue.c: requests from submit to their end: the waiting list, the running list,
 * the events. See sched.h.
 *
 * Owns: nothing of its own.  Called by: engine.c through sched.h, sched.c.  Pure.
 * Fails how: ERR_FULL, ERR_LIMIT, ERR_NOMEM on submit.  Limits: LIMIT_QUEUE_*.
 * Tested by: tests/unit/test_sched.c
 *
 * finish and cancel only mark a sequence, because they are called from inside the delivery of its
 * own events; sched_sweep does the rest at its place in the tick. What is already written but not
 * yet delivered is corrected at once, so that the last word of a client is the last.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/sched_state.h"

static struct seq *seq_find(const struct sched *s, uint64_t id) {
    uint64_t i = id & ((1u << INDEX_BITS) - 1);
    if (i >= (uint64_t)s->n_pool) return NULL;
    struct seq *q = &s->seqs[i];
    return q->state != SEQ_FREE && q->generation == id >> INDEX_BITS ? q : NULL;
}

/* Tokens one sequence may have: the last one sampled is never fed, so it needs no place. */
static int64_t sched_total_max(const struct sched *s) {
    int64_t cache = s->pages.n * LIMIT_PAGE_TOKENS + 1;
    return s->pages.n && cache < s->o.context ? cache : s->o.context;
}

/* ---- events ---------------------------------------------------------------------------------- */

struct sched_event *sched_event_new(struct sched *s, const struct seq *q) {
    assert(s->n_events < s->cap_events); /* the caller delivers before it goes on */
    struct sched_event *e = &s->events[s->n_events++];
    e->id = seq_id(s, q);
    e->sink = q->sink;
    e->user = q->user;
    e->dead = false;
    e->error[0] = 0;
    e->ev = (struct engine_event){
        .stop_token = -1,
        .n_prompt = q->n_prompt,
        .n_cached = q->n_cached,
        .n_output = q->n_tokens - q->n_prompt};
    return e;
}

const struct sched_event *sched_events(const struct sched *s, int *n) {
    *n = s->n_events;
    return s->events;
}

void sched_events_clear(struct sched *s) {
    s->n_events = 0;
}

/* ---- the waiting list and the running list --------------------------------------------------- */

void sched_wait_insert(struct sched *s, struct seq *q) {
    int32_t after = s->wait_tail; /* nearly always the place */
    while (after != NONE && seq_before(q, &s->seqs[after])) after = s->seqs[after].prev;
    int32_t i = seq_index(s, q);
    q->prev = after;
    q->next = after == NONE ? s->wait_head : s->seqs[after].next;
    *(q->prev == NONE ? &s->wait_head : &s->seqs[q->prev].next) = i;
    *(q->next == NONE ? &s->wait_tail : &s->seqs[q->next].prev) = i;
    q->state = SEQ_WAITING;
    s->n_waiting++;
    s->waiting_tokens += q->n_tokens;
}

void sched_wait_remove(struct sched *s, struct seq *q) {
    assert(q->state == SEQ_WAITING);
    *(q->prev == NONE ? &s->wait_head : &s->seqs[q->prev].next) = q->next;
    *(q->next == NONE ? &s->wait_tail : &s->seqs[q->next].prev) = q->prev;
    s->n_waiting--;
    s->waiting_tokens -= q->n_tokens;
}

void sched_run_insert(struct sched *s, struct seq *q) {
    int at = s->n_running++;
    for (; at > 0 && seq_before(q, &s->seqs[s->running[at - 1]]); at--)
        s->running[at] = s->running[at - 1];
    s->running[at] = seq_index(s, q);
    q->state = SEQ_RUNNING;
}

/* Out of the running list and its slot, its pages given back. */
void sched_run_remove(struct sched *s, struct seq *q) {
    assert(q->state == SEQ_RUNNING && s->slots[q->slot].seq == seq_index(s, q));
    int at = 0;
    while (s->running[at] != seq_index(s, q)) at++;
    s->n_running--;
    memmove(&s->running[at], &s->running[at + 1], (size_t)(s->n_running - at) * sizeof(int32_t));
    pages_put(&s->pages, q->pages, q->n_pages, q->last_step);
    s->slots[q->slot].seq = NONE;
    q->slot = NONE;
    q->n_pages = q->n_announced = q->n_named = q->n_found = q->n_fed = q->n_pending = 0;
}

static void seq_drop(struct sched *s, struct seq *q) {
    if (q->state == SEQ_RUNNING)
        sched_run_remove(s, q);
    else
        sched_wait_remove(s, q);
    free(q->tokens);
    free(q->stop_ids);
    free(q->pages);
    free(q->names);
    q->tokens = q->stop_ids = q->pages = NULL;
    q->names = NULL;
    q->cap_tokens = q->cap_pages = 0;
    q->state = SEQ_FREE;
    q->next = s->free_head;
    s->free_head = seq_index(s, q);
}

void seq_end(struct sched *s, struct seq *q, enum engine_finish reason, int32_t stop_token,
             const char *error) {
    struct sched_event *e = sched_event_new(s, q);
    e->ev.finished = true;
    e->ev.reason = reason;
    if (reason == ENGINE_STOP || reason == ENGINE_LENGTH)
        s->output_mean += (q->n_tokens - q->n_prompt - s->output_mean) / 16;
    e->ev.stop_token = stop_token;
    if (error) {
        snprintf(e->error, sizeof e->error, "%s", error);
        e->ev.error = e->error;
    }
    if (q->mark != MARK_NONE) return; /* sched_sweep is about to drop it */
    seq_drop(s, q);
}

/* ---- from outside ---------------------------------------------------------------------------- */

int sched_set_pages(struct sched *s, int64_t n_pages) {
    if (s->pages.n == n_pages) return OK;
    if (s->pages.n) {
        sched_forget_device(s);
        pages_deinit(&s->pages);
    }
    free(s->restore.live);
    s->restore.live = calloc((size_t)n_pages, 1);
    if (!s->restore.live) return ERR_NOMEM;
    TRY(pages_init(&s->pages, n_pages));
    int64_t most = sched_total_max(s);
    for (int32_t i = s->wait_head, next; i != NONE; i = next) {
        struct seq *q = &s->seqs[i];
        next = q->next;
        if (q->mark == MARK_NONE && q->n_tokens >= most)
            seq_end(s, q, q->n_tokens > q->n_prompt ? ENGINE_LENGTH : ENGINE_ERROR, -1,
                    q->n_tokens > q->n_prompt ? NULL : "the prompt does not fit into the cache");
        else
            q->max_total = (int32_t)MIN(q->max_total, most);
    }
    return OK;
}

int sched_submit(struct sched *s, const struct engine_request *r, uint64_t now_us, uint64_t *id) {
    assert(r->n_tokens > 0 && r->max_tokens > 0 && r->sink);
    if (r->n_tokens >= sched_total_max(s)) return ERR_LIMIT;
    bool full = s->n_waiting && s->waiting_tokens + r->n_tokens > s->o.queue_tokens;
    if (full || s->free_head == NONE) {
        s->count.refused++;
        return ERR_FULL;
    }
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
                      .deadline_us = r->timeout_us ? now_us + r->timeout_us : UINT64_MAX,
                      .tokens = tokens,
                      .n_tokens = r->n_tokens,
                      .n_prompt = r->n_tokens,
                      .cap_tokens = r->n_tokens,
                      .max_total =
                          (int32_t)MIN((int64_t)r->n_tokens + r->max_tokens, sched_total_max(s)),
                      .stop_ids = stops,
                      .n_stop_ids = r->n_stop_ids,
                      .ignore_eos = r->ignore_eos,
                      .lockstep = r->lockstep,
                      .sampling = r->sampling,
                      .root = sched_digest(s->o.secret, r->cache_salt, r->n_cache_salt),
                      .slot = NONE};
    s->next_deadline_us = MIN(s->next_deadline_us, q->deadline_us);
    sched_wait_insert(s, q);
    *id = seq_id(s, q);
    return OK;
}

static void mark(struct sched *s, uint64_t id, enum seq_mark m) {
    for (int i = 0; i < s->n_events; i++) {
        struct sched_event *e = &s->events[i];
        if (e->id != id) continue;
        if (m == MARK_CANCEL || !e->ev.finished)
            e->dead = true;
        else if (e->ev.reason == ENGINE_LENGTH)
            e->ev.reason = ENGINE_STOP; /* met on the last one */
    }
    struct seq *q = seq_find(s, id);
    if (!q) return;
    if (q->mark == MARK_NONE) {
        q->next_marked = s->marked_head;
        s->marked_head = seq_index(s, q);
    }
    q->mark = MAX(q->mark, m); /* who cancels what was finished hears nothing */
}

void sched_finish(struct sched *s, uint64_t id) {
    mark(s, id, MARK_FINISH);
}
void sched_cancel(struct sched *s, uint64_t id) {
    mark(s, id, MARK_CANCEL);
}

void sched_sweep(struct sched *s) {
    while (s->marked_head != NONE) {
        struct seq *q = &s->seqs[s->marked_head];
        s->marked_head = q->next_marked;
        if (q->mark == MARK_FINISH) seq_end(s, q, ENGINE_STOP, -1, NULL);
        seq_drop(s, q);
    }
}

void sched_expire(struct sched *s, uint64_t now_us) {
    if (now_us < s->next_deadline_us) return;
    s->next_deadline_us = UINT64_MAX;
    for (int i = 0; i < s->n_pool; i++) {
        struct seq *q = &s->seqs[i];
        if (q->state == SEQ_FREE || q->mark != MARK_NONE) continue;
        if (q->deadline_us <= now_us) {
            s->count.expired++;
            seq_end(s, q, ENGINE_TIMEOUT, -1, "the request's time is over");
        } else {
            s->next_deadline_us = MIN(s->next_deadline_us, q->deadline_us);
        }
    }
}

void sched_end_all(struct sched *s, enum engine_finish reason, const char *error) {
    sched_sweep(s);
    while (s->n_running) seq_end(s, &s->seqs[s->running[0]], reason, -1, error);
    while (s->wait_head != NONE) seq_end(s, &s->seqs[s->wait_head], reason, -1, error);
}

void sched_forget_device(struct sched *s) {
    s->n_flight = 0;
    while (s->n_running) {
        struct seq *q = &s->seqs[s->running[s->n_running - 1]];
        sched_run_remove(s, q);
        sched_wait_insert(s, q);
        s->count.replays++;
    }
    if (s->pages.n) pages_reset(&s->pages);
}
