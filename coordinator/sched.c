/* coordinator/sched.c: who runs, what the next step feeds, and what an answer means. See sched.h.
 *
 * Owns: the pool of requests, the slots, the page account, the records of steps in flight.
 * Called by: engine.c.  Pure.
 * Fails how: ERR_FULL, ERR_LIMIT, ERR_NOMEM on submit; ERR_STATE, ERR_FORMAT on commit.
 * Limits: LIMIT_QUEUE_*, LIMIT_SLOTS, LIMIT_STEP_*.  Tested by: tests/unit/test_sched.c
 *
 * How a step is filled, and what is fair. There is no prefill phase and no decode phase, only a
 * budget of rows (tokens fed) that each step may spend. First every sequence that has one token to
 * feed gets its row: those rows are cheap, somebody is watching each of them, and there are never
 * more of them than max_seqs, which the budget always holds. What is left goes to prompts, as much as
 * the bound on the gap between two tokens of those streams allows (sched_gap.c): a long prompt delays
 * the streams beside it by one step of bounded time at a time. Of it the first in order (most urgent,
 * then oldest) is owed a half, so every prompt ends, because each is the first one day; the other half
 * goes to the shortest, so that a short question does not wait for a book; what they leave is the
 * first's as well. A step is never empty while anybody has work. New sequences take
 * a slot only when the pages of their whole prompt are there: a prompt half prefilled and then
 * preempted is work done twice.
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

#include "coordinator/sched_state.h"

#define PASSED_MAX      64   /* waiting sequences that one step looks past */
#define RATE_MEMORY_US  10e6 /* what was measured so long ago counts for little */
#define RATE_UNMEASURED 100  /* rows a second, before anything is measured */
#define RETRY_MAX_S     600

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
    s->next_deadline_us = UINT64_MAX;
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
        free(s->seqs[i].names);
    }
    pages_deinit(&s->pages);
    free(s->restore.live);
    free(s->seqs);
    free(s->events);
    free(s->eog);
    free(s);
}

/* ---- filling a step -------------------------------------------------------------------------- */

/* Room for the sequence at its longest, so that nothing is allocated per token. */
static int reserve(struct seq *q) {
    int32_t n_pages = sched_pages_for(q->max_total);
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
        struct digest *d = realloc(q->names, (size_t)n_pages * sizeof *d);
        if (!d) return ERR_NOMEM;
        q->names = d;
        q->cap_pages = n_pages;
    }
    return OK;
}

/* Positions that can be fed now; 0 when the last sample allowed is already on its way, or any of a
 * sequence that goes in lockstep. */
static int32_t to_feed(const struct seq *q) {
    int32_t length = q->n_tokens + q->n_pending;
    if (q->mark != MARK_NONE || length >= q->max_total || (q->lockstep && q->n_pending)) return 0;
    return length - q->n_fed;
}

static void entry_add(struct sched *s, struct seq *q, int32_t count, struct msg_step *step,
                      struct flight *f) {
    assert(step->n_entries < LIMIT_STEP_ENTRIES && count > 0);
    struct msg_entry *e = &step->entries[step->n_entries];
    bool last = q->n_fed + count == q->n_tokens + q->n_pending;
    int32_t n_pages = sched_pages_for(q->n_fed + count);
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
        memcpy(&step->tokens[step->n_tokens], &q->tokens[q->n_fed],
               (size_t)count * sizeof(int32_t));
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
    f->e[step->n_entries++] = (struct flight_entry){.slot = q->slot,
                                                    .generation = e->slot_generation,
                                                    .pos = e->pos,
                                                    .next_pos = q->n_fed,
                                                    .samples = last};
    f->n_rows += count;
}

/* A page for the row that q feeds next: true, or q sits this step out. */
static bool page_for_row(struct sched *s, struct seq *q) {
    if (sched_pages_for(q->n_fed + 1) <= q->n_pages) return true;
    while (pages_room(&s->pages) == 0) {
        if (s->pages.retired.n > 0) return false; /* an answer will free some: nobody need suffer */
        struct seq *victim = &s->seqs[s->running[s->n_running - 1]];
        if (victim == q) return false;
        sched_run_remove(s, victim);
        sched_wait_insert(s, victim);
        s->count.preemptions++;
    }
    assert(q->n_pages < q->cap_pages);
    pages_get(&s->pages, 1, &q->pages[q->n_pages]);
    q->n_pages++;
    return true;
}

/* Pages that were found in the cache and that no entry has named yet: all may come in one step. */
static int32_t unnamed_pages(const struct sched *s) {
    int32_t n = 0;
    for (int i = 0; i < s->n_running; i++) {
        const struct seq *q = &s->seqs[s->running[i]];
        n += MAX(0, q->n_found / LIMIT_PAGE_TOKENS - q->n_announced);
    }
    return n;
}

/* A slot and the pages of all its tokens for q, of which the first n_found are in the cache. */
static void enter(struct sched *s, struct seq *q, int32_t n_found, struct sched_plan *plan) {
    int32_t fresh = sched_pages_for(q->n_tokens) - n_found;
    int32_t named = plan->msg.step.n_pages + unnamed_pages(s) + n_found;
    const struct msg_sampling *p = &q->sampling;
    int slot = 0;
    while (s->slots[slot].seq != NONE) slot++;
    sched_wait_remove(s, q);
    for (int32_t i = 0; i < n_found; i++) pages_share(&s->pages, q->pages[i]);
    int rc = pages_get(&s->pages, fresh, q->pages + n_found);
    assert(rc == OK);
    q->n_pages = n_found + fresh;
    q->n_named = n_found;
    q->n_fed = q->n_found = n_found * LIMIT_PAGE_TOKENS;
    if (!q->entered) s->count.cached_tokens += (uint64_t)(q->n_cached = q->n_found);
    q->entered = true;
    q->slot = slot;
    s->slots[slot].seq = seq_index(s, q);
    s->slots[slot].generation++;
    sched_run_insert(s, q);
    /* Its entry names the pages that were found; whoever counts tokens must hear those too. */
    bool counts = p->repetition != 1 || p->presence != 0 || p->frequency != 0;
    bool tell = n_found && (counts || named > LIMIT_STEP_PAGES / 2);
    if (tell) q->n_announced = n_found;
    plan->tell[plan->n_admits] = tell;
    plan->admits[plan->n_admits++] = slot;
}

/* Can q enter now? One page per running sequence is left over, or the newcomer would be preempted by
 * the next row. */
static bool fits(const struct sched *s, const struct seq *q, int32_t n_found, int32_t n_kept) {
    int64_t fresh = sched_pages_for(q->n_tokens) - n_found;
    return s->n_running < s->o.max_seqs && fresh + s->n_running <= pages_room(&s->pages) - n_kept;
}

/* Sends the last of the running back for q if it is less urgent and nothing was computed for it yet. */
static bool make_way(struct sched *s, const struct seq *q) {
    struct seq *last = s->n_running ? &s->seqs[s->running[s->n_running - 1]] : NULL;
    if (!last || last->priority <= q->priority || last->n_fed > last->n_found) return false;
    sched_run_remove(s, last);
    sched_wait_insert(s, last);
    return true;
}

/* Lets the first of the waiting in, from *at on: it, or NULL. Those who wait for a page that is being
 * computed are passed over; nobody passes one for whom there is no room. */
static struct seq *admit_next(struct sched *s, int32_t *at, int *passed, struct sched_plan *plan) {
    while (*at != NONE && *passed < PASSED_MAX) {
        struct seq *q = &s->seqs[*at];
        *at = q->next;
        if (q->mark != MARK_NONE) continue;
        if (reserve(q) < 0) {
            seq_end(s, q, ENGINE_ERROR, -1, "out of memory");
            continue;
        }
        int32_t n_kept, n_found;
        bool fit;
        do { /* what is sent back may have shared what q finds */
            n_found = sched_prefix_match(s, q, &n_kept);
            fit = fits(s, q, n_found, n_kept);
        } while (!fit && make_way(s, q));
        if (!fit) break;
        if (sched_prefix_coming(s, q, n_found)) {
            ++*passed;
            continue;
        }
        enter(s, q, n_found, plan);
        return q;
    }
    *at = NONE;
    return NULL;
}

static bool is_urgent(const struct sched *s, int32_t at) {
    return at != NONE && s->seqs[at].priority == ENGINE_PRIORITY_FIRST;
}

/* A chunk of q's prompt, as large as the budget and the bound on the gap allow: its rows. */
static int32_t feed_chunk(struct sched *s, struct seq *q, int32_t budget, struct msg_step *step,
                          struct flight *f) {
    int32_t n = MIN(to_feed(q), budget), pos = q->n_fed;
    if (n > 0) n = sched_gap_rows(s, f, pos, n);
    if (n <= 0) return 0;
    entry_add(s, q, n, step, f);
    sched_gap_add(f, pos, n, 1);
    return n;
}

/* Has it a prompt to feed, of which this step holds nothing yet? (A row without a page sits out.) */
static bool is_prompt(const struct seq *q, uint64_t step) {
    return to_feed(q) > 0 && q->last_step != step && sched_pages_for(q->n_fed + 1) <= q->n_pages;
}

/* Those who have a prompt to feed, the shortest first, but for the first in order. */
static int prompts_by_length(const struct sched *s, const struct seq *first, uint64_t step,
                             struct seq *out[LIMIT_SLOTS]) {
    int n = 0;
    for (int i = 0; i < s->n_running; i++) {
        struct seq *q = &s->seqs[s->running[i]];
        if (q == first || !is_prompt(q, step)) continue;
        int at = n++;
        for (; at > 0 && to_feed(out[at - 1]) > to_feed(q); at--) out[at] = out[at - 1];
        out[at] = q;
    }
    return n;
}

static void feed_prompts(struct sched *s, int32_t budget, struct sched_plan *plan,
                         struct flight *f) {
    struct msg_step *step = &plan->msg.step;
    struct seq *first = NULL, *others[LIMIT_SLOTS], *q;
    int passed = 0;
    int32_t at = s->wait_head;
    while (budget > 0 && is_urgent(s, at)) { /* does not wait for the end of somebody's prompt */
        if (!(q = admit_next(s, &at, &passed, plan))) break;
        budget -= feed_chunk(s, q, budget, step, f);
    }
    if (at == NONE) at = s->wait_head, passed = 0;
    while (budget > 0 && admit_next(s, &at, &passed, plan)) continue;
    for (int i = 0; !first && i < s->n_running; i++)
        if (is_prompt(&s->seqs[s->running[i]], step->id)) first = &s->seqs[s->running[i]];
    int32_t room = first ? sched_gap_rows(s, f, first->n_fed, budget) : budget;
    int32_t owed = first ? MIN(to_feed(first), room - room / 2) : 0, left = room - owed;
    if (first) sched_gap_add(f, first->n_fed, owed, 1); /* kept for it */
    int n = prompts_by_length(s, first, step->id, others);
    for (int i = 0; i < n && left > 0; i++) left -= feed_chunk(s, others[i], left, step, f);
    if (!first) return;
    sched_gap_add(f, first->n_fed, owed, -1);
    feed_chunk(s, first, left + owed, step, f);
}

/* token path 4/9: the token is put into the next step, beside everybody else's. */
int sched_plan(struct sched *s, uint64_t now_us, struct sched_plan *plan) {
    if (s->n_flight >= s->o.depth || s->pages.n == 0) return 0;
    struct msg_step *step = &plan->msg.step;
    plan->msg.type = MSG_STEP;
    struct flight *f = &s->flight[(s->flight_head + s->n_flight) % SCHED_DEPTH_MAX];
    f->id = step->id = s->last_id + 1;
    f->planned_us = now_us;
    f->n_rows = f->n_decode = f->prompt_rows = 0;
    f->prompt_work = 0;
    for (int i = 0; i < LIMIT_SLOTS; i++) f->by_slot[i] = NONE;
    plan->n_admits = plan->n_said = step->n_entries = step->n_tokens = step->n_pages = 0;
    plan->told = -1;
    step->generation = 0;

    /* running[] may shrink at its end under this loop, never before i */
    for (int i = 0; i < s->n_running; i++) {
        struct seq *q = &s->seqs[s->running[i]];
        if (to_feed(q) != 1 || !page_for_row(s, q)) continue;
        entry_add(s, q, 1, step, f);
        f->n_decode++;
    }
    feed_prompts(s, s->o.max_step_rows - f->n_decode, plan, f);
    f->n = step->n_entries;
    assert(step->n_entries > 0 || plan->n_admits == 0);
    if (step->n_entries == 0) return 0;
    s->last_id++;
    s->n_flight++;
    return 1;
}

void seq_admit(const struct sched *s, const struct seq *q, struct msg_admit *out) {
    out->slot = q->slot;
    out->slot_generation = s->slots[q->slot].generation;
    out->n_prompt = q->n_prompt;
    out->sampling = q->sampling;
}

bool sched_plan_next(const struct sched *s, struct sched_plan *plan, struct msg *m) {
    for (; plan->n_said < plan->n_admits; plan->n_said++, plan->told = -1) {
        const struct seq *q = &s->seqs[s->slots[plan->admits[plan->n_said]].seq];
        if (plan->told < 0) {
            m->type = MSG_ADMIT;
            seq_admit(s, q, &m->admit);
            plan->told = 0;
            return true;
        }
        if (plan->tell[plan->n_said] && plan->told < q->n_found) {
            m->type = MSG_RESTORE;
            plan->told += sched_history(s, q, plan->told, q->n_found, &m->restore);
            return true;
        }
    }
    return false;
}

int sched_in_flight(const struct sched *s) {
    return s->n_flight;
}
bool sched_idle(const struct sched *s) {
    return s->n_running + s->n_waiting == 0;
}

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
            return err_set(err, ERR_FORMAT, "step %" PRIu64 ": unexpected sample for slot %d",
                           f->id, k->slot);
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
        sched_prefix_forget(s, q);
        seq_end(s, q, ENGINE_ERROR, -1, "the model gave no finite logit for this sequence");
        return;
    }
    if (q->n_tokens == q->n_prompt) s->count.prompt_tokens += (uint64_t)q->n_prompt;
    q->tokens[q->n_tokens++] = k->token;
    q->n_pending--;
    s->count.output_tokens++;
    if (is_stop(s, q, k->token)) {
        seq_end(s, q, ENGINE_STOP, k->token, NULL);
        return;
    }
    struct sched_event *e = sched_event_new(s, q);
    e->token = *k;
    e->ev.token = &e->token;
    if (q->n_tokens == q->max_total) seq_end(s, q, ENGINE_LENGTH, -1, NULL);
}

/* Rows, and the time in which there was work to do. */
static void measure(struct sched *s, const struct flight *f, uint64_t now_us) {
    uint64_t from = MAX(f->planned_us, s->last_commit_us);
    double us = now_us > from ? (double)(now_us - from) : 0;
    double keep = RATE_MEMORY_US / (RATE_MEMORY_US + us);
    s->busy_us = keep * s->busy_us + us;
    s->busy_rows = keep * s->busy_rows + f->n_rows;
    if (us > 0) sched_gap_measure(s, f, us);
    s->last_commit_us = now_us;
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
    measure(s, f, now_us);
    for (int i = 0; i < f->n; i++) { /* before anybody ends: what they leave can be found */
        const struct flight_entry *e = &f->e[i];
        const struct slot *slot = &s->slots[e->slot];
        if (slot->seq != NONE && slot->generation == e->generation)
            sched_prefix_answered(s, &s->seqs[slot->seq], e->next_pos);
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
    double rate = s->busy_us > 0 ? MAX(1, s->busy_rows * 1e6 / s->busy_us) : RATE_UNMEASURED;
    double owed = (double)s->waiting_tokens + s->output_mean * s->n_waiting;
    for (int i = 0; i < s->n_running; i++) {
        const struct seq *q = &s->seqs[s->running[i]];
        owed += MAX(0, q->n_tokens - q->n_fed);
    }
    double seconds = owed / rate;
    return seconds < 1 ? 1 : seconds > RETRY_MAX_S ? RETRY_MAX_S : (int)(seconds + 0.5);
}

void sched_counts(const struct sched *s, struct sched_counts *out) {
    *out = s->count;
    out->running = s->n_running;
    out->waiting = s->n_waiting;
    out->waiting_tokens = s->waiting_tokens;
    out->pages_used = pages_used(&s->pages);
    out->pages_total = s->pages.n;
    out->pages_kept = s->pages.kept.n;
}

void sched_print(FILE *f, const struct sched *s) {
    fprintf(f,
            "sched running=%d waiting=%d in_flight=%d step=%" PRIu64 " pages=%" PRId64 "/%" PRId64
            " retired=%" PRId64 "\n",
            s->n_running, s->n_waiting, s->n_flight, s->last_id, pages_used(&s->pages), s->pages.n,
            s->pages.retired.n);
    for (int i = 0; i < s->n_running; i++) {
        const struct seq *q = &s->seqs[s->running[i]];
        fprintf(f,
                "  slot=%d generation=%u id=%" PRIx64 " priority=%d prompt=%d tokens=%d/%d fed=%d"
                " pending=%d pages=%d\n",
                q->slot, s->slots[q->slot].generation, seq_id(s, q), q->priority, q->n_prompt,
                q->n_tokens, q->max_total, q->n_fed, q->n_pending, q->n_pages);
    }
}
