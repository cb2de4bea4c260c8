/* tests/unit/test_step.c: every index of a STEP or ADMIT is checked before anything is touched.
 *
 * The messages are mutations of one that is right; the model is the demonstration model on one
 * rank.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "worker/copy.h"
#include "worker/step.h"

#define SLOTS 3
#define ROWS  80
#define OUTS  8
#define PAGES 4

static struct model model;
static struct stepper *stepper;
static struct coll *coll;
static struct msg_step step;
static struct msg_tokens tokens;
static struct msg_admit admission;

static int load_model(void **state) {
    UNUSED(state);
    char path[512];
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    struct gguf *g;
    struct err_text err = {0};
    const struct model_options o = {
        .world = 1, .max_slots = SLOTS, .max_rows = ROWS, .max_outs = OUTS, .context = 192};
    snprintf(path, sizeof path, "%s/tests/models/tiny.gguf", root ? root : ".");
    if (gguf_open(&g, path, &err) < 0) fail_msg("%s", err.text);
    if (model_load(&model, g, &o, (struct load_progress){0}, &err) < 0) fail_msg("%s", err.text);
    gguf_close(g);
    if (model_alloc_caches(&model, PAGES, &err) < 0) fail_msg("%s", err.text);
    assert_int_equal(stepper_new(&stepper, &model), OK);
    assert_int_equal(coll_open_none(&coll), OK);
    return 0;
}

static int unload_model(void **state) {
    UNUSED(state);
    coll_close(coll);
    stepper_free(stepper);
    model_unload(&model);
    return 0;
}

static void expect_step(int code, const char *sentence) {
    struct err_text err = {0};
    int rc = stepper_run(stepper, coll, &step, &tokens, NULL, &err);
    if (rc != code || !strstr(err.text, sentence))
        fail_msg("expected %s \"%s\", found %s \"%s\"", err_name(code), sentence, err_name(rc),
                 err.text);
}

static void admit_slot(int slot, uint32_t generation) {
    struct err_text err = {0};
    admission = (struct msg_admit){.slot = slot,
                                   .slot_generation = generation,
                                   .n_prompt = 4,
                                   .sampling = {.top_p = 1, .repetition = 1}};
    if (stepper_admit(stepper, &admission, &err) < 0) fail_msg("%s", err.text);
}

/* Slot 1 admitted; a step of 4 tokens at its start, one page, one sample, that would be obeyed. */
static void good_step(void) {
    stepper_forget(stepper);
    admit_slot(1, 5);
    memset(&step, 0, sizeof step);
    step.id = 9;
    step.n_entries = 1;
    step.n_tokens = 4;
    step.n_pages = 1;
    step.entries[0] =
        (struct msg_entry){.slot = 1, .slot_generation = 5, .count = 4, .samples = 1, .n_pages = 1};
    for (int i = 0; i < 4; i++) step.tokens[i] = 100 + i;
    step.pages[0] = 2;
}

static void a_good_step_is_obeyed_and_goes_on(void **state) {
    UNUSED(state);
    good_step();
    expect_step(OK, "");
    assert_int_equal(tokens.step_id, 9);
    assert_int_equal(tokens.n, 1);
    assert_int_equal(tokens.tokens[0].pos, 4);
    assert_int_equal(tokens.tokens[0].slot, 1);
    step.entries[0] = (struct msg_entry){
        .slot = 1, .slot_generation = 5, .pos = 4, .count = 1, .samples = 1, .token_at = -1};
    step.n_tokens = step.n_pages = 0;
    expect_step(OK, "");
    assert_int_equal(tokens.tokens[0].pos, 5);
}

static void several_samples_of_one_entry_come_in_order(void **state) {
    UNUSED(state);
    good_step();
    expect_step(OK, "");
    int32_t last = tokens.tokens[0].token;
    good_step();
    step.entries[0].samples = 4;
    expect_step(OK, "");
    assert_int_equal(tokens.n, 4);
    for (int i = 0; i < 4; i++) assert_int_equal(tokens.tokens[i].pos, i + 1);
    assert_int_equal(tokens.tokens[3].token, last);
}

static void a_chunk_without_samples_answers_nothing(void **state) {
    UNUSED(state);
    good_step();
    step.entries[0].samples = 0;
    expect_step(OK, "");
    assert_int_equal(tokens.n, 0);
    step.entries[0] = (struct msg_entry){
        .slot = 1, .slot_generation = 5, .pos = 4, .count = 1, .samples = 1, .token_at = -1};
    expect_step(ERR_FORMAT, "expected one token after a sample, found 1 and no sample");
}

static void a_position_may_be_fed_again_but_not_skipped(void **state) {
    UNUSED(state);
    good_step();
    expect_step(OK, "");
    int32_t token = tokens.tokens[0].token;
    step.entries[0] = (struct msg_entry){
        .slot = 1, .slot_generation = 5, .pos = 2, .count = 2, .samples = 1, .token_at = 2};
    step.n_pages = 0;
    expect_step(OK, "");
    assert_int_equal(tokens.tokens[0].token, token);
    step.entries[0].pos = 5;
    expect_step(ERR_FORMAT, "slot 1: expected to go on at position 4 of 192, found 2 tokens at 5");
}

static void every_index_out_of_place_is_refused(void **state) {
    UNUSED(state);
    struct msg_entry *e = &step.entries[0];
    const struct {
        int32_t *field;
        int32_t value;
        const char *sentence;
    } rows[] = {
        {&step.n_entries, 0, "expected counts within the limits"},
        {&step.n_entries, LIMIT_STEP_ENTRIES + 1, "expected counts within the limits"},
        {&step.n_tokens, -1, "expected counts within the limits"},
        {&step.n_tokens, LIMIT_STEP_ROWS + 1, "expected counts within the limits"},
        {&step.n_pages, LIMIT_STEP_PAGES + 1, "expected counts within the limits"},
        {&e->slot, -1, "expected a slot below 3, found -1"},
        {&e->slot, SLOTS, "expected a slot below 3, found 3"},
        {&e->slot, 0, "slot 0: expected generation 5, found nothing admitted"},
        {(int32_t *)&e->slot_generation, 4, "slot 1: expected generation 4, found 5"},
        {&e->count, 0, "expected 1 to 80 tokens"},
        {&e->count, ROWS + 1, "expected 1 to 80 tokens"},
        {&e->count, INT32_MAX, "expected 1 to 80 tokens"},
        {&e->samples, -1, "samples, found 4 and -1"},
        {&e->samples, 5, "samples, found 4 and 5"},
        {&e->pos, -1, "expected to go on at position"},
        {&e->pos, 189, "expected to go on at position"},
        {&e->pos, INT32_MAX, "expected to go on at position"},
        {&e->pos, 61, "expected pages for 65 positions, found 1 pages"},
        {&e->token_at, -1, "expected one token after a sample, found 4 and no sample"},
        {&e->token_at, -2, "expected tokens within the message's 4, found 4 at -2"},
        {&e->token_at, 1, "expected tokens within the message's 4, found 4 at 1"},
        {&e->token_at, INT32_MAX, "expected tokens within the message's 4"},
        {&step.tokens[3], 4096, "expected a token below 4096, found 4096"},
        {&step.tokens[0], -1, "expected a token below 4096, found -1"},
        {&e->n_pages, -1, "expected pages within the message's 1, found -1 at 0"},
        {&e->n_pages, 2, "expected pages within the message's 1, found 2 at 0"},
        {&e->n_pages, 0, "expected pages for 4 positions, found 0 pages"},
        {&e->page_at, -1, "expected pages within the message's 1, found 1 at -1"},
        {&e->page_at, INT32_MAX, "expected pages within the message's 1"},
        {&e->page_first, -1, "expected new pages to follow the 0 known (of 3), found 1 at -1"},
        {&e->page_first, 1, "expected new pages to follow the 0 known (of 3), found 1 at 1"},
        {&step.pages[0], -1, "expected a page below 4, found -1"},
        {&step.pages[0], PAGES, "expected a page below 4, found 4"},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        good_step();
        *rows[i].field = rows[i].value;
        expect_step(ERR_FORMAT, rows[i].sentence);
    }
}

static void a_slot_named_twice_and_too_many_rows_are_refused(void **state) {
    UNUSED(state);
    good_step();
    step.entries[1] = step.entries[0];
    step.n_entries = 2;
    expect_step(ERR_FORMAT, "slot 1: expected one entry, found another");
    good_step();
    admit_slot(2, 5);
    step.n_tokens = 80;
    step.n_pages = 3;
    for (int i = 0; i < 3; i++) step.pages[i] = i;
    step.entries[0].count = 41;
    step.entries[1] = (struct msg_entry){
        .slot = 2, .slot_generation = 5, .count = 40, .samples = 1, .page_at = 1, .n_pages = 1};
    step.n_entries = 2;
    expect_step(ERR_FORMAT, "expected up to 80 rows and 8 samples, found 81 and 2");
    step.entries[0].count = 40;
    step.entries[0].samples = 8;
    expect_step(ERR_FORMAT, "expected up to 80 rows and 8 samples, found 80 and 9");
    step.entries[0].samples = 7;
    expect_step(OK, "");
}

/* Feeds 70 tokens and goes on for `n` samples under penalties; with `at` >= 0 the slot is forgotten
 * after so many of them and told its history, in two pieces. Returns a hash of what was sampled. */
static uint64_t text_with_history(int n, int at) {
    int32_t history[192];
    struct err_text err = {0};
    uint64_t h = 1;
    int known = 70, fed = 0;
    for (int i = 0; i < known; i++) history[i] = 100 + i * 7 % 50;
    for (int i = 0; i < n; i++) {
        if (i == 0 || i == at) {
            stepper_forget(stepper);
            admission = (struct msg_admit){
                .slot = 1,
                .slot_generation = 6 + (uint32_t)i,
                .n_prompt = 70,
                .sampling = {.top_p = 1, .repetition = 1.3f, .presence = 0.7f, .frequency = 0.4f}};
            if (stepper_admit(stepper, &admission, &err) < 0) fail_msg("%s", err.text);
        }
        for (int from = 0, to; i > 0 && i == at && from < fed; from = to) {
            to = from == 0 ? 64 : fed;
            step = (struct msg_step){.n_entries = 1, .n_tokens = to - from};
            step.n_pages = from == 0 ? 1 : (to + 63) / 64 - 1;
            for (int k = 0; k < step.n_pages; k++) step.pages[k] = (from + 63) / 64 + k;
            step.entries[0] = (struct msg_entry){.slot = 1,
                                                 .slot_generation = admission.slot_generation,
                                                 .pos = from,
                                                 .count = to - from,
                                                 .page_first = from / 64,
                                                 .n_pages = step.n_pages};
            memcpy(step.tokens, history + from, (size_t)(to - from) * sizeof *history);
            if (stepper_restore(stepper, &step, &err) < 0) fail_msg("%s", err.text);
        }
        step = (struct msg_step){.n_entries = 1, .n_tokens = known - fed};
        int pages = (fed + 63) / 64;
        step.n_pages = (known + 63) / 64 - pages;
        for (int k = 0; k < step.n_pages; k++) step.pages[k] = pages + k;
        step.entries[0] = (struct msg_entry){.slot = 1,
                                             .slot_generation = admission.slot_generation,
                                             .pos = fed,
                                             .count = known - fed,
                                             .samples = 1,
                                             .page_first = pages,
                                             .n_pages = step.n_pages};
        memcpy(step.tokens, history + fed, (size_t)(known - fed) * sizeof *history);
        expect_step(OK, "");
        fed = known;
        history[known++] = tokens.tokens[0].token;
        h = h * 31 + (uint64_t)tokens.tokens[0].token;
    }
    return h;
}

static void a_slot_told_its_history_goes_on_as_if_it_had_been_fed(void **state) {
    UNUSED(state);
    uint64_t want = text_with_history(40, -1);
    assert_int_equal(text_with_history(40, 1), want);
    assert_int_equal(text_with_history(40, 23), want);
    admission.sampling.repetition = 1;
}

static void a_history_out_of_place_is_refused(void **state) {
    UNUSED(state);
    struct err_text err = {0};
    good_step();
    assert_int_equal(stepper_restore(stepper, &step, &err), ERR_FORMAT); /* it samples */
    step.entries[0].samples = 0;
    step.entries[0].pos = 1;
    assert_int_equal(stepper_restore(stepper, &step, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "from position 0 on, found tokens at 1"));
    step.entries[0].pos = 0;
    assert_int_equal(stepper_restore(stepper, &step, &err), OK);
    assert_int_equal(stepper_restore(stepper, &step, &err), ERR_FORMAT); /* again */
    step.entries[0].pos = 4;
    step.tokens[1] = 4096;
    assert_int_equal(stepper_restore(stepper, &step, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "expected a token below 4096"));
}

static void a_copy_of_pages_or_ranks_that_there_are_not_is_refused(void **state) {
    UNUSED(state);
    static struct msg_copy c;
    struct err_text err = {0};
    c = (struct msg_copy){.n_runs = 1, .runs = {{0, PAGES}}};
    assert_int_equal(copy_pages(&model, coll, &c, &err), OK);
    c.runs[0].first = 1;
    assert_int_equal(copy_pages(&model, coll, &c, &err), ERR_FORMAT);
    assert_string_equal(err.text, "copy: expected pages below 4, found 4 from 1 on");
    c.runs[0] = (struct msg_run){0, 1};
    c.needs = 1; /* the root itself */
    assert_int_equal(copy_pages(&model, coll, &c, &err), ERR_FORMAT);
    c.needs = 2; /* a rank that there is not */
    assert_int_equal(copy_pages(&model, coll, &c, &err), ERR_FORMAT);
}

static void an_admission_out_of_place_is_refused(void **state) {
    UNUSED(state);
    const struct {
        int32_t *field;
        int32_t value;
        const char *sentence;
    } rows[] = {
        {&admission.slot, SLOTS, "admit: expected a slot below 3, found 3"},
        {&admission.slot, -1, "admit: expected a slot below 3, found -1"},
        {&admission.sampling.n_bias, LIMIT_BIAS + 1, "admit: expected up to 1024 biases"},
        {&admission.sampling.n_bias, -1, "admit: expected up to 1024 biases, found -1"},
        {&admission.sampling.top_logprobs, 21, "admit: expected up to 20 alternatives, found 21"},
        {&admission.sampling.bias_token[0], 4096,
         "admit: expected a bias on a token below 4096, found 4096"},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct err_text err = {0};
        admit_slot(0, 1);
        admission.sampling.n_bias = 1;
        *rows[i].field = rows[i].value;
        assert_int_equal(stepper_admit(stepper, &admission, &err), ERR_FORMAT);
        if (!strstr(err.text, rows[i].sentence))
            fail_msg("expected \"%s\", found \"%s\"", rows[i].sentence, err.text);
    }
}

static void an_aborted_step_can_be_fed_again_after_all(void **state) {
    UNUSED(state);
    good_step();
    expect_step(OK, "");
    int32_t token = tokens.tokens[0].token;
    good_step();
    coll_abort(coll);
    expect_step(ERR_ABORTED, "");
    coll_close(coll);
    assert_int_equal(coll_open_none(&coll), OK);
    expect_step(OK, "");
    assert_int_equal(tokens.tokens[0].token, token);
    stepper_forget(stepper);
    expect_step(ERR_FORMAT, "found nothing admitted");
}

/* Five tokens, then one fed by name and `n` sampled ones; returns the tokens' hash and the caches'. */
static uint64_t answer_of(int n, uint64_t *caches) {
    uint64_t h = 1;
    good_step();
    step.n_tokens = step.entries[0].count = 5;
    step.tokens[4] = 104;
    for (int i = 0; i <= n; i++) {
        expect_step(OK, "");
        h = h * 31 + (uint64_t)tokens.tokens[0].token;
        assert_int_equal(tokens.n, 1);
        step.entries[0] = (struct msg_entry){.slot = 1,
                                             .slot_generation = 5,
                                             .pos = 5 + i,
                                             .count = 1,
                                             .samples = 1,
                                             .token_at = -1};
        step.n_tokens = step.n_pages = 0;
    }
    const uint8_t *at = model.arena[ARENA_CACHES];
    *caches = 1;
    for (uint64_t i = 0; i < model.page_bytes * PAGES; i++) *caches = *caches * 31 + at[i];
    return h;
}

static void rows_of_no_slot_change_neither_answers_nor_caches(void **state) {
    UNUSED(state);
    uint64_t plain_caches, padded_caches;
    uint64_t plain = answer_of(6, &plain_caches);
    model.pad_rows = true;
    uint64_t padded = answer_of(6, &padded_caches);
    good_step(); /* five rows are six, and none of them is routed to an expert */
    step.n_tokens = step.entries[0].count = 5;
    step.tokens[4] = 104;
    expect_step(OK, "");
    model.pad_rows = false;
    assert_int_equal(padded, plain);
    assert_int_equal(padded_caches, plain_caches);
    assert_int_equal(model.batch.n_rows, 6);
    assert_int_equal(model.batch.n_out, 6);
    assert_int_equal(model.batch.slot[5], -1);
    assert_int_equal(model.batch.out_row[1], -1);
    for (int u = 0; u < model.hp.dims.n_used; u++)
        assert_int_equal(model.s.ids[5 * model.hp.dims.n_used + u], -1);
    for (int i = 1; i < 6; i++) assert_int_equal(model.s.token[i], -1);
}

static void submit(int pos) {
    struct err_text err = {0};
    if (pos > 0) {
        step.entries[0] = (struct msg_entry){.slot = 1,
                                             .slot_generation = 5,
                                             .pos = pos,
                                             .count = 1,
                                             .samples = 1,
                                             .token_at = -1};
        step.n_tokens = step.n_pages = 0;
        step.id++;
    }
    if (stepper_submit(stepper, coll, &step, NULL, &err) < 0) fail_msg("%s", err.text);
}

static void a_step_may_be_queued_before_the_last_is_read(void **state) {
    UNUSED(state);
    int32_t want[3];
    good_step();
    for (int i = 0; i < 3; i++) {
        submit(i ? 3 + i : 0);
        assert_int_equal(stepper_collect(stepper, coll, &tokens), OK);
        want[i] = tokens.tokens[0].token;
    }
    good_step();
    submit(0);
    submit(4);
    assert_int_equal(stepper_in_flight(stepper), 2);
    for (int i = 0; i < 3; i++) {
        assert_true(stepper_is_done(stepper));
        assert_int_equal(stepper_collect(stepper, coll, &tokens), OK);
        assert_int_equal(tokens.step_id, 9 + i);
        assert_int_equal(tokens.tokens[0].pos, 4 + i);
        assert_int_equal(tokens.tokens[0].token, want[i]);
        assert_int_equal(stepper_times(stepper).ahead, i > 0);
        if (i == 0) submit(5);
    }
    assert_int_equal(stepper_in_flight(stepper), 0);
}

static void steps_in_flight_in_vain_leave_the_slots_as_they_were(void **state) {
    UNUSED(state);
    good_step();
    expect_step(OK, "");
    int32_t first = tokens.tokens[0].token;
    submit(4);
    assert_int_equal(stepper_collect(stepper, coll, &tokens), OK);
    int32_t want = tokens.tokens[0].token;
    good_step();
    expect_step(OK, "");
    submit(4);
    submit(5);
    stepper_drop(stepper);
    assert_int_equal(stepper_in_flight(stepper), 0);
    step.entries[0].pos = 5;
    expect_step(ERR_FORMAT, "slot 1: expected to go on at position 4 of 192");
    step.entries[0].pos = 4;
    step.entries[0].token_at = 0; /* what was sampled last is the device's, and not taken back */
    step.tokens[0] = first;
    step.n_tokens = 1;
    expect_step(OK, "");
    assert_int_equal(tokens.tokens[0].token, want);
}

static void a_slot_given_away_is_not_touched_by_what_was_in_flight(void **state) {
    UNUSED(state);
    good_step();
    submit(0);
    admit_slot(1, 6);
    assert_int_equal(stepper_collect(stepper, coll, &tokens), OK);
    assert_int_equal(tokens.tokens[0].slot_generation, 5);
    step.entries[0].slot_generation = 6;
    step.entries[0].pos = 0;
    step.entries[0].count = step.entries[0].samples = 1;
    step.entries[0].token_at = -1;
    expect_step(ERR_FORMAT, "expected one token after a sample, found 1 and no sample");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_no_slot_change_neither_answers_nor_caches),
        cmocka_unit_test(a_step_may_be_queued_before_the_last_is_read),
        cmocka_unit_test(steps_in_flight_in_vain_leave_the_slots_as_they_were),
        cmocka_unit_test(a_slot_given_away_is_not_touched_by_what_was_in_flight),
        cmocka_unit_test(a_good_step_is_obeyed_and_goes_on),
        cmocka_unit_test(several_samples_of_one_entry_come_in_order),
        cmocka_unit_test(a_chunk_without_samples_answers_nothing),
        cmocka_unit_test(a_position_may_be_fed_again_but_not_skipped),
        cmocka_unit_test(every_index_out_of_place_is_refused),
        cmocka_unit_test(a_slot_named_twice_and_too_many_rows_are_refused),
        cmocka_unit_test(a_slot_told_its_history_goes_on_as_if_it_had_been_fed),
        cmocka_unit_test(a_history_out_of_place_is_refused),
        cmocka_unit_test(a_copy_of_pages_or_ranks_that_there_are_not_is_refused),
        cmocka_unit_test(an_admission_out_of_place_is_refused),
        cmocka_unit_test(an_aborted_step_can_be_fed_again_after_all),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
