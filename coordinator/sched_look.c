/* coordinator/sched_look.c: what supervision needs of a scheduler. See sched.h.
 *
 * Owns: nothing of its own.  Called by: engine.c through sched.h.  Pure.  Fails how: cannot.
 * Tested by: tests/unit/test_sched.c, tests/faults/test_health.py
 */
#include "coordinator/sched_state.h"

uint64_t sched_take_id(struct sched *s) {
    return ++s->last_id;
}

/* A prompt is being computed until one token of it is left to feed. */
void sched_prefill(const struct sched *s, struct engine_prefill *out) {
    *out = (struct engine_prefill){0};
    for (int i = 0; i < s->n_running; i++) {
        const struct seq *q = &s->seqs[s->running[i]];
        if (q->n_tokens + q->n_pending - q->n_fed <= 1) continue;
        if (out->n++) continue;
        out->done = q->n_fed;
        out->total = q->n_tokens;
    }
}
