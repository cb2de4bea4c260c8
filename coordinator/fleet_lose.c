/* coordinator/fleet_lose.c: ranks given up, the group they leave behind, and their successors.
 *
 * Owns: nothing.  Called by: fleet.c from its tick, and whoever finds a rank at fault.
 * Fails how: too many restarts end the fleet (EXIT_FAILED), a program that cannot be started too.
 * Limits: restarts_max within restart_window_s; DELAY_CAP.
 * Tested by: tests/unit/test_engine.c, tests/faults/test_rank_restart.py
 *
 * Every loss goes the same way, whatever was lost and wherever: one log line that names rank, step
 * and cause; kill -9 for that rank alone; ABORT for those who share a communicator with it. Whether
 * the group is loading, joining, restoring or stepping makes no difference: a survivor that has
 * answered ABORTED is out of the group, has let go of the dead rank's memory, and waits; one that
 * is still loading goes on with it. Deaths meanwhile add to the list of the lost and start the wait
 * anew. So there is one way back, however many die and whenever they do.
 *
 * A step that takes too long names nobody: all ranks of a collective are silent when one is stuck.
 * So the group is aborted first, and who does not leave the step is the one. If all leave it, it
 * was only slow: they join again, nobody is killed, and the next step may take twice as long.
 */
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "coordinator/fleet_state.h"
#include "proto/log.h"

/* ---- losing ---------------------------------------------------------------------------------- */

bool fleet_any_open(const struct fleet *f) {
    for (int r = 0; r < f->world; r++)
        if (f->w[r].child.open) return true;
    return false;
}

void fleet_kill_all(struct fleet *f) {
    for (int r = 0; r < f->world; r++) {
        child_kill(&f->w[r].child);
        if (f->w[r].child.open) f->w[r].state = WORKER_DEAD;
    }
}

/* Everything said under the present generation is void. Its memory stays until all have left it: a
 * JOIN may still be on its way. */
static void retire(struct fleet *f) {
    f->broken |= f->n_flight > 0 || f->state == FLEET_READY;
    f->n_flight = 0;
    f->want_restore = false;
    if (f->canary != FLEET_CANARY_FAILED) f->canary = FLEET_CANARY_NONE;
    progress_end(&f->progress);
}

static void abort_survivors(struct fleet *f, uint64_t now_us) {
    struct msg m = {.type = MSG_ABORT, .abort = {.generation = f->generation}};
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (w->lost || !w->in_group || w->abort_us) continue;
        w->abort_us = now_us;
        (void)wire_send(f->wire, fleet_peer(w, 'c'), &m); /* unheard, it is found stuck */
    }
}

void fleet_break(struct fleet *f, uint64_t abort_bound_us, uint64_t now_us) {
    if (f->recovery.died_us == 0) f->recovery.died_us = f->recovery.lost_us = now_us;
    if (f->n_flight) f->recovery.step = fleet_oldest_step(f);
    f->abort_bound_us = MAX(abort_bound_us, ABORT_LEAST_US);
    retire(f);
    abort_survivors(f, now_us);
    fleet_enter(f, FLEET_CLEARING, now_us);
}

void fleet_fatal(struct fleet *f, int code, uint64_t now_us, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->why, sizeof f->why, fmt, ap);
    va_end(ap);
    retire(f);
    f->exit_code = code;
    log_error("fleet_failed", "exit=%d why=\"%s\"", code, f->why);
    fleet_kill_all(f);
    fleet_enter(f, FLEET_FAILED, now_us);
}

/* Since when it may have been dead, as far as can be told. */
static uint64_t died_at(const struct fleet *f, const struct worker *w, uint64_t now_us) {
    if (w->cause == CAUSE_SILENT && w->hello) return w->heard_us;
    if (w->cause == CAUSE_STUCK && f->recovery.died_us) return f->recovery.died_us;
    return now_us;
}

/* How long those who are not to blame may take to hear of it: what they are at has to end first. */
static uint64_t abort_bound(const struct fleet *f) {
    if (f->state == FLEET_CLEARING) return f->abort_bound_us;
    if (f->state == FLEET_JOINING || f->state == FLEET_RESTORING) return JOIN_ABORT_US;
    return f->n_flight ? fleet_step_bound_us(f, f->flight[f->flight_head].work) : SECOND_US;
}

void fleet_lose(struct fleet *f, struct worker *w, enum engine_cause cause, uint64_t now_us,
                const char *fmt, ...) {
    static const char *const whiles[] = {"waiting",   "loading", "joining", "canary",
                                         "restoring", "idle",    "clearing"};
    if (fleet_over(f) || w->lost) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->last_error, sizeof w->last_error, fmt, ap);
    va_end(ap);
    uint64_t step = f->n_flight ? fleet_oldest_step(f) : f->recovery.step;
    log_event(cause == CAUSE_ASKED ? LOG_INFO : LOG_ERROR, "died",
              "rank=%d pid=%" PRId64 " cause=%s step=%" PRIu64 " while=%s incarnation=%u"
              " last_step=%" PRIu64 " why=\"%s\"",
              w->rank, w->child.pid, engine_cause_name(cause), step,
              step ? "stepping" : whiles[f->state], w->incarnation, w->last_step, w->last_error);
    snprintf(f->why, sizeof f->why, "rank %d was lost (%.200s), restarting", w->rank,
             w->last_error);
    w->lost = true;
    w->cause = cause;
    w->lost_us = now_us;
    w->state = WORKER_DEAD;
    w->caches = w->in_group = false;
    w->abort_us = 0;
    child_kill(&w->child);
    if (f->recovery.died_us == 0) {
        f->recovery.died_us = died_at(f, w, now_us);
        f->recovery.lost_us = now_us;
    }
    f->recovery.ranks |= 1u << w->rank;
    fleet_break(f, abort_bound(f), now_us);
}

void fleet_fail(struct fleet *f, int rank, const char *cause, uint64_t now_us) {
    fleet_lose(f, &f->w[rank], CAUSE_NONSENSE, now_us, "%s", cause);
}

void fleet_restart(struct fleet *f, int rank, uint64_t now_us) {
    fleet_lose(f, &f->w[rank], CAUSE_ASKED, now_us, "asked to restart");
}

/* ---- finding them ---------------------------------------------------------------------------- */

/* Set-up errors and lost devices are what a worker says by itself, not what our SIGKILL makes. A
 * set-up that has worked does not become wrong: memory or descriptors were short for a moment, or a
 * disk was away, and trying again may help. */
static bool is_final(const struct worker *w) {
    bool said = !w->child.killed && !w->child.signal;
    return said && ((w->child.exit_status == EXIT_SETUP && !w->worked) ||
                    w->child.exit_status == EXIT_DEVICE);
}

static void see_exit(struct fleet *f, struct worker *w, uint64_t now_us) {
    char ending[64];
    if (w->exit_seen_us == 0) w->exit_seen_us = now_us;
    bool spoke = w->child.signal || w->child.exit_status == 0 || w->failed.text[0];
    if (!spoke && !w->child.killed && now_us - w->exit_seen_us < LAST_WORDS_US) return;
    w->ended = true;
    w->state = WORKER_DEAD;
    child_ending(&w->child, ending, sizeof ending);
    if (fleet_over(f)) return;
    if (is_final(w))
        fleet_fatal(f, (int)w->child.exit_status, now_us, "rank %d: %.200s", w->rank,
                    w->failed.text[0] ? w->failed.text : ending);
    else
        fleet_lose(f, w, w->failed.text[0] ? CAUSE_FAILED : CAUSE_EXIT, now_us, "%s%s%.180s",
                   ending, w->failed.text[0] ? ": " : "", w->failed.text);
}

void fleet_see_exits(struct fleet *f, uint64_t now_us) {
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (w->child.exited && !w->ended) see_exit(f, w, now_us);
    }
}

void fleet_check_silence(struct fleet *f, uint64_t now_us) {
    uint64_t bound = (uint64_t)f->o.beat_timeout_ms * 1000;
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (w->lost || w->child.exited) continue; /* see_exit has the better story */
        uint64_t mute_us = w->hello ? 0 : now_us - w->spawned_us;
        if (mute_us > HELLO_BOUND_US || (mute_us > bound && child_is_stopped(&w->child)))
            fleet_lose(f, w, CAUSE_SILENT, now_us, "no HELLO within %.1f s", (double)mute_us / 1e6);
        else if (w->deaf_us && now_us - w->deaf_us > LAST_WORDS_US)
            fleet_lose(f, w, CAUSE_EXIT, now_us, "its step socket is closed");
        else if (w->failed_us && now_us - w->failed_us > FAILED_BOUND_US)
            fleet_lose(f, w, CAUSE_FAILED, now_us, "%.200s", w->failed.text);
        else if (w->hello && now_us - w->heard_us > bound)
            fleet_lose(f, w, CAUSE_SILENT, now_us, "no heartbeat for %.1f s",
                       (double)(now_us - w->heard_us) / 1e6);
    }
}

/* ---- their successors ------------------------------------------------------------------------ */

static int restarts_within(const struct fleet *f, uint64_t now_us) {
    uint64_t window = (uint64_t)f->o.restart_window_s * SECOND_US;
    int n = 0;
    for (uint64_t i = 0; i < MIN(f->failures, (uint64_t)f->o.restarts_max + 1); i++)
        n += now_us - f->restart_us[i] <= window;
    return n;
}

uint64_t fleet_restart_delay_us(const struct fleet *f, struct worker *w) {
    if (w->cause == CAUSE_ASKED) return 0;
    if (w->ready_us && w->lost_us - w->ready_us >= HEALTHY_US) w->streak = 0;
    uint64_t first = (uint64_t)f->o.restart_delay_ms * 1000, delay = w->streak ? first : 0;
    for (int i = 1; i < w->streak && delay < DELAY_CAP * first; i++) delay *= 2;
    w->streak++;
    return MIN(delay, DELAY_CAP * first);
}

/* Ranks that die one after the other while a restart is put off, or waits for memory, are one
 * failure and share that restart. What an operator asked for is none. */
static void count_restart(struct fleet *f, uint64_t now_us) {
    int lost = 0, asked = 0, planned = 0, counted = 0;
    for (int r = 0; r < f->world; r++) {
        const struct worker *w = &f->w[r];
        if (!w->lost) continue;
        lost++;
        asked += w->cause == CAUSE_ASKED;
        planned += w->planned;
        counted += w->planned && w->cause != CAUSE_ASKED;
    }
    f->restarts += planned == 0;
    if (counted || (lost > 0 && lost == asked)) return;
    f->restart_us[f->failures++ % ((uint64_t)f->o.restarts_max + 1)] = now_us;
}

/* The dead are gone and the others out of the group: says when the newborn may come, or gives up.
 */
static void plan_restart(struct fleet *f, uint64_t now_us) {
    uint64_t delay = 0;
    int lost = 0, planned = 0;
    if (f->shm_fd >= 0) close(f->shm_fd);
    f->shm_fd = -1;
    count_restart(f, now_us);
    int n = restarts_within(f, now_us);
    if (n > f->o.restarts_max) {
        char last[200];
        snprintf(last, sizeof last, "%.199s", f->why);
        fleet_fatal(f, EXIT_FAILED, now_us, "%d restarts within %d s; %.180s", n,
                    f->o.restart_window_s, last);
        return;
    }
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (!w->lost) continue;
        lost++;
        planned += w->planned;
        if (w->planned) continue;
        uint64_t own = fleet_restart_delay_us(f, w);
        delay = MAX(delay, own);
        w->planned = true;
    }
    if (lost == 0) {
        f->stalls++;
        log_warn("slow_step", "in_a_row=%d: all ranks left it when asked to", f->stalls);
    }
    f->due_us = MAX(planned ? f->due_us : now_us, now_us + delay);
    delay = f->due_us - now_us;
    log_info("restarting", "ranks=%d of=%d restarts=%" PRIu64 " in_window=%d delay_ms=%" PRIu64,
             lost, f->world, f->restarts, n, delay / 1000);
    if (lost) fleet_gate_begin(f, now_us);
    fleet_enter(f, FLEET_WAITING, now_us);
}

void fleet_check_clear(struct fleet *f, uint64_t now_us) {
    bool clear = true;
    for (int r = 0; r < f->world; r++) {
        struct worker *w = &f->w[r];
        if (w->lost)
            clear &= w->ended && !w->child.open;
        else if (w->abort_us && now_us - w->abort_us > f->abort_bound_us) {
            fleet_lose(f, w, CAUSE_STUCK, now_us, "it did not leave its step within %.1f s",
                       (double)(now_us - w->abort_us) / 1e6);
            return;
        } else
            clear &= !w->abort_us;
    }
    if (clear) plan_restart(f, now_us);
}

static int spawn(struct fleet *f, struct worker *w, uint64_t now_us, struct err_text *err) {
    struct worker old = *w;
    assert(!w->child.open);
    *w = (struct worker){.rank = old.rank,
                         .incarnation = old.incarnation + 1,
                         .restarts = old.restarts + (old.incarnation > 0),
                         .streak = old.streak,
                         .worked = old.worked,
                         .spawned_us = now_us,
                         .heard_us = now_us};
    memcpy(w->restarts_by, old.restarts_by, sizeof w->restarts_by);
    if (old.incarnation > 0) w->restarts_by[old.cause]++;
    memcpy(w->last_error, old.last_error, sizeof w->last_error);
    TRY(launch_argv(&f->launch, &f->o, w->rank, w->incarnation));
    TRY(child_spawn(&w->child, f->loop, f->launch.argv, f->launch.env, err));
    log_debug("spawned", "rank=%d pid=%" PRId64 " incarnation=%u", w->rank, w->child.pid,
              w->incarnation);
    return OK;
}

void fleet_spawn_lost(struct fleet *f, uint64_t now_us) {
    fleet_enter(f, FLEET_LOADING, now_us);
    f->recovery.spawned_us = now_us;
    for (int r = 0; r < f->world; r++) {
        struct err_text err = {0};
        if (!f->w[r].lost || spawn(f, &f->w[r], now_us, &err) == OK) continue;
        f->w[r].ended = true;
        if (!f->w[r].worked) {
            fleet_fatal(f, EXIT_SETUP, now_us, "rank %d: %.200s", r, err.text);
            return;
        }
        fleet_lose(f, &f->w[r], CAUSE_FAILED, now_us, "%.200s", err.text);
    }
}
