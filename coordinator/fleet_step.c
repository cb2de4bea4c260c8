/* coordinator/fleet_step.c: steps in flight, their answers, and how long a step may take.
 *
 * Owns: the records of steps in flight.  Called by: engine.c through fleet.h; fleet.c.
 * Fails how: a step that is late breaks the group.  Limits: SCHED_DEPTH_MAX steps in flight.
 * Tested by: tests/unit/test_engine.c, tests/faults/test_rank_restart.py
 *
 * How long a step may take. A frozen process is found by its silence; what is left for the deadline
 * is a rank that beats and does not get on. It must be found within seconds where steps take
 * milliseconds, and a prompt of a hundred thousand tokens must never be taken for it. So
 *
 *     bound = step_timeout + MARGIN * work * (measured time per work)
 *     work  = the sum over rows of 1 + position / WORK_SPAN
 *
 * The rate follows rises at once and falls slowly. A step of few rows costs more per row than a
 * large one, so what decoding measures is generous to the prompts that follow. Before anything is
 * measured a minute and a second for each row are allowed.
 */
#include <inttypes.h>
#include <string.h>

#include "coordinator/fleet_state.h"
#include "proto/log.h"

#define MARGIN        8
#define WORK_SPAN     4096.0 /* so many positions behind it double what a row costs */
#define UNMEASURED_US (60 * SECOND_US)
#define STALLS_DOUBLE 6 /* after so many the bound doubles no more */

uint64_t fleet_oldest_step(const struct fleet *f) {
    return f->n_flight ? f->flight[f->flight_head].id : 0;
}

void fleet_step_health(const struct fleet *f, uint64_t now_us, struct engine_status *out) {
    for (int r = 0; r < f->world; r++)
        if (f->w[r].last_step)
            out->last_step_us = MIN(out->last_step_us, now_us - f->w[r].last_step_us);
    if (!f->n_flight) return;
    const struct flight *s = &f->flight[f->flight_head];
    out->step = s->id;
    out->step_rows = s->rows;
    out->step_age_us = now_us - s->begun_us;
    out->step_bound_us = s->due_us - s->begun_us;
}

uint64_t fleet_step_bound_us(const struct fleet *f, double work) {
    uint64_t bound = (uint64_t)f->o.step_timeout_s * SECOND_US;
    if (f->us_per_work > 0)
        bound += (uint64_t)(MARGIN * work * f->us_per_work);
    else
        bound = MAX(bound, UNMEASURED_US) + (uint64_t)work * SECOND_US;
    return bound << MIN(f->stalls, STALLS_DOUBLE);
}

static void measure(struct fleet *f, const struct flight *s, uint64_t now_us) {
    double now = (double)(now_us - s->begun_us) / s->work;
    f->us_per_work = now > f->us_per_work ? now : 0.95 * f->us_per_work + 0.05 * now;
    f->stalls = 0;
}

void fleet_note_step(struct fleet *f, const struct msg_step *m, uint64_t now_us) {
    assert(f->n_flight < SCHED_DEPTH_MAX);
    struct flight *s = &f->flight[(f->flight_head + f->n_flight) % SCHED_DEPTH_MAX];
    s->id = m->id;
    s->rows = 0;
    s->work = 0;
    for (int i = 0; i < m->n_entries; i++) {
        const struct msg_entry *e = &m->entries[i];
        s->rows += e->count;
        s->work += e->count * (1 + (e->pos + e->count) / WORK_SPAN);
    }
    s->has_tokens = false;
    s->begun_us = now_us;
    s->due_us = now_us + fleet_step_bound_us(f, s->work);
    f->n_flight++;
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
    measure(f, &f->flight[f->flight_head], now_us);
    f->flight_head = (f->flight_head + 1) % SCHED_DEPTH_MAX;
    if (--f->n_flight == 0) return;
    struct flight *next = &f->flight[f->flight_head];
    next->begun_us = now_us;
    next->due_us = now_us + fleet_step_bound_us(f, next->work);
}

void fleet_check_step(struct fleet *f, uint64_t now_us) {
    if (!f->n_flight || now_us <= f->flight[f->flight_head].due_us) return;
    const struct flight *s = &f->flight[f->flight_head];
    char silent[4 * LIMIT_RANKS] = "";
    for (int r = 0, n = 0; r < f->world; r++)
        if (f->w[r].answered < s->id)
            n += snprintf(silent + n, sizeof silent - (size_t)n, "%s%d", n ? "," : "", r);
    uint64_t bound = fleet_step_bound_us(f, s->work);
    log_warn("step_late", "step=%" PRIu64 " rows=%d bound_ms=%" PRIu64 " no_answer_from=%s", s->id,
             s->rows, bound / 1000, silent);
    snprintf(f->why, sizeof f->why,
             "step %" PRIu64 " of %d rows was not answered within %.1f s by ranks %s", s->id,
             s->rows, (double)bound / 1e6, silent);
    f->recovery.died_us = s->begun_us;
    f->recovery.lost_us = now_us;
    fleet_break(f, bound / 8, now_us); /* it had its time already */
}
