/* tests/unit/test_sched_sim.c: the scheduler under random arrivals, cancels and failures.
 *
 * Owns: nothing.  Called by: meson test.  Fails how: expected, found and the seed; OCTAVO_SEED=N
 * repeats that one simulation.
 */
#include "tests/unit/sched_sim.h"

static void simulate(uint64_t seed) {
    struct sim *shape = &(struct sim){.rng = mix(seed, 3) | 1};
    int max_seqs = 1 + below(shape, 20), depth = 1 + below(shape, 3);
    int rows = max_seqs + below(shape, 120), pages = 8 + below(shape, PAGES_MAX - 8);
    int context = 200 + below(shape, 600);
    struct sim *m = sim_new(seed, max_seqs, rows, depth, pages, MAX(context, 410));
    m->meddle = true;
    m->s->o.gap_us = below(m, 2) ? 0 : 1 + (uint64_t)below(m, 3000);
    int arrivals = 1 + below(m, 4);
    for (int turn = 0; turn < 1500; turn++) {
        m->now_us += (uint64_t)below(m, 1000);
        if (below(m, 8) < arrivals) sim_submit_random(m);
        if (below(m, 20) == 0 && m->n_reqs) {
            struct req *r = &m->reqs[below(m, m->n_reqs)];
            if (!r->ends) r->cancelled = true;
            sched_cancel(m->s, r->id);
        }
        if (below(m, 300) == 0) sim_lose_device(m);
        if (below(m, 60) == 0) sim_lose_rank(m);
        if (below(m, 4) == 0) {
            sched_expire(m->s, m->now_us);
            sched_sweep(m->s);
            sim_deliver(m);
        }
        if (below(m, 3)) sim_plan(m);
        if (m->n_queue && below(m, 3)) sim_answer(m);
    }
    sim_drain(m);
    sim_free(m);
}

static void random_arrivals_cancels_and_losses_leave_every_text_as_it_should_be(void **state) {
    UNUSED(state);
    const char *one = getenv("OCTAVO_SEED");
    if (one) {
        simulate(strtoull(one, NULL, 10));
        return;
    }
    for (uint64_t seed = 1; seed <= 24; seed++) simulate(seed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_arrivals_cancels_and_losses_leave_every_text_as_it_should_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
