/* coordinator/fleet.c: the worker processes as one thing that can take a step. See fleet.h.
 *
 * Owns: processes, ROUTER socket, shared memory of the present generation.
 * Called by: engine.c on the loop thread.  Fails how: see fleet.h.
 * Limits: LIMIT_RANKS.
 * Tested by: tests/unit/test_fleet.c, tests/faults
 *
 * Callbacks of libuv take notes (a child exited) or do nothing but wake the loop (the socket, the
 * timer); every decision is taken in fleet_tick. ZeroMQ's descriptor tells a change of state and
 * not that there is something to read, so the tick reads until nothing is left, and after sending
 * too; whoever sends afterwards asks fleet_pending before the loop may sleep.
 *
 * How a rank is lost and replaced: fleet_lose.c.
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
    f->state_us = f->moved_us = now_us;
}

static void on_readable(uv_poll_t *p, int status, int events) {
    UNUSED(p), UNUSED(status), UNUSED(events); /* woken: the tick reads */
}

int fleet_start(struct fleet **out, uv_loop_t *loop, const struct engine_options *o,
                uint64_t now_us, struct err_text *err) {
    assert(o->tp >= 1 && o->tp <= LIMIT_RANKS);
    struct fleet *f = calloc(1, sizeof *f);
    int rc = ERR_SETUP;
    if (!f) return err_set(err, ERR_NOMEM, "out of memory");
    f->o = *o;
    f->loop = loop;
    f->world = o->tp;
    f->shm_fd = -1;
    f->tick_us = now_us;
    f->progress.bar = o->progress_bar;
    f->in = malloc(sizeof *f->in);
    f->restart_us = calloc((size_t)o->restarts_max + 1, sizeof *f->restart_us);
    if (access(o->worker_path, X_OK) < 0) {
        err_set(err, ERR_SETUP, "%.300s: expected the worker's program, found: %s", o->worker_path,
                strerror(errno));
        goto fail;
    }
    if (!f->in || !f->restart_us || launch_init(&f->launch) < 0) {
        err_set(err, ERR_SETUP, "fleet: expected memory, randomness and a core, found: %s",
                strerror(errno));
        goto fail;
    }
    rc = fleet_gate_open(f, err);
    if (rc < 0) goto fail;
    rc = ERR_SETUP;
    if (wire_bind(&f->wire, f->launch.endpoint, err) < 0) goto fail;
    uv_poll_init(loop, &f->poll, wire_fd(f->wire));
    f->poll.data = f;
    uv_poll_start(&f->poll, UV_READABLE, on_readable);
    for (int r = 0; r < f->world; r++)
        f->w[r] = (struct worker){.rank = r, .lost = true, .ended = true}; /* to be started */
    f->root = -1;
    snprintf(f->why, sizeof f->why, "loading the model");
    f->state_us = f->due_us = now_us; /* WAITING, should the memory of others be on its way back */
    if (fleet_gate_begin_start(f, now_us)) fleet_spawn_lost(f, now_us);
    *out = f;
    return OK;
fail:
    fleet_gate_close(f);
    launch_deinit(&f->launch);
    free(f->in);
    free(f->restart_us);
    free(f);
    return rc;
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
    free(f->restart_us);
    free(f);
    closed(user);
}

void fleet_close(struct fleet *f, void (*closed)(void *user), void *user) {
    assert(f->state == FLEET_STOPPED);
    f->closed = closed;
    f->closed_user = user;
    uv_close((uv_handle_t *)&f->poll, on_poll_closed);
}

/* ---- the tick -------------------------------------------------------------------------------- */

static void check_load(struct fleet *f, uint64_t now_us) {
    uint64_t bytes = 0, total = 0, told = 0;
    bool all = true;
    if (now_us - f->state_us > (uint64_t)f->o.load_timeout_s * SECOND_US) {
        for (int r = 0; r < f->world; r++)
            if (!f->w[r].loaded)
                fleet_lose(f, &f->w[r], CAUSE_SILENT, now_us, "not loaded within %d s",
                           f->o.load_timeout_s);
        return;
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

/* We were the ones asleep: nobody else is late for it. */
static void forgive(struct fleet *f, uint64_t gap_us, uint64_t now_us) {
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        w->heard_us = now_us;
        w->spawned_us += gap_us;
        if (w->abort_us) w->abort_us += gap_us;
        if (w->failed_us) w->failed_us += gap_us;
        if (w->deaf_us) w->deaf_us += gap_us;
    }
    for (int i = 0; i < f->n_flight; i++)
        f->flight[(f->flight_head + i) % SCHED_DEPTH_MAX].due_us += gap_us;
}

/* What is due in this state. A loss on the way changes the state, and then it is not due any more.
 */
static void turn(struct fleet *f, uint64_t now_us) {
    switch (f->state) {
    case FLEET_LOADING:
        check_load(f, now_us);
        break;
    case FLEET_JOINING:
        fleet_check_join(f, now_us);
        break;
    case FLEET_CANARY:
        fleet_check_canary(f, now_us);
        break;
    case FLEET_RESTORING:
        fleet_check_restore(f, now_us);
        break;
    case FLEET_READY:
        fleet_check_step(f, now_us);
        break;
    case FLEET_CLEARING:
        fleet_check_clear(f, now_us);
        break;
    case FLEET_WAITING:
        if (fleet_gate_passed(f, now_us) && now_us >= f->due_us) fleet_spawn_lost(f, now_us);
        break;
    case FLEET_STOPPING:
        if (now_us >= f->due_us) fleet_kill_all(f);
        /* fall through */
    case FLEET_FAILED:
        if (!fleet_any_open(f)) fleet_enter(f, FLEET_STOPPED, now_us);
        break;
    case FLEET_STOPPED:
        break;
    }
}

void fleet_tick(struct fleet *f, uint64_t now_us) {
    uint64_t gap = now_us - f->tick_us;
    if (gap > ASLEEP_US) forgive(f, gap, now_us);
    f->tick_us = now_us;
    fleet_hear_all(f, now_us);
    fleet_see_exits(f, now_us);
    if (f->state >= FLEET_LOADING && f->state <= FLEET_READY) fleet_gate_watch(f, now_us);
    if (!fleet_over(f)) fleet_check_silence(f, now_us);
    enum fleet_state before;
    do { /* what needs no waiting is not waited for */
        before = f->state;
        turn(f, now_us);
    } while (f->state != before);
}

bool fleet_take_broken(struct fleet *f) {
    bool broken = f->broken;
    f->broken = false;
    return broken;
}

bool fleet_take_lost(struct fleet *f) {
    bool lost = f->lost;
    f->lost = false;
    return lost;
}

/* ---- what all ranks are told ------------------------------------------------------------------
 */

void fleet_send_all(struct fleet *f, const struct msg *m, uint64_t now_us) {
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        int rc = wire_send(f->wire, fleet_peer(w, 's'), m);
        if (rc == ERR_CLOSED) { /* most likely dead: its exit will tell more */
            if (!w->deaf_us) w->deaf_us = now_us;
        } else if (rc < 0) {
            fleet_lose(f, w, CAUSE_STUCK, now_us, "a message could not be sent: %s", err_name(rc));
            return;
        }
        if (m->type == MSG_STEP) w->state = WORKER_STEPPING;
    }
}

/* token path 5/9: the same step goes to every rank, each on its own step socket. */
void fleet_send(struct fleet *f, struct msg *m, uint64_t now_us) {
    if (f->state != FLEET_READY) return;
    if (m->type == MSG_STEP) {
        m->step.generation = f->generation;
        fleet_note_step(f, &m->step, now_us);
    }
    if (m->type == MSG_RESTORE) m->restore.generation = f->generation;
    fleet_send_all(f, m, now_us);
}

bool fleet_wants_restore(const struct fleet *f) {
    return f->want_restore;
}

void fleet_restore(struct fleet *f, struct msg *m, uint64_t now_us) {
    if (f->state != FLEET_RESTORING) return;
    if (m->type == MSG_COPY) {
        if (f->needs == 0) return;
        m->copy.id = ++f->copies;
        m->copy.generation = f->generation;
        m->copy.root = f->root;
        m->copy.needs = f->needs;
        for (int i = 0; i < m->copy.n_runs; i++) f->recovery.pages += m->copy.runs[i].count;
    }
    if (m->type == MSG_RESTORE) m->restore.generation = f->generation;
    fleet_send_all(f, m, now_us);
}

void fleet_restore_end(struct fleet *f, uint64_t now_us) {
    UNUSED(now_us);
    f->want_restore = false;
}

/* ---- stopping -------------------------------------------------------------------------------- */

void fleet_stop(struct fleet *f, uint64_t now_us) {
    if (f->state == FLEET_STOPPING || f->state == FLEET_FAILED || f->state == FLEET_STOPPED) return;
    f->n_flight = 0;
    f->broken = true;
    f->want_restore = false;
    f->canary = FLEET_CANARY_NONE;
    progress_end(&f->progress);
    struct msg *m = f->in;
    f->has_pending = false;
    m->type = MSG_STOP;
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (!w->child.open) continue;
        w->state = WORKER_DRAINING;
        if (w->lost || !w->hello || wire_send(f->wire, fleet_peer(w, 'c'), m) < 0)
            child_kill(&w->child);
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

static const char *phase(const struct fleet *f, uint64_t now_us) {
    static const char *const names[] = {"waiting", "loading",  "joining",  "canary", "copying",
                                        "ready",   "clearing", "stopping", "failed", "stopped"};
    for (int r = 0; r < f->world; r++)
        if (f->state == FLEET_JOINING && f->w[r].state == WORKER_CAPTURING) return "capturing";
    if (f->state != FLEET_WAITING) return names[f->state];
    if (f->gate.verdict == RECLAIM_WAITING) return "reclaiming";
    return now_us < f->due_us ? "back_off" : names[f->state];
}

bool fleet_recovers(const struct fleet *f) {
    return f->recovery.died_us != 0;
}

void fleet_health(const struct fleet *f, uint64_t now_us, struct engine_status *out) {
    static const char *const canaries[] = {"none", "asked", "asked", "ok", "failed"};
    out->phase = phase(f, now_us);
    out->canary = canaries[f->canary];
    out->canary_us = f->canary_us;
    out->canary_token = f->canary_token;
    for (int r = 0; r < f->world; r++) {
        out->load_bytes += f->w[r].load_bytes;
        out->load_total += f->w[r].load_total;
    }
    if (f->state == FLEET_LOADING || f->state == FLEET_JOINING)
        out->load_quiet_us = now_us - f->moved_us;
    out->load_bound_us = 1000 * (uint64_t)(f->o.load_stall_ms ? f->o.load_stall_ms : LOAD_STALL_MS);
    fleet_step_health(f, now_us, out);
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
        memcpy(o->restarts_by, w->restarts_by, sizeof o->restarts_by);
        memcpy(o->device, w->device, sizeof o->device);
        memcpy(o->last_error, w->last_error, sizeof o->last_error);
    }
}

void fleet_print(FILE *out, const struct fleet *f) {
    static const char *const names[] = {"waiting", "loading",  "joining",  "canary", "restoring",
                                        "ready",   "clearing", "stopping", "failed", "stopped"};
    fprintf(out,
            "fleet state=%s generation=%u in_flight=%d oldest=%" PRIu64 " restarts=%" PRIu64 "\n",
            names[f->state], f->generation, f->n_flight, fleet_oldest_step(f), f->restarts);
    for (int r = 0; r < f->world; r++)
        fprintf(out,
                "  rank=%d pid=%" PRId64 " incarnation=%u state=%s lost=%d answered=%" PRIu64 "\n",
                r, f->w[r].child.pid, f->w[r].incarnation, worker_state_name(f->w[r].state),
                f->w[r].lost, f->w[r].answered);
}
