/* tests/unit/test_sched.c: the scheduler's rules, one by one, against a model of the workers.
 *
 * Owns: nothing.  Called by: meson test.  Fails how: cmocka prints expected and found.
 */
#include "tests/unit/sched_sim.h"

static void decode_rows_come_first_and_prompts_share_the_rest_of_the_budget(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(1, 8, 100, 1, 64, 1000);
    sim_submit(m, 10, 50, 0, -1, true, NULL);
    assert_true(sim_plan(m));
    sim_answer(m);
    sim_submit(m, 250, 50, 0, -1, true, NULL);
    sim_submit(m, 30, 50, 0, -1, true, NULL);
    const int32_t counts[4][3] = {{1, 30, 69}, {1, 1, 98}, {1, 1, 83}, {1, 1, 1}};
    for (int i = 0; i < 4; i++) {
        assert_true(sim_plan(m));
        const struct msg_step *step = &m->queue[0].plan.msg.step;
        for (int k = 0; k < step->n_entries; k++)
            assert_int_equal(step->entries[k].count, counts[i][k]);
        sim_answer(m);
    }
    sim_drain(m);
    sim_free(m);
}

static void admission_is_by_priority_then_by_arrival(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(2, 1, 100, 1, 64, 1000);
    struct req *r[4];
    const int priority[4] = {1, 0, 0, -1}, order[4] = {3, 1, 2, 0};
    for (int i = 0; i < 4; i++) r[i] = sim_submit(m, 5 + i, 3, priority[i], -1, true, NULL);
    for (int i = 0; i < 4; i++) {
        while (!r[order[i]]->ends) {
            assert_true(sim_plan(m));
            sim_answer(m);
        }
        for (int k = i + 1; k < 4; k++) assert_int_equal(r[order[k]]->n_got, 0);
    }
    sim_free(m);
}

static void who_is_more_urgent_takes_the_place_of_a_prompt_that_is_not_begun(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(16, 4, 100, 2, 64, 1200);
    for (int i = 0; i < 6; i++) sim_submit(m, 600, 1, 5, -1, true, NULL);
    assert_true(sim_plan(m));
    assert_int_equal(m->s->n_running, 4); /* of which only some are begun */
    struct req *urgent = sim_submit(m, 30, 1, 0, -1, true, NULL);
    assert_true(sim_plan(m));
    sim_answer(m);
    sim_answer(m);
    assert_int_equal(urgent->ends, 1);
    struct sched_counts c;
    sched_counts(m->s, &c);
    assert_int_equal(c.preemptions, 0); /* nothing is computed twice */
    sim_drain(m);
    assert_int_equal(m->rows_fed, 6 * 600 + 30);
    sim_free(m);
}

static void a_full_queue_refuses_in_requests_and_in_tokens(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(3, 1, 100, 1, 64, 1200);
    int rc;
    for (int i = 0; i < 101; i++) assert_non_null(sim_submit(m, 2, 1, 0, -1, false, &rc));
    assert_null(sim_submit(m, 2, 1, 0, -1, false, &rc));
    assert_int_equal(rc, ERR_FULL);
    sim_drain(m);
    for (int i = 0; i < 20; i++) assert_non_null(sim_submit(m, 1000, 1, 0, -1, false, &rc));
    assert_null(sim_submit(m, 1, 1, 0, -1, false, &rc));
    assert_int_equal(rc, ERR_FULL);
    assert_true(sched_retry_after_s(m->s) >= 1);
    sim_drain(m);
    assert_non_null(sim_submit(m, 1199, 1, 0, -1, false, &rc));
    sim_drain(m);
    sim_free(m);
}

static void when_to_come_back_follows_what_is_owed_and_the_measured_rate(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(13, 1, 100, 1, 64, 1200);
    assert_int_equal(sched_retry_after_s(m->s), 1);
    sim_submit(m, 1100, 1, 0, -1, true, NULL);
    for (int i = 0; i < 8; i++) {
        assert_true(sim_plan(m));
        m->now_us += 2000000; /* 50 tokens a second */
        sim_answer(m);
        m->now_us += 60000000; /* in which nothing was asked */
    }
    assert_int_equal(sched_retry_after_s(m->s), 6); /* 300 tokens are left */
    for (int i = 0; i < 10; i++) sim_submit(m, 1000, 1, 0, -1, true, NULL);
    assert_int_equal(sched_retry_after_s(m->s), 206);
    for (int i = 0; i < 10; i++) assert_true(sim_plan(m)), sim_answer(m); /* fast now */
    assert_in_range(sched_retry_after_s(m->s), 1, 199);
    sim_drain(m);
    sim_free(m);
}

static void who_has_had_his_time_ends_waiting_or_running(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(14, 1, 100, 2, 64, 1200);
    struct req *r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = sim_next(m);
        r[i]->prompt[0] = i;
        r[i]->timeout_us = i == 2 ? 0 : 1000 * (uint64_t)(i + 1);
        assert_ptr_equal(sim_submit_text(m, 1, 1000, 0, -1, true, NULL), r[i]);
    }
    assert_true(sim_plan(m));
    m->now_us = 999;
    sched_expire(m->s, m->now_us);
    sim_deliver(m);
    assert_int_equal(m->expired, 0);
    m->now_us = 2000;
    sched_expire(m->s, m->now_us);
    sim_deliver(m);
    assert_int_equal(m->expired, 2);
    assert_int_equal(r[0]->ends + r[1]->ends, 2);
    sim_answer(m); /* too late: nobody hears of it */
    m->now_us = 5000;
    sched_expire(m->s, m->now_us);
    sim_deliver(m);
    assert_int_equal(r[3]->ends, 1);
    sim_drain(m);
    assert_int_equal(r[2]->n_got, 1000);
    sim_free(m);
}

static void a_prompt_that_leaves_no_room_is_refused_and_a_long_answer_is_clipped(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(4, 2, 100, 1, 64, 100);
    int rc;
    assert_null(sim_submit(m, 100, 1, 0, -1, true, &rc));
    assert_int_equal(rc, ERR_LIMIT);
    struct req *r = sim_submit(m, 90, 500, 0, -1, true, &rc);
    sim_drain(m);
    assert_int_equal(r->n_got, 10);
    assert_int_equal(r->want_reason, ENGINE_LENGTH);
    sim_free(m);
}

static void a_sequence_as_long_as_the_whole_cache_is_served_beside_others(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(5, 4, 64, 2, 4, 1000);
    struct req *r = sim_submit(m, 256, 10, 0, -1, true, NULL);
    for (int i = 0; i < 3; i++) sim_submit(m, 20, 200, 0, -1, true, NULL);
    sim_drain(m);
    assert_int_equal(r->n_got, 1);
    struct sched_counts c;
    sched_counts(m->s, &c);
    assert_true(c.preemptions > 0);
    sim_free(m);
}

static void a_late_stop_costs_one_row_that_no_client_sees(void **state) {
    UNUSED(state);
    int rows[3] = {0};
    for (int depth = 1; depth <= 2; depth++) {
        struct sim *m = sim_new(6, 4, 64, depth, 8, 400);
        struct req *r = sim_submit(m, 9, 300, 0, -1, false, NULL);
        sim_drain(m);
        assert_int_equal(r->want_reason, ENGINE_STOP);
        rows[depth] = m->rows_fed;
        assert_int_equal(m->events, r->n_want + 1);
        sim_free(m);
    }
    assert_int_equal(rows[2], rows[1] + 1);
}

static void who_goes_in_lockstep_holds_nobody_else_up(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(15, 4, 64, 3, 8, 400);
    struct req *r[2];
    for (int i = 0; i < 2; i++) {
        r[i] = sim_next(m);
        r[i]->prompt[0] = i;
        r[i]->lockstep = i == 0;
        sim_submit_text(m, 1, 30, 0, -1, true, NULL);
    }
    for (int i = 0; i < 12; i++) {
        while (sim_plan(m)) continue;
        sim_answer(m);
    }
    assert_int_equal(r[1]->n_got, 12); /* one for each answer */
    assert_int_equal(r[0]->n_got, 4);  /* one for each time that all were answered */
    sim_drain(m);
    assert_int_equal(r[0]->n_got + r[1]->n_got, 60);
    sim_free(m);
}

static void a_cancelled_request_gives_its_slot_and_pages_to_the_next_step(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(7, 1, 300, 1, 4, 300);
    struct req *a = sim_submit(m, 200, 50, 0, -1, true, NULL);
    struct req *b = sim_submit(m, 200, 50, 0, -1, true, NULL);
    assert_true(sim_plan(m));
    a->cancelled = true;
    sched_cancel(m->s, a->id);
    sched_sweep(m->s);
    sim_answer(m);
    assert_int_equal(a->n_got, 0);
    assert_true(sim_plan(m));
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].count, 200);
    sim_answer(m);
    assert_int_equal(b->n_got, 1);
    sim_drain(m);
    sim_free(m);
}

static void after_a_lost_device_the_prompt_and_the_tokens_so_far_are_fed_again(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(8, 4, 300, 2, 16, 300);
    struct req *a = sim_submit(m, 70, 50, 0, -1, true, NULL);
    for (int i = 0; i < 6; i++) {
        sim_plan(m);
        sim_answer(m);
    }
    assert_int_equal(a->n_got, 6);
    sim_plan(m);
    sim_lose_device(m);
    assert_true(sim_plan(m));
    assert_int_equal(m->queue[0].plan.n_admits, 1);
    assert_int_equal(m->queue[0].before[0].admit.n_prompt, 70);
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].pos, 0);
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].count, 76);
    assert_int_equal(m->queue[0].plan.msg.step.entries[0].page_first, 0);
    sim_drain(m);
    assert_int_equal(a->n_got, 50);
    sim_free(m);
}

/* Every row is fed once, and once more if its step was not answered. */
static void after_a_lost_rank_only_what_was_not_answered_is_fed_again(void **state) {
    UNUSED(state);
    for (int depth = 1; depth <= 2; depth++) {
        struct sim *m = sim_new(12, 4, 64, depth, 16, 300);
        struct req *a = sim_submit(m, 70, 50, 0, -1, true, NULL);
        struct req *b = sim_submit(m, 150, 20, 0, -1, true, NULL);
        int lost_rows = 0;
        for (int i = 0; !sched_idle(m->s); i++) {
            while (sim_plan(m)) continue;
            if (i % 3 == 1) {
                for (int q = 0; q < m->n_queue; q++) {
                    const struct msg_step *step = &m->queue[q].plan.msg.step;
                    for (int k = 0; k < step->n_entries; k++) lost_rows += step->entries[k].count;
                }
                sim_lose_rank(m);
                while (sim_plan(m)) continue;
                const struct msg_entry *e = &m->queue[0].plan.msg.step.entries[0];
                assert_int_equal(m->queue[0].plan.n_admits, 0);
                assert_true(e->token_at >= 0);
            }
            sim_answer(m);
        }
        assert_int_equal(a->n_got, 50);
        assert_int_equal(b->n_got, 20);
        assert_true(lost_rows > 0);
        struct sched_counts c;
        sched_counts(m->s, &c);
        assert_int_equal(c.replays, 0);
        assert_true(c.resumed > 0);
        assert_int_equal(m->rows_fed, 70 + 49 + 150 + 19 + (depth == 1 ? 0 : m->rows_fed - 288));
        sim_drain(m);
        sim_free(m);
    }
}

static void a_stop_string_met_on_the_last_token_still_reads_stop(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(9, 4, 300, 1, 16, 300);
    struct req *a = sim_submit(m, 7, 1, 0, -1, true, NULL);
    static struct msg_tokens t;
    assert_true(sim_plan(m));
    const struct msg_entry *e = &m->queue[0].plan.msg.step.entries[0];
    t = (struct msg_tokens){.step_id = m->queue[0].plan.msg.step.id, .n = 1};
    t.tokens[0] = (struct msg_token){
        .slot = e->slot, .slot_generation = e->slot_generation, .pos = 7, .token = 5};
    assert_int_equal(sched_commit(m->s, &t, 0, NULL), OK);
    int n;
    const struct sched_event *ev = sched_events(m->s, &n);
    assert_int_equal(n, 2);
    assert_int_equal(ev[1].ev.reason, ENGINE_LENGTH);
    sched_finish(m->s, a->id);
    assert_int_equal(ev[1].ev.reason, ENGINE_STOP);
    assert_false(ev[1].dead);
    sched_cancel(m->s, a->id);
    assert_true(ev[1].dead);
    sim_free(m);
}

static void answers_that_do_not_fit_the_step_are_refused_with_a_sentence(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(10, 4, 300, 1, 16, 300);
    sim_submit(m, 7, 9, 0, -1, true, NULL);
    static struct msg_tokens good, t;
    assert_true(sim_plan(m));
    const struct msg_entry *e = &m->queue[0].plan.msg.step.entries[0];
    good = (struct msg_tokens){.step_id = m->queue[0].plan.msg.step.id, .n = 1};
    good.tokens[0] = (struct msg_token){
        .slot = e->slot, .slot_generation = e->slot_generation, .pos = 7, .token = 5};
    struct err_text err;
    for (int wrong = 0; wrong < 5; wrong++) {
        t = good;
        if (wrong == 0) t.n = 0;
        if (wrong == 1) t.tokens[0].slot++;
        if (wrong == 2) t.tokens[0].slot_generation++;
        if (wrong == 3) t.tokens[0].pos++;
        if (wrong == 4) t.tokens[0].slot = -5;
        err.text[0] = 0;
        assert_int_equal(sched_commit(m->s, &t, 0, &err), ERR_FORMAT);
        assert_true(err.text[0] != 0);
    }
    t = good;
    t.tokens[0].token = -1; /* this sequence cannot go on; the others can */
    assert_int_equal(sched_commit(m->s, &t, 0, &err), OK);
    int n;
    const struct sched_event *ev = sched_events(m->s, &n);
    assert_int_equal(n, 1);
    assert_true(ev[0].ev.finished);
    assert_int_equal(ev[0].ev.reason, ENGINE_ERROR);
    assert_non_null(ev[0].ev.error);
    sim_free(m);
}

static void stopping_ends_everybody_once(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(11, 2, 300, 1, 16, 300);
    for (int i = 0; i < 5; i++) sim_submit(m, 7, 9, 0, -1, true, NULL);
    sim_plan(m);
    m->reqs[1].cancelled = true;
    sched_cancel(m->s, m->reqs[1].id);
    sched_end_all(m->s, ENGINE_CANCELLED, NULL);
    int n;
    const struct sched_event *ev = sched_events(m->s, &n);
    assert_int_equal(n, 4);
    for (int i = 0; i < n; i++) assert_int_equal(ev[i].ev.reason, ENGINE_CANCELLED);
    assert_true(sched_idle(m->s));
    sim_free(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_rows_come_first_and_prompts_share_the_rest_of_the_budget),
        cmocka_unit_test(admission_is_by_priority_then_by_arrival),
        cmocka_unit_test(who_is_more_urgent_takes_the_place_of_a_prompt_that_is_not_begun),
        cmocka_unit_test(a_full_queue_refuses_in_requests_and_in_tokens),
        cmocka_unit_test(when_to_come_back_follows_what_is_owed_and_the_measured_rate),
        cmocka_unit_test(who_has_had_his_time_ends_waiting_or_running),
        cmocka_unit_test(a_prompt_that_leaves_no_room_is_refused_and_a_long_answer_is_clipped),
        cmocka_unit_test(a_sequence_as_long_as_the_whole_cache_is_served_beside_others),
        cmocka_unit_test(a_late_stop_costs_one_row_that_no_client_sees),
        cmocka_unit_test(who_goes_in_lockstep_holds_nobody_else_up),
        cmocka_unit_test(a_cancelled_request_gives_its_slot_and_pages_to_the_next_step),
        cmocka_unit_test(after_a_lost_device_the_prompt_and_the_tokens_so_far_are_fed_again),
        cmocka_unit_test(after_a_lost_rank_only_what_was_not_answered_is_fed_again),
        cmocka_unit_test(a_stop_string_met_on_the_last_token_still_reads_stop),
        cmocka_unit_test(answers_that_do_not_fit_the_step_are_refused_with_a_sentence),
        cmocka_unit_test(stopping_ends_everybody_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
