/* coordinator/sched_gap.c: how much of prompts a step may hold beside those whose streams are watched.
 * See sched.h.
 *
 * Owns: nothing of its own.  Called by: sched.c.  Pure.
 * Fails how: cannot.  Limits: at least ROWS_LEAST rows of prompts a step, whatever they take.
 * Tested by: tests/unit/test_sched_gap.c
 *
 * The time between two tokens of a stream is the time of a step, and what makes steps long is rows of
 * prompts. So their number is bounded by time and not by count alone: what a step without prompts
 * takes is measured, and what prompts add to it, by
 *
 *     work = the sum over rows of 1 + position / WORK_SPAN,
 *
 * because a row far into a context costs more. What is left of the bound for prompts, in work, gives
 * the rows. A rise is believed by half, a fall by a quarter: to hold a stream up is worse than to be late
 * with a prompt. Before anything is measured a step holds a few rows only; what they cost each is more
 * than they cost in a large step, so the next ones err on the safe side. Where nobody is watching
 * there is no bound: prompts alone are computed in the largest steps there may be.
 */
#include "coordinator/sched_state.h"

#define WORK_SPAN  4096.0 /* so many positions behind it double what a row costs */
#define ROWS_FIRST 64     /* before anything is measured */
#define ROWS_LEAST 16     /* or a prompt would never end */
#define HEADROOM   0.9    /* of the bound is planned for */

static double work(int32_t pos, int32_t rows) {
    return rows * (1 + (pos + rows) / WORK_SPAN);
}

static void learn(double *estimate, double found) {
    if (*estimate <= 0)
        *estimate = found;
    else
        *estimate += (found - *estimate) * (found > *estimate ? 0.5 : 0.25);
}

void sched_gap_measure(struct sched *s, const struct flight *f, double us) {
    if (f->prompt_rows == 0) {
        learn(&s->step_us, us);
        return;
    }
    if (us < s->step_us) s->step_us = us; /* it was less with prompts: a hiccup is forgotten */
    learn(&s->us_per_work, (us - s->step_us) / f->prompt_work);
}

int32_t sched_gap_rows(const struct sched *s, const struct flight *f, int32_t pos, int32_t want) {
    if (s->o.gap_us == 0 || f->n_decode == 0 || want <= 0) return want;
    double least = MAX(0, ROWS_LEAST - f->prompt_rows), rows;
    if (s->us_per_work <= 0) {
        rows = ROWS_FIRST - f->prompt_rows;
    } else {
        double room = (HEADROOM * (double)s->o.gap_us - s->step_us) / s->us_per_work;
        rows = (room - f->prompt_work) / (work(pos, want) / want);
    }
    rows = MAX(rows, least);
    return rows < want ? (int32_t)rows : want;
}

void sched_gap_add(struct flight *f, int32_t pos, int32_t rows, int sign) {
    f->prompt_rows += sign * rows;
    f->prompt_work += sign * work(pos, rows);
}
