/* coordinator/engine.c: the tick that joins scheduler, fleet and clock. See engine.h.
 *
 * Owns: the scheduler, the fleet, the loop handles of the tick.
 * Called by: cmd_serve.c, api_*.c, on the loop thread.  Fails how: see engine.h.
 * Limits: LIMIT_QUEUE_*, ROUNDS_MAX rounds of work per turn of the loop.
 * Tested by: tests/unit/test_engine.c (with tests/unit/fake_worker.c), tests/faults
 *
 * One place decides. Callbacks of libuv and calls of the API leave notes (an exit, a mark on a
 * sequence, a request to stop); the tick reads the notes, always in the order written in tick().
 * It runs after the loop has polled (uv_check), for what came in, and before the loop sleeps
 * (uv_prepare), for what timers and closing callbacks did since, and because ZeroMQ's descriptor
 * does not announce again what arrived while we were sending.
 *
 * Replies are committed and the next step is sent before anybody hears of the tokens: the workers
 * should not wait while text is made and written. The price is one row for a sequence whose stop
 * string is then found; its answer is dropped.
 */
#include "coordinator/engine.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/fleet.h"
#include "coordinator/sched.h"
#include "proto/log.h"

#define TIMER_MS   50 /* how often time alone is looked at */
#define ROUNDS_MAX 8  /* then the loop turns once without sleeping */

struct engine {
    uv_loop_t *loop;
    struct engine_options o;
    struct sched *sched;
    struct fleet *fleet;
    uv_check_t check;
    uv_prepare_t prepare;
    uv_idle_t idle; /* active: there is more to do, do not sleep */
    uv_timer_t timer;
    int n_open; /* handles to be closed, the fleet counting as one */
    /* notes */
    bool stop_asked, stop_now;
    uint32_t restart_asked; /* bit r: rank r */
    /* what came of them */
    bool ticking, draining, stopping, closing, was_ready, ready, failed, fatal_told;
    uint64_t drain_due_us, ready_since_us;
    int exit_code;
    struct sched_plan *plan;
    struct msg *before; /* what is said before a step */
    void (*done)(void *user, int exit_code);
    void *done_user;
    void (*fatal)(void *user, int exit_code);
    void *fatal_user;
    void (*on_ready)(void *user);
    void *on_ready_user;
};

static uint64_t now_us(void) {
    return uv_hrtime() / 1000;
}

/* ---- requests -------------------------------------------------------------------------------- */

int engine_submit(struct engine *e, const struct engine_request *r, uint64_t *id) {
    if (e->stop_asked || e->failed) return ERR_STATE;
    return sched_submit(e->sched, r, now_us(), id);
}

void engine_finish(struct engine *e, uint64_t id) {
    sched_finish(e->sched, id);
}
void engine_cancel(struct engine *e, uint64_t id) {
    sched_cancel(e->sched, id);
}

int engine_restart(struct engine *e, int rank) {
    if (!e->ready || e->stop_asked || e->failed) return ERR_STATE;
    if (rank < 0 || rank >= fleet_world(e->fleet)) return ERR_RANGE;
    e->restart_asked |= 1u << rank;
    return OK;
}

int engine_retry_after(const struct engine *e) {
    return sched_retry_after_s(e->sched);
}

/* ---- the tick, in the order of its steps ----------------------------------------------------- */

static void stop_fleet(struct engine *e, uint64_t now) {
    if (e->stopping) return;
    e->stopping = true;
    sched_end_all(e->sched, ENGINE_CANCELLED, NULL);
    fleet_stop(e->fleet, now);
}

static void take_signals(struct engine *e, uint64_t now) {
    if (e->stop_asked && !e->draining) {
        e->draining = true;
        e->drain_due_us = now + (uint64_t)e->o.drain_timeout_s * 1000000;
        log_info("draining", "bound_s=%d", e->o.drain_timeout_s);
    }
    if (e->draining && !e->stopping &&
        (e->stop_now || sched_idle(e->sched) || now >= e->drain_due_us || e->failed))
        stop_fleet(e, now);
}

/* The newborn learn what the survivors know, and all are brought to what was committed. */
static void restore(struct engine *e, uint64_t now) {
    struct msg *m = &e->plan->msg; /* no step is being planned */
    sched_restore_begin(e->sched);
    while (fleet_state(e->fleet) == FLEET_RESTORING && sched_restore_next(e->sched, m))
        fleet_restore(e->fleet, m, now);
    fleet_restore_end(e->fleet, now);
    fleet_tick(e->fleet, now);
}

static void take_restarts(struct engine *e, uint64_t now) {
    if (fleet_state(e->fleet) != FLEET_READY) return; /* the note waits until it is whole again */
    for (int r = 0; r < fleet_world(e->fleet); r++)
        if (e->restart_asked & 1u << r) fleet_restart(e->fleet, r, now);
    e->restart_asked = 0;
}

static void take_deaths(struct engine *e, uint64_t now) {
    if (e->restart_asked) take_restarts(e, now);
    fleet_tick(e->fleet, now);
    if (fleet_take_broken(e->fleet)) sched_take_back(e->sched);
    if (fleet_take_lost(e->fleet)) sched_forget_device(e->sched);
    if (fleet_wants_canary(e->fleet)) fleet_canary(e->fleet, sched_take_id(e->sched), now);
    if (fleet_wants_restore(e->fleet)) restore(e, now);
    if (!e->failed && (fleet_state(e->fleet) == FLEET_FAILED || fleet_exit_code(e->fleet))) {
        e->failed = true;
        e->exit_code = fleet_exit_code(e->fleet);
        sched_end_all(e->sched, ENGINE_ERROR, fleet_why(e->fleet));
    }
    bool ready = fleet_state(e->fleet) == FLEET_READY;
    if (ready && !e->ready) e->ready_since_us = now;
    if (ready && !e->ready && sched_set_pages(e->sched, fleet_pages(e->fleet)) < 0)
        fleet_fail(e->fleet, 0, "no memory for the page account", now);
    if (ready && !e->ready && e->on_ready) e->on_ready(e->on_ready_user);
    e->ready = ready;
    e->was_ready |= ready;
}

/* At most one answer: its events are delivered before the next is committed. */
static bool commit_replies(struct engine *e, uint64_t now) {
    const struct msg_tokens *t = fleet_answer(e->fleet);
    if (!t) return false;
    struct err_text err = {0};
    int rc = sched_commit(e->sched, t, now, &err);
    if (rc == ERR_FORMAT)
        fleet_fail(e->fleet, 0, err.text, now);
    else
        fleet_answer_done(e->fleet, now);
    return true;
}

static bool send_steps(struct engine *e, uint64_t now) {
    bool sent = false;
    while (fleet_state(e->fleet) == FLEET_READY && sched_plan(e->sched, now, e->plan)) {
        while (sched_plan_next(e->sched, e->plan, e->before)) fleet_send(e->fleet, e->before, now);
        fleet_send(e->fleet, &e->plan->msg, now);
        sent = true;
    }
    return sent;
}

static bool write_deltas(struct engine *e) {
    int n;
    const struct sched_event *ev = sched_events(e->sched, &n);
    for (int i = 0; i < n; i++)
        if (!ev[i].dead) ev[i].sink(ev[i].user, &ev[i].ev);
    sched_events_clear(e->sched);
    return n > 0;
}

static void close_all(struct engine *e);
static void on_idle(uv_idle_t *h) {
    UNUSED(h); /* its being there keeps the loop awake */
}

static void take_ends(struct engine *e) {
    if (fleet_state(e->fleet) != FLEET_STOPPED) return;
    if (e->failed && !e->fatal_told) {
        e->fatal_told = true;
        if (e->fatal) e->fatal(e->fatal_user, e->exit_code);
    }
    if (e->stop_asked) close_all(e);
}

/* One turn of everything. The order is the design's: signals, dead workers, replies committed,
 * cancellations, admissions, one scheduling step per idle group, deltas written, counters. Nothing
 * is counted here that is not counted where it happens, so the last is empty. */
static void tick(struct engine *e) {
    if (e->closing) return;
    assert(!e->ticking); /* a sink must not turn the loop */
    e->ticking = true;
    bool more = true;
    for (int round = 0; more && round < ROUNDS_MAX; round++) {
        uint64_t now = now_us();
        more = false;
        take_signals(e, now);
        take_deaths(e, now);
        more |= commit_replies(e, now);
        sched_expire(e->sched, now);
        sched_sweep(e->sched);
        more |= send_steps(e, now); /* admissions are part of planning: who enters is who fits */
        more |= write_deltas(e);
        more |= fleet_pending(e->fleet);
    }
    e->ticking = false;
    if (more)
        uv_idle_start(&e->idle, on_idle);
    else
        uv_idle_stop(&e->idle);
    take_ends(e);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void on_check(uv_check_t *h) {
    tick(h->data);
}
static void on_prepare(uv_prepare_t *h) {
    tick(h->data);
}
static void on_timer(uv_timer_t *h) {
    UNUSED(h); /* woken: on_prepare comes next */
}

static void take_defaults(struct engine_options *o) {
    if (o->depth == 0) o->depth = 1;
    if (o->queue_requests == 0) o->queue_requests = LIMIT_QUEUE_REQUESTS;
    if (o->queue_tokens == 0) o->queue_tokens = LIMIT_QUEUE_TOKENS;
    if (o->beat_timeout_ms == 0) o->beat_timeout_ms = 3000;
    if (o->restart_delay_ms == 0) o->restart_delay_ms = 100;
    if (o->restarts_max == 0) o->restarts_max = 10;
    if (o->restart_window_s == 0) o->restart_window_s = 600;
    if (o->load_timeout_s == 0) o->load_timeout_s = 3600;
    if (o->step_timeout_s == 0) o->step_timeout_s = 3;
    if (o->drain_timeout_s == 0) o->drain_timeout_s = 60;
    if (o->reclaim_timeout_s == 0) o->reclaim_timeout_s = 60;
}

static int start_parts(struct engine *e, struct err_text *err) {
    const struct engine_options *o = &e->o;
    struct sched_options so = {.max_seqs = o->max_seqs,
                                     .max_step_rows = o->max_step_rows,
                                     .depth = o->depth,
                                     .gap_us = (uint64_t)o->gap_ms * 1000,
                                     .queue_requests = o->queue_requests,
                                     .queue_tokens = o->queue_tokens,
                                     .context = o->context,
                                     .eog = o->eog,
                                     .n_eog = o->n_eog,
                                     .prefix_cache = o->prefix_cache};
    e->plan = malloc(sizeof *e->plan);
    e->before = malloc(sizeof *e->before);
    if (uv_random(NULL, NULL, &so.secret, sizeof so.secret, 0, NULL) < 0)
        return err_set(err, ERR_SETUP, "engine: expected random bytes, found none");
    if (!e->plan || !e->before || sched_new(&e->sched, &so) < 0)
        return err_set(err, ERR_NOMEM, "engine: expected memory for %d sequences, found none",
                       o->max_seqs);
    return fleet_start(&e->fleet, e->loop, o, now_us(), err);
}

int engine_start(struct engine **out, uv_loop_t *loop, const struct engine_options *o,
                 struct err_text *err) {
    struct engine *e = calloc(1, sizeof *e);
    if (!e) return err_set(err, ERR_NOMEM, "out of memory");
    e->loop = loop;
    e->o = *o;
    take_defaults(&e->o);
    int rc = start_parts(e, err);
    if (rc < 0) {
        engine_free(e);
        return rc;
    }
    uv_check_init(loop, &e->check);
    uv_prepare_init(loop, &e->prepare);
    uv_idle_init(loop, &e->idle);
    uv_timer_init(loop, &e->timer);
    e->check.data = e->prepare.data = e->idle.data = e->timer.data = e;
    uv_check_start(&e->check, on_check);
    uv_prepare_start(&e->prepare, on_prepare);
    uv_timer_start(&e->timer, on_timer, TIMER_MS, TIMER_MS);
    *out = e;
    return OK;
}

void engine_free(struct engine *e) {
    if (!e) return;
    assert(e->n_open == 0);
    sched_free(e->sched);
    free(e->plan);
    free(e->before);
    free(e);
}

static void one_closed(struct engine *e) {
    if (--e->n_open == 0) e->done(e->done_user, e->exit_code);
}

static void on_handle_closed(uv_handle_t *h) {
    one_closed(h->data);
}
static void on_fleet_closed(void *user) {
    ((struct engine *)user)->fleet = NULL;
    one_closed(user);
}

static void close_all(struct engine *e) {
    e->closing = true;
    e->n_open = 5;
    uv_close((uv_handle_t *)&e->check, on_handle_closed);
    uv_close((uv_handle_t *)&e->prepare, on_handle_closed);
    uv_close((uv_handle_t *)&e->idle, on_handle_closed);
    uv_close((uv_handle_t *)&e->timer, on_handle_closed);
    fleet_close(e->fleet, on_fleet_closed, e);
}

void engine_stop(struct engine *e, bool now, void (*done)(void *user, int exit_code), void *user) {
    e->stop_asked = true;
    e->stop_now |= now;
    if (done) {
        e->done = done;
        e->done_user = user;
    }
    assert(e->done);
}

void engine_on_fatal(struct engine *e, void (*fatal)(void *user, int exit_code), void *user) {
    e->fatal = fatal;
    e->fatal_user = user;
}

void engine_on_ready(struct engine *e, void (*ready)(void *user), void *user) {
    e->on_ready = ready;
    e->on_ready_user = user;
}

/* ---- looking --------------------------------------------------------------------------------- */

static enum engine_state state_of(const struct engine *e) {
    if (e->failed) return ENGINE_FAILED;
    if (e->stop_asked) return ENGINE_DRAINING;
    if (e->ready) return ENGINE_READY;
    if (e->was_ready || !e->fleet || fleet_recovers(e->fleet)) return ENGINE_RECOVERING;
    switch (fleet_state(e->fleet)) {
    case FLEET_WAITING:
        return ENGINE_STARTING;
    case FLEET_LOADING:
    case FLEET_JOINING:
        return ENGINE_LOADING;
    default:
        return ENGINE_CANARY;
    }
}

void engine_status(const struct engine *e, struct engine_status *out) {
    struct sched_counts c;
    memset(out, 0, sizeof *out);
    sched_counts(e->sched, &c);
    out->state = state_of(e);
    out->running = c.running;
    out->waiting = c.waiting;
    out->pages_used = c.pages_used;
    out->pages_total = c.pages_total;
    out->steps = c.steps;
    out->prompt_tokens = c.prompt_tokens;
    out->output_tokens = c.output_tokens;
    out->cached_tokens = c.cached_tokens;
    out->pages_kept = c.pages_kept;
    out->refused = c.refused;
    out->expired = c.expired;
    out->preempted = c.preemptions;
    if (out->state == ENGINE_DRAINING)
        snprintf(out->why, sizeof out->why, "asked to stop, finishing what is running");
    else if (out->state != ENGINE_READY)
        snprintf(out->why, sizeof out->why, "%s", e->fleet ? fleet_why(e->fleet) : "stopped");
    out->phase = "stopped";
    out->canary = "none";
    out->last_step_us = UINT64_MAX;
    sched_prefill(e->sched, &out->prefill);
    if (!e->fleet || e->closing) return;
    out->ready_us = e->ready ? now_us() - e->ready_since_us : 0;
    fleet_health(e->fleet, now_us(), out);
    out->n_workers = fleet_world(e->fleet);
    out->restarts = fleet_restarts(e->fleet);
    out->reclaim_seconds = fleet_reclaim_seconds(e->fleet, &out->reclaims);
    fleet_workers(e->fleet, out->workers, now_us());
}
