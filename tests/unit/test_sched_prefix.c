/* tests/unit/test_sched_prefix.c: what the prefix cache finds, and what it must not.
 *
 * The model of the workers (sched_sim.h) checks every text besides; here it is counted what was
 * found and what was fed.
 *
 * Owns: nothing.  Called by: meson test.  Fails how: cmocka prints expected and found.
 */
#include "tests/unit/sched_sim.h"

static void the_digest_is_siphash(void **state) {
    UNUSED(state);
    uint8_t in[15];
    struct digest key = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
    for (uint8_t i = 0; i < sizeof in; i++) in[i] = i;
    struct digest none = sched_digest(key, in, 0); /* the reference's first vector */
    assert_int_equal(none.a, 0xe6a825ba047f81a3);
    assert_int_equal(none.b, 0x930255c71472f66d);
    struct digest all = sched_digest(key, in, sizeof in), less = sched_digest(key, in, 8);
    assert_false(digest_equal(all, less));
    in[14]++;
    assert_false(digest_equal(all, sched_digest(key, in, sizeof in)));
}

/* Runs r alone to its end: how many rows that fed. */
static int rows_of(struct sim *m, const struct req *r) {
    int before = m->rows_fed;
    assert_non_null(r);
    sim_drain(m);
    return m->rows_fed - before;
}

static void the_same_prompt_again_and_its_prefixes_feed_only_what_is_new(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(1, 8, 100, 1, 64, 1000);
    struct req *r = sim_submit(m, 200, 1, 0, -1, true, NULL);
    assert_int_equal(rows_of(m, r), 200);
    assert_int_equal(r->n_cached, 0);
    const int lengths[] = {200, 200, 193, 192, 191, 129, 128, 127, 65, 64, 63, 1};
    const int cached[] = {192, 192, 192, 128, 128, 128, 64, 64, 64, 0, 0, 0};
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        struct req *again = sim_again(m, r, lengths[i], 1);
        assert_int_equal(rows_of(m, again), lengths[i] - cached[i]);
        assert_int_equal(again->n_cached, cached[i]);
    }
    sim_free(m);
}

static void the_next_turn_of_a_chat_finds_the_answer_before_it(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(2, 8, 100, 2, 64, 1000);
    struct req *r = sim_submit(m, 100, 100, 0, -1, true, NULL), *next = NULL;
    sim_drain(m);
    next = sim_next(m);
    memcpy(next->prompt, r->prompt, 100 * sizeof *r->prompt);
    memcpy(next->prompt + 100, r->want, 100 * sizeof *r->want);
    for (int i = 200; i < 220; i++) next->prompt[i] = 3;
    next = sim_submit_text(m, 220, 5, 0, -1, true, NULL);
    sim_drain(m);
    assert_int_equal(next->n_cached, 192);
    sim_free(m);
}

static void another_salt_finds_nothing(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(3, 8, 100, 1, 64, 1000);
    struct req *r = sim_submit(m, 200, 1, 0, -1, true, NULL);
    sim_drain(m);
    for (int salt = 0; salt < 3; salt++)
        for (int time = 0; time < 2; time++) {
            struct req old = *r;
            old.salt = salt;
            struct req *again = sim_again(m, &old, 200, 1);
            sim_drain(m);
            assert_int_equal(again->n_cached, time || !salt ? 192 : 0);
        }
    sim_free(m);
}

static void switched_off_it_finds_nothing(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(4, 8, 100, 1, 64, 1000);
    m->s->o.prefix_cache = false;
    struct req *r = sim_submit(m, 200, 1, 0, -1, true, NULL);
    sim_drain(m);
    assert_int_equal(rows_of(m, sim_again(m, r, 200, 1)), 200);
    assert_int_equal(m->s->pages.free.n, 64);
    sim_free(m);
}

static void equal_prompts_at_once_cost_one_prefill(void **state) {
    UNUSED(state);
    for (int depth = 1; depth <= 3; depth++) {
        struct sim *m = sim_new(5, 8, 100, depth, 64, 1000);
        struct req *r = sim_submit(m, 500, 1, 0, -1, true, NULL);
        for (int i = 0; i < 7; i++) sim_again(m, r, 500, 1);
        struct req *other = sim_submit(m, 10, 1, 0, -1, true, NULL);
        for (int i = 0; i < 2; i++) sim_plan(m), sim_answer(m);
        assert_int_equal(m->s->n_running, 1); /* the others wait for its pages */
        sim_drain(m);
        assert_int_equal(m->rows_fed, 500 + 7 * (500 - 448) + 10);
        assert_int_equal(other->n_got, 1);
        for (int i = 1; i < 8; i++) assert_int_equal(m->reqs[i].n_cached, 448);
        sim_free(m);
    }
}

static void who_waits_for_a_client_that_leaves_goes_on_from_what_is_there(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(6, 8, 100, 1, 64, 1000);
    struct req *r = sim_submit(m, 900, 1, 0, -1, true, NULL), *again = NULL;
    for (int i = 0; i < 3; i++) sim_plan(m), sim_answer(m);
    for (int retry = 0; retry < 3; retry++) { /* it leaves in the middle and asks again */
        again = sim_again(m, r, 900, 1);
        assert_true(sim_plan(m));
        m->reqs[m->n_reqs - 2].cancelled = true;
        sched_cancel(m->s, m->reqs[m->n_reqs - 2].id);
        sched_sweep(m->s);
        sim_answer(m);
    }
    sim_drain(m);
    assert_int_equal(again->n_got, 1);
    assert_in_range(m->rows_fed, 900, 900 + 3 * 100 + 3 * LIMIT_PAGE_TOKENS);
    sim_free(m);
}

static void a_sequence_with_a_penalty_is_told_what_was_found(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(7, 8, 100, 1, 64, 1000);
    struct req *r = sim_submit(m, 300, 20, 0, -1, true, NULL);
    sim_drain(m);
    struct req *again = sim_next(m);
    memcpy(again->prompt, r->prompt, 300 * sizeof *r->prompt);
    again->penalty = true;
    sim_submit_text(m, 300, 20, 0, -1, true, NULL);
    assert_true(sim_plan(m));
    assert_int_equal(m->queue[0].n_before, 2);
    assert_int_equal(m->queue[0].before[1].type, MSG_RESTORE);
    assert_int_equal(m->queue[0].before[1].restore.n_tokens, 256);
    sim_drain(m); /* the model checks the counts */
    assert_int_equal(again->n_got, 20);
    sim_free(m);
}

static void after_a_lost_rank_it_is_found_still_and_after_a_lost_device_no_more(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(8, 8, 100, 1, 64, 1000);
    struct req *r = sim_submit(m, 300, 1, 0, -1, true, NULL);
    sim_drain(m);
    for (int i = 0; i < 8; i++) { /* survivor and newborn, by chance */
        sim_lose_rank(m);
        assert_int_equal(rows_of(m, sim_again(m, r, 300, 1)), 300 - 256);
    }
    sim_lose_device(m);
    assert_int_equal(rows_of(m, sim_again(m, r, 300, 1)), 300);
    sim_free(m);
}

static void when_pages_are_needed_the_ends_of_old_chains_go_first(void **state) {
    UNUSED(state);
    struct sim *m = sim_new(9, 8, 400, 1, 12, 1000);
    struct req *a = sim_submit(m, 320, 1, 0, -1, true, NULL); /* 5 pages */
    sim_drain(m);
    struct req *b = sim_submit(m, 320, 1, 0, -1, true, NULL);
    sim_drain(m);
    sim_submit(m, 256, 1, 0, -1, true, NULL); /* two were free: two go, of the older chain */
    sim_drain(m);
    struct req *b2 = sim_again(m, b, 320, 1);
    sim_drain(m);
    struct req *a2 = sim_again(m, a, 320, 1);
    sim_drain(m);
    assert_int_equal(b2->n_cached, 256);
    assert_int_equal(a2->n_cached, 128); /* a third went for the end of b2 */
    sim_free(m);
}

/* More pages than a step can announce are told before it. */
static void a_very_long_hit_is_told_in_pieces(void **state) {
    UNUSED(state);
    enum { LONG = 300000 };
    struct sched *s;
    struct sched_options o = {.max_seqs = 4,
                              .max_step_rows = LIMIT_STEP_ROWS,
                              .depth = 1,
                              .queue_requests = 4,
                              .queue_tokens = 4 * LONG,
                              .context = LONG + 100,
                              .prefix_cache = true};
    assert_int_equal(sched_new(&s, &o), OK);
    assert_int_equal(sched_set_pages(s, 20000), OK);
    int32_t *prompt = calloc(LONG, sizeof *prompt);
    static struct engine_request q;
    static struct sched_plan plan;
    static struct msg before;
    static struct msg_tokens t;
    q = (struct engine_request){.tokens = prompt, .n_tokens = LONG, .max_tokens = 1};
    q.sink = sim_sink;
    q.sampling.repetition = 1;
    for (int i = 0; i < LONG; i++) prompt[i] = i % 1009;
    for (int time = 0; time < 2; time++) {
        uint64_t id;
        int told = 0, fed = 0;
        assert_int_equal(sched_submit(s, &q, 0, &id), OK);
        while (sched_plan(s, 0, &plan)) {
            while (sched_plan_next(s, &plan, &before))
                if (before.type == MSG_RESTORE) told += before.restore.n_tokens;
            const struct msg_entry *e = &plan.msg.step.entries[0];
            assert_int_equal(e->pos, told + fed);
            fed += e->count;
            t = (struct msg_tokens){.step_id = plan.msg.step.id, .n = e->samples};
            t.tokens[0] = (struct msg_token){.slot = e->slot,
                                             .slot_generation = e->slot_generation,
                                             .pos = LONG,
                                             .token = 5};
            assert_int_equal(sched_commit(s, &t, 0, NULL), OK);
            sched_events_clear(s);
        }
        assert_int_equal(told, time ? (LONG - 1) / LIMIT_PAGE_TOKENS * LIMIT_PAGE_TOKENS : 0);
        assert_int_equal(told + fed, LONG);
    }
    sched_free(s);
    free(prompt);
}

/* One step, answered at once: how many of its sequences were told by RESTORE; -1: nothing to do. */
static int step_alone(struct sched *s, struct sched_plan *plan, struct msg *before,
                      int32_t token) {
    static struct msg_tokens t;
    struct err_text err;
    int told = 0;
    if (!sched_plan(s, 1, plan)) return -1;
    while (sched_plan_next(s, plan, before))
        told += before->type == MSG_RESTORE && before->restore.entries[0].pos == 0;
    const struct msg_step *step = &plan->msg.step;
    t.step_id = step->id;
    t.n = 0;
    for (int i = 0; i < step->n_entries; i++) {
        const struct msg_entry *e = &step->entries[i];
        if (e->samples)
            t.tokens[t.n++] = (struct msg_token){.slot = e->slot,
                                                 .slot_generation = e->slot_generation,
                                                 .pos = e->pos + e->count,
                                                 .token = token};
    }
    assert_int_equal(sched_commit(s, &t, 2, &err), OK);
    sched_events_clear(s);
    return told;
}

static void hear_nothing(void *user, const struct engine_event *ev) {
    UNUSED(user), UNUSED(ev);
}

/* Together they found more pages than one step announces: those of most are told before it. */
static void many_who_find_a_book_fit_into_one_step_and_without_a_number_it_is_lost(void **state) {
    UNUSED(state);
    enum { BOOK = 3000 * LIMIT_PAGE_TOKENS + 1, READERS = 6 };
    struct sched *s;
    struct sched_options o = {.max_seqs = 8, .max_step_rows = LIMIT_STEP_ROWS, .depth = 1,
                              .queue_requests = 8, .queue_tokens = LIMIT_QUEUE_TOKENS,
                              .context = LIMIT_CONTEXT_TOKENS, .prefix_cache = true};
    struct sched_plan *plan = malloc(sizeof *plan);
    struct msg *before = malloc(sizeof *before);
    int32_t *book = calloc(BOOK, sizeof *book);
    struct engine_request r = {.tokens = book, .n_tokens = BOOK, .max_tokens = 1,
                               .ignore_eos = true, .sink = hear_nothing,
                               .sampling = {.top_p = 1, .repetition = 1}};
    uint64_t id;
    assert_true(plan && before && book);
    assert_int_equal(sched_new(&s, &o), OK);
    assert_int_equal(sched_set_pages(s, 4000), OK);
    assert_int_equal(sched_submit(s, &r, 1, &id), OK);
    while (step_alone(s, plan, before, 1) == 0) continue;
    for (int i = 0; i < READERS; i++) assert_int_equal(sched_submit(s, &r, 1, &id), OK);
    assert_int_equal(step_alone(s, plan, before, 1), READERS - 1);
    assert_int_equal(plan->msg.step.n_entries, READERS);
    assert_int_equal(plan->msg.step.n_pages, 3000 + READERS);
    assert_int_equal(sched_submit(s, &r, 1, &id), OK);
    step_alone(s, plan, before, -1); /* no finite logit: what was found may be to blame */
    assert_int_equal(s->pages.kept.n, 0);
    assert_int_equal(s->pages.free.n, 4000);
    assert_int_equal(sched_submit(s, &r, 1, &id), OK);
    step_alone(s, plan, before, 1);
    assert_int_equal(plan->msg.step.n_tokens, LIMIT_STEP_ROWS); /* computed again */
    sched_free(s);
    free(plan), free(before), free(book);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_digest_is_siphash),
        cmocka_unit_test(the_same_prompt_again_and_its_prefixes_feed_only_what_is_new),
        cmocka_unit_test(the_next_turn_of_a_chat_finds_the_answer_before_it),
        cmocka_unit_test(another_salt_finds_nothing),
        cmocka_unit_test(switched_off_it_finds_nothing),
        cmocka_unit_test(equal_prompts_at_once_cost_one_prefill),
        cmocka_unit_test(who_waits_for_a_client_that_leaves_goes_on_from_what_is_there),
        cmocka_unit_test(a_sequence_with_a_penalty_is_told_what_was_found),
        cmocka_unit_test(after_a_lost_rank_it_is_found_still_and_after_a_lost_device_no_more),
        cmocka_unit_test(when_pages_are_needed_the_ends_of_old_chains_go_first),
        cmocka_unit_test(a_very_long_hit_is_told_in_pieces),
        cmocka_unit_test(many_who_find_a_book_fit_into_one_step_and_without_a_number_it_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
