/* coordinator/fleet.c: the worker processes as one thing that can take a step. See fleet.h.
 *
 * Owns: processes, ROUTER socket, shared memory of the present generation.
 * Called by: engine.c on the loop thread.  Fails how: see fleet.h.
 * Limits: LIMIT_RANKS, SCHED_DEPTH_MAX steps in flight.
 * Tested by: tests/unit/test_fleet.c, tests/faults
 *
 * Callbacks of libuv take notes (a child exited) or do nothing but wake the loop (the socket, the
 * timer); every decision is taken in fleet_tick. ZeroMQ's descriptor tells a change of state and
 * not that there is something to read, so the tick reads until nothing is left, and after sending
 * too; whoever sends afterwards asks fleet_pending before the loop may sleep.
 *
 * Every loss goes the same way, whatever was lost and wherever: one log line that names rank, step
 * and cause; kill -9 the rest; see every exit; wait until the device has its memory back; start all
 * again under a new incarnation, so that nothing said to or by the dead is heard by the newborn. A
 * rank that is only slow cannot be told from one that is stuck, and a group with one rank missing
 * cannot finish a step, so there is no half-way state to get wrong. A worker that says its set-up
 * is wrong (exit code 2) would say so again: that ends the fleet.
 *
 * When the coordinator itself did not run for a while (a stopped process, a sleeping laptop),
 * silence is not the workers' fault: the clock of each starts anew.
 */
#include "coordinator/fleet.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "coordinator/fleet_state.h"
#include "proto/log.h"

/* ---- life ------------------------------------------------------------------------------------ */

void fleet_enter(struct fleet *f, enum fleet_state state, uint64_t now_us) {
    f->state = state;
    f->state_us = now_us;
}

static void on_readable(uv_poll_t *p, int status, int events) {
    UNUSED(p), UNUSED(status), UNUSED(events); /* woken: the tick reads */
}

static void spawn_all(struct fleet *f, uint64_t now_us);

int fleet_start(struct fleet **out, uv_loop_t *loop, const struct engine_options *o,
                uint64_t now_us, struct err_text *err) {
    assert(o->tp >= 1 && o->tp <= LIMIT_RANKS);
    struct fleet *f = calloc(1, sizeof *f);
    if (!f) return err_set(err, ERR_NOMEM, "out of memory");
    f->o = *o;
    f->loop = loop;
    f->world = o->tp;
    f->shm_fd = -1;
    f->tick_us = now_us;
    f->progress.bar = o->progress_bar;
    f->in = malloc(sizeof *f->in);
    if (access(o->worker_path, X_OK) < 0) {
        err_set(err, ERR_SETUP, "%.300s: expected the worker's program, found: %s", o->worker_path,
                strerror(errno));
        goto fail;
    }
    if (!f->in || launch_init(&f->launch) < 0) {
        err_set(err, ERR_SETUP, "fleet: expected memory, randomness and a core, found: %s",
                strerror(errno));
        goto fail;
    }
    if (fleet_gate_open(f, err) < 0) goto fail;
    if (wire_bind(&f->wire, f->launch.endpoint, err) < 0) goto fail;
    uv_poll_init(loop, &f->poll, wire_fd(f->wire));
    f->poll.data = f;
    uv_poll_start(&f->poll, UV_READABLE, on_readable);
    for (int r = 0; r < f->world; r++) f->w[r].rank = r;
    snprintf(f->why, sizeof f->why, "loading the model");
    f->state_us = f->due_us = now_us; /* WAITING, should the memory of others be on its way back */
    if (fleet_gate_begin_start(f, now_us)) spawn_all(f, now_us);
    *out = f;
    return OK;
fail:
    fleet_gate_close(f);
    launch_deinit(&f->launch);
    free(f->in);
    free(f);
    return ERR_SETUP;
}

static void on_poll_closed(uv_handle_t *h) {
    struct fleet *f = h->data;
    void (*closed)(void *) = f->closed;
    void *user = f->closed_user;
    wire_close(f->wire);
    fleet_gate_close(f);
    launch_deinit(&f->launch);
    if (f->shm_fd >= 0) close(f->shm_fd);
    free(f->in);
    free(f);
    closed(user);
}

void fleet_close(struct fleet *f, void (*closed)(void *user), void *user) {
    assert(f->state == FLEET_STOPPED);
    f->closed = closed;
    f->closed_user = user;
    uv_close((uv_handle_t *)&f->poll, on_poll_closed);
}

/* ---- losing ---------------------------------------------------------------------------------- */

static bool any_open(const struct fleet *f) {
    for (int r = 0; r < f->world; r++)
        if (f->w[r].child.open) return true;
    return false;
}

static bool all_ended(const struct fleet *f) {
    for (int r = 0; r < f->world; r++)
        if (!f->w[r].ended) return false;
    return !any_open(f);
}

static void kill_all(struct fleet *f) {
    for (int r = 0; r < f->world; r++) {
        child_kill(&f->w[r].child);
        if (f->w[r].child.open) f->w[r].state = WORKER_DEAD;
    }
}

/* The communicator generation and everything said under it are over. */
static void retire(struct fleet *f) {
    if (f->shm_fd >= 0) close(f->shm_fd);
    f->shm_fd = -1;
    f->n_flight = 0;
    f->lost = true;
    progress_end(&f->progress);
}

void fleet_fatal(struct fleet *f, int code, uint64_t now_us, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->why, sizeof f->why, fmt, ap);
    va_end(ap);
    retire(f);
    f->exit_code = code;
    log_error("fleet_failed", "exit=%d why=\"%s\"", code, f->why);
    kill_all(f);
    fleet_enter(f, FLEET_FAILED, now_us);
}

static bool settled(const struct fleet *f) { /* nothing more can be lost */
    return f->state == FLEET_CLEARING || f->state == FLEET_WAITING || f->state == FLEET_STOPPING ||
           f->state == FLEET_FAILED || f->state == FLEET_STOPPED;
}

static uint64_t oldest_step(const struct fleet *f) {
    return f->n_flight ? f->flight[f->flight_head].id : 0;
}

/* The one way down: says it once, and takes the whole group with it. */
void fleet_lose(struct fleet *f, struct worker *w, uint64_t now_us, const char *fmt, ...) {
    if (settled(f)) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->last_error, sizeof w->last_error, fmt, ap);
    va_end(ap);
    uint64_t step = oldest_step(f);
    bool loading = f->state == FLEET_LOADING || f->state == FLEET_JOINING;
    retire(f);
    log_error("worker_lost",
              "rank=%d pid=%" PRId64 " incarnation=%u step=%" PRIu64 " while=%s"
              " cause=\"%s\"",
              w->rank, w->child.pid, f->incarnation, step,
              loading ? "loading"
              : step  ? "stepping"
                      : "idle",
              w->last_error);
    snprintf(f->why, sizeof f->why, "rank %d was lost (%.200s), restarting", w->rank,
             w->last_error);
    w->state = WORKER_DEAD;
    kill_all(f);
    fleet_enter(f, FLEET_CLEARING, now_us);
}

void fleet_fail(struct fleet *f, int rank, const char *cause, uint64_t now_us) {
    fleet_lose(f, &f->w[rank], now_us, "%s", cause);
}

bool fleet_take_lost(struct fleet *f) {
    bool lost = f->lost;
    f->lost = false;
    return lost;
}

/* ---- exits ----------------------------------------------------------------------------------- */

/* Set-up errors and lost devices are what a worker says by itself, not what our SIGKILL makes. */
static bool is_final(const struct worker *w) {
    return !w->child.killed && !w->child.signal &&
           (w->child.exit_status == EXIT_SETUP || w->child.exit_status == EXIT_DEVICE);
}

static void see_exit(struct fleet *f, struct worker *w, uint64_t now_us) {
    char ending[64];
    if (w->exit_seen_us == 0) w->exit_seen_us = now_us;
    bool spoke = w->child.signal || w->child.exit_status == 0 || w->failed.text[0];
    if (!spoke && !w->child.killed && now_us - w->exit_seen_us < LAST_WORDS_US) return;
    w->ended = true;
    w->state = WORKER_DEAD;
    child_ending(&w->child, ending, sizeof ending);
    if (f->state == FLEET_STOPPING || f->state == FLEET_FAILED) return;
    if (is_final(w))
        fleet_fatal(f, (int)w->child.exit_status, now_us, "rank %d: %.200s", w->rank,
                    w->failed.text[0] ? w->failed.text : ending);
    else
        fleet_lose(f, w, now_us, "%s%s%.180s", ending, w->failed.text[0] ? ": " : "",
                   w->failed.text);
}

static void see_exits(struct fleet *f, uint64_t now_us) {
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (w->child.exited && !w->ended) see_exit(f, w, now_us);
    }
}

/* ---- starting -------------------------------------------------------------------------------- */

static void spawn_all(struct fleet *f, uint64_t now_us) {
    struct err_text err = {0};
    f->incarnation++;
    fleet_enter(f, FLEET_LOADING, now_us);
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        struct child *c = &w->child;
        int restarts = w->restarts + (f->incarnation > 1);
        char last_error[sizeof w->last_error];
        assert(!c->open);
        memcpy(last_error, w->last_error, sizeof last_error);
        *w = (struct worker){.rank = r, .restarts = restarts};
        memcpy(w->last_error, last_error, sizeof last_error);
        w->spawned_us = w->heard_us = now_us;
        int rc = launch_argv(&f->launch, &f->o, r, f->incarnation);
        if (rc == OK) rc = child_spawn(c, f->loop, f->launch.argv, f->launch.env, &err);
        if (rc < 0) {
            w->ended = true;
            fleet_fatal(f, EXIT_SETUP, now_us, "rank %d: %.200s", r, err.text);
            return;
        }
        log_debug("spawned", "rank=%d pid=%" PRId64 " incarnation=%u", r, c->pid, f->incarnation);
    }
}

static int restarts_within(const struct fleet *f, uint64_t now_us) {
    uint64_t window = (uint64_t)f->o.restart_window_s * SECOND_US;
    int n = 0;
    for (uint64_t i = 0; i < MIN(f->restarts, RESTARTS_KEPT); i++)
        n += now_us - f->restart_us[i] <= window;
    return n;
}

/* Everybody is gone: counts the restart and says when it may begin, or gives up. */
static void plan_restart(struct fleet *f, uint64_t now_us) {
    f->restart_us[f->restarts++ % RESTARTS_KEPT] = now_us;
    int n = restarts_within(f, now_us);
    if (n > f->o.restarts_max) {
        char last[200];
        snprintf(last, sizeof last, "%.199s", f->why);
        fleet_fatal(f, EXIT_FAILED, now_us, "%d restarts within %d s; %.180s", n,
                    f->o.restart_window_s, last);
        return;
    }
    uint64_t delay = (uint64_t)f->o.restart_delay_ms * 1000;
    for (int i = 1; i < n && delay < DELAY_MAX_US; i++) delay *= 2;
    delay = MIN(delay, DELAY_MAX_US);
    f->due_us = now_us + delay;
    log_info("restarting", "ranks=%d restarts=%" PRIu64 " in_window=%d delay_ms=%" PRIu64, f->world,
             f->restarts, n, delay / 1000);
    fleet_gate_begin(f, now_us);
    fleet_enter(f, FLEET_WAITING, now_us);
}

/* ---- the tick -------------------------------------------------------------------------------- */

static void check_silence(struct fleet *f, uint64_t now_us) {
    uint64_t bound = (uint64_t)f->o.beat_timeout_ms * 1000;
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (w->child.exited) continue; /* see_exit has the better story */
        if (!w->hello && now_us - w->spawned_us > HELLO_BOUND_US)
            fleet_lose(f, w, now_us, "no HELLO within %llu s", HELLO_BOUND_US / SECOND_US);
        else if (w->deaf_us && now_us - w->deaf_us > LAST_WORDS_US)
            fleet_lose(f, w, now_us, "its step socket is closed");
        else if (w->failed_us && now_us - w->failed_us > FAILED_BOUND_US)
            fleet_lose(f, w, now_us, "%.200s", w->failed.text);
        else if (w->hello && now_us - w->heard_us > bound)
            fleet_lose(f, w, now_us, "no heartbeat for %.1f s",
                       (double)(now_us - w->heard_us) / 1e6);
    }
}

static void check_load(struct fleet *f, uint64_t now_us) {
    uint64_t bytes = 0, total = 0, told = 0;
    bool all = true;
    if (now_us - f->state_us > (uint64_t)f->o.load_timeout_s * SECOND_US) {
        for (int r = 0; r < f->world; r++)
            if (!f->w[r].loaded) {
                fleet_lose(f, &f->w[r], now_us, "not loaded within %d s", f->o.load_timeout_s);
                return;
            }
    }
    for (int r = 0; r < f->world; r++) {
        bytes += f->w[r].load_bytes;
        total += f->w[r].load_total;
        told += f->w[r].load_total > 0;
        all &= f->w[r].loaded;
    }
    /* shares are about equal: those who have not told theirs are taken for the mean */
    if (told) progress_show(&f->progress, bytes, total / told * (uint64_t)f->world, now_us);
    if (all) fleet_join_all(f, now_us);
}

static uint64_t step_bound_us(const struct fleet *f, int rows) {
    return (uint64_t)f->o.step_timeout_s * SECOND_US * (uint64_t)(ROWS_PER_SPAN + rows) /
           ROWS_PER_SPAN;
}

static void check_step(struct fleet *f, uint64_t now_us) {
    if (!f->n_flight || now_us <= f->flight[f->flight_head].due_us) return;
    const struct flight *s = &f->flight[f->flight_head];
    char silent[4 * LIMIT_RANKS] = "";
    struct worker *first = NULL;
    for (int r = 0, n = 0; r < f->world; r++) {
        if (f->w[r].answered >= s->id) continue;
        if (!first) first = &f->w[r];
        n += snprintf(silent + n, sizeof silent - (size_t)n, "%s%d", n ? "," : "", r);
    }
    if (first)
        fleet_lose(f, first, now_us, "no answer to a step of %d rows within %.1f s from ranks %s",
                   s->rows, (double)step_bound_us(f, s->rows) / 1e6, silent);
}

void fleet_tick(struct fleet *f, uint64_t now_us) {
    if (now_us - f->tick_us > ASLEEP_US)
        for (int r = 0; r < f->world; r++) f->w[r].heard_us = now_us;
    f->tick_us = now_us;
    fleet_hear_all(f, now_us);
    see_exits(f, now_us);
    if (!settled(f)) fleet_gate_watch(f, now_us);
    switch (f->state) {
    case FLEET_LOADING:
        check_silence(f, now_us);
        if (f->state == FLEET_LOADING) check_load(f, now_us);
        break;
    case FLEET_JOINING:
        check_silence(f, now_us);
        if (f->state == FLEET_JOINING) fleet_check_join(f, now_us);
        break;
    case FLEET_READY:
        check_silence(f, now_us);
        if (f->state == FLEET_READY) check_step(f, now_us);
        break;
    case FLEET_CLEARING:
        if (all_ended(f)) plan_restart(f, now_us);
        break;
    case FLEET_WAITING:
        if (fleet_gate_passed(f, now_us) && now_us >= f->due_us) spawn_all(f, now_us);
        break;
    case FLEET_STOPPING:
        if (now_us >= f->due_us) kill_all(f);
        /* fall through */
    case FLEET_FAILED:
        if (!any_open(f)) fleet_enter(f, FLEET_STOPPED, now_us);
        break;
    case FLEET_STOPPED:
        break;
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* token path 5/9: the same step goes to every rank, each on its own step socket. */
void fleet_send(struct fleet *f, struct msg *m, uint64_t now_us) {
    if (f->state != FLEET_READY) return;
    if (m->type == MSG_STEP) {
        assert(f->n_flight < SCHED_DEPTH_MAX);
        struct flight *s = &f->flight[(f->flight_head + f->n_flight) % SCHED_DEPTH_MAX];
        m->step.generation = f->generation;
        s->id = m->step.id;
        s->rows = 0;
        for (int i = 0; i < m->step.n_entries; i++) s->rows += m->step.entries[i].count;
        s->has_tokens = false;
        s->due_us = now_us + step_bound_us(f, s->rows);
        f->n_flight++;
    }
    for (int r = 0; r < f->world; r++) {
        int rc = wire_send(f->wire, (struct wire_peer){r, f->incarnation, 's'}, m);
        if (rc == ERR_CLOSED) { /* most likely dead: its exit will tell more */
            if (!f->w[r].deaf_us) f->w[r].deaf_us = now_us;
        } else if (rc < 0) {
            fleet_lose(f, &f->w[r], now_us, "a message could not be sent: %s", err_name(rc));
            return;
        }
        if (m->type == MSG_STEP) f->w[r].state = WORKER_STEPPING;
    }
}

const struct msg_tokens *fleet_answer(const struct fleet *f) {
    if (f->n_flight == 0) return NULL;
    const struct flight *s = &f->flight[f->flight_head];
    for (int r = 0; r < f->world; r++)
        if (f->w[r].answered < s->id) return NULL;
    return s->has_tokens ? &s->tokens : NULL;
}

void fleet_answer_done(struct fleet *f, uint64_t now_us) {
    if (f->n_flight == 0) return; /* lost meanwhile */
    f->flight_head = (f->flight_head + 1) % SCHED_DEPTH_MAX;
    if (--f->n_flight == 0) return;
    struct flight *next = &f->flight[f->flight_head];
    next->due_us = now_us + step_bound_us(f, next->rows);
}

/* ---- stopping -------------------------------------------------------------------------------- */

void fleet_stop(struct fleet *f, uint64_t now_us) {
    if (f->state == FLEET_STOPPING || f->state == FLEET_FAILED || f->state == FLEET_STOPPED) return;
    retire(f);
    struct msg *m = f->in;
    f->has_pending = false;
    m->type = MSG_STOP;
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (!w->child.open) continue;
        w->state = WORKER_DRAINING;
        struct wire_peer to = {r, f->incarnation, 'c'};
        if (!w->hello || wire_send(f->wire, to, m) < 0) child_kill(&w->child);
    }
    snprintf(f->why, sizeof f->why, "stopping");
    f->due_us = now_us + STOP_BOUND_US;
    fleet_enter(f, FLEET_STOPPING, now_us);
}

/* ---- looking --------------------------------------------------------------------------------- */

enum fleet_state fleet_state(const struct fleet *f) {
    return f->state;
}
const char *fleet_why(const struct fleet *f) {
    return f->why;
}
int fleet_exit_code(const struct fleet *f) {
    return f->exit_code;
}
int64_t fleet_pages(const struct fleet *f) {
    return f->pages;
}
uint64_t fleet_restarts(const struct fleet *f) {
    return f->restarts;
}
int fleet_world(const struct fleet *f) {
    return f->world;
}

double fleet_reclaim_seconds(const struct fleet *f, uint64_t *n) {
    *n = f->reclaims;
    return f->reclaim_seconds;
}

void fleet_workers(const struct fleet *f, struct engine_worker *out, uint64_t now_us) {
    for (int r = 0; r < f->world; r++) {
        const struct worker *w = &f->w[r];
        struct engine_worker *o = &out[r];
        *o = (struct engine_worker){.rank = r,
                                    .pid = w->child.pid,
                                    .start_time = w->child.start_time,
                                    .state = w->state,
                                    .last_step = w->last_step,
                                    .age_us = w->last_step ? now_us - w->last_step_us : UINT64_MAX,
                                    .load_bytes = w->load_bytes,
                                    .load_total = w->load_total,
                                    .memory_used_bytes = w->beat.memory_used_bytes,
                                    .memory_free_bytes = w->beat.memory_free_bytes,
                                    .restarts = w->restarts};
        memcpy(o->device, w->device, sizeof o->device);
        memcpy(o->last_error, w->last_error, sizeof o->last_error);
    }
}

void fleet_print(FILE *out, const struct fleet *f) {
    static const char *const names[] = {"waiting",  "loading",  "joining", "ready",
                                        "clearing", "stopping", "failed",  "stopped"};
    fprintf(out,
            "fleet state=%s incarnation=%u generation=%u in_flight=%d oldest=%" PRIu64
            " restarts=%" PRIu64 "\n",
            names[f->state], f->incarnation, f->generation, f->n_flight, oldest_step(f),
            f->restarts);
    for (int r = 0; r < f->world; r++)
        fprintf(out, "  rank=%d pid=%" PRId64 " state=%s answered=%" PRIu64 "\n", r,
                f->w[r].child.pid, worker_state_name(f->w[r].state), f->w[r].answered);
}
