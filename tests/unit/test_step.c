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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_step_is_obeyed_and_goes_on),
        cmocka_unit_test(several_samples_of_one_entry_come_in_order),
        cmocka_unit_test(a_chunk_without_samples_answers_nothing),
        cmocka_unit_test(a_position_may_be_fed_again_but_not_skipped),
        cmocka_unit_test(every_index_out_of_place_is_refused),
        cmocka_unit_test(a_slot_named_twice_and_too_many_rows_are_refused),
        cmocka_unit_test(an_admission_out_of_place_is_refused),
        cmocka_unit_test(an_aborted_step_can_be_fed_again_after_all),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
