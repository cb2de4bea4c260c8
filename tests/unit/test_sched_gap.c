/* tests/unit/test_sched_gap.c: long prompts do not hold streams up, nor each other.
 *
 * The device of these tests takes a known time for a step; only the scheduler does not know it.
 *
 * Owns: nothing.  Called by: meson test.  Fails how: cmocka prints expected and found.
 */
#include "tests/unit/sched_sim.h"

enum { BASE_US = 2000, ROW_US = 150 };

/* What the oldest step in flight takes. */
static uint64_t time_of(const struct sim *m) {
    const struct msg_step *step = &m->queue[0].plan.msg.step;
    uint64_t us = BASE_US;
    for (int i = 0; i < step->n_entries; i++) {
        const struct msg_entry *e = &step->entries[i];
        us += (uint64_t)e->count * ROW_US * (uint64_t)(4096 + e->pos) / 4096;
    }
    return us;
}

static uint64_t step(struct sim *m) {
    while (sim_plan(m)) continue;
    uint64_t us = time_of(m);
    m->now_us += us;
    sim_answer(m);
    return us;
}


/* The longest time between two tokens of a stream while prompts are computed, and how many steps
 * those took. */
static uint64_t longest_gap(uint64_t bound_us, int depth, int *steps) {
    struct sim *m = sim_new(1, 4, 512, depth, 64, 1200);
    m->s->o.gap_us = bound_us;
    struct req *stream = sim_submit(m, 10, 1100, 0, -1, true, NULL);
    for (int i = 0; i < 5; i++) step(m);
    struct req *book = sim_submit(m, 1100, 2, 0, -1, true, NULL);
    struct req *book2 = sim_submit(m, 1000, 2, 0, -1, true, NULL);
    uint64_t longest = 0, last = m->now_us;
    int before = stream->n_got;
    for (*steps = 0; !book->ends || !book2->ends; ++*steps) {
        step(m);
        CHECK(m, *steps < 1000);
        if (stream->n_got == before) continue;
        longest = MAX(longest, m->now_us - last);
        last = m->now_us;
        before = stream->n_got;
    }
    sched_cancel(m->s, stream->id);
    stream->cancelled = true;
    sim_drain(m);
    sim_free(m);
    return longest;
}

static void prompts_keep_a_stream_waiting_no_longer_than_the_bound(void **state) {
    UNUSED(state);
    int steps, unbounded_steps;
    for (int depth = 1; depth <= 2; depth++) {
        assert_true(longest_gap(0, depth, &unbounded_steps) > 70000);
        assert_in_range(longest_gap(30000, depth, &steps), 10000, 30000);
        assert_in_range(steps, 10, 30); /* about 150 rows each */
        assert_in_range(longest_gap(8000, depth, &steps), 4000, 12000); /* 64 rows, unmeasured */
        assert_in_range(steps, 40, 140);
    }
}

static void a_bound_that_cannot_be_kept_still_lets_prompts_end(void **state) {
    UNUSED(state);
    int steps;
    longest_gap(1000, 1, &steps); /* less than a step without prompts takes */
    assert_in_range(steps, 100, 150); /* 16 rows each */
}

static void a_hiccup_is_forgotten(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(5, 4, 512, 1, 64, 1200);
    m->s->o.gap_us = 50000;
    struct req *stream = sim_submit(m, 10, 1100, 0, -1, true, NULL);
    for (int i = 0; i < 5; i++) step(m);
    m->now_us += 5000000; /* the machine was away, in a step without prompts … */
    step(m);
    for (int i = 0; i < 30; i++) {
        sim_plan(m);
        m->now_us += 5000000 * (i == 10); /* … and in one with */
        step(m);
        if (m->s->n_running < 3) sim_submit(m, 1100, 1, 0, -1, true, NULL);
    }
    sim_plan(m);
    assert_true(m->queue[0].plan.msg.step.n_tokens > 100);
    sim_answer(m);
    stream->cancelled = true;
    sched_cancel(m->s, stream->id);
    sim_drain(m);
    sim_free(m);
}

static void without_streams_steps_are_full(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(2, 4, 512, 1, 64, 1200);
    m->s->o.gap_us = 5000;
    sim_submit(m, 1100, 2, 0, -1, true, NULL);
    const int rows[] = {512, 512, 76};
    for (int i = 0; i < 3; i++) {
        assert_true(sim_plan(m));
        assert_int_equal(m->queue[0].plan.msg.step.n_tokens, rows[i]);
        sim_answer(m);
    }
    sim_drain(m);
    sim_free(m);
}

static void a_short_question_does_not_wait_for_a_book_and_the_book_gets_half(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(3, 8, 100, 1, 64, 1200);
    struct req *book = sim_submit(m, 1100, 1, 0, -1, true, NULL);
    assert_true(sim_plan(m));
    sim_answer(m);
    struct req *other = sim_submit(m, 1150, 1, 0, -1, true, NULL);
    struct req *question = sim_submit(m, 40, 1, 0, -1, true, NULL);
    int steps = 0;
    for (; !book->ends; steps++) {
        assert_true(sim_plan(m));
        const struct msg_step *s = &m->queue[0].plan.msg.step;
        int rows = 0;
        for (int i = 0; i < s->n_entries; i++)
            if (s->entries[i].slot == 0) rows = s->entries[i].count;
        assert_true(rows >= 50 || s->entries[s->n_entries - 1].samples);
        sim_answer(m);
        if (steps == 2) assert_int_equal(question->ends, 1);
    }
    assert_in_range(steps, 18, 20);
    assert_int_equal(other->ends, 0);
    sim_drain(m);
    sim_free(m);
}

/* Newcomers come for ever, each shorter than what waits: the longest is served all the same. */
static void a_stream_of_short_questions_starves_nobody(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(4, 4, 64, 2, 64, 1200);
    struct req *books[3];
    for (int i = 0; i < 3; i++) books[i] = sim_submit(m, 1000, 1, 0, -1, true, NULL);
    for (int i = 0; i < 3 * 40; i++) {
        for (int k = 0; k < 3; k++) sim_submit(m, 20, 1, 0, -1, true, NULL);
        step(m);
    }
    for (int i = 0; i < 3; i++) assert_int_equal(books[i]->ends, 1);
    sim_drain(m);
    sim_free(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_keep_a_stream_waiting_no_longer_than_the_bound),
        cmocka_unit_test(a_bound_that_cannot_be_kept_still_lets_prompts_end),
        cmocka_unit_test(a_hiccup_is_forgotten),
        cmocka_unit_test(without_streams_steps_are_full),
        cmocka_unit_test(a_short_question_does_not_wait_for_a_book_and_the_book_gets_half),
        cmocka_unit_test(a_stream_of_short_questions_starves_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
