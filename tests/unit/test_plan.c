/* tests/unit/test_plan.c: what `octavo plan` counts from a header is what a CPU worker allocates,
 * within two in a hundred, for every number of ranks, also where shares are uneven.
 */
#include "coordinator/plan.h"
#include "tests/kernels/cut_model.h"
#include "worker/model.h"

#define APART 0.02

static struct gguf *tiny;

static int open_tiny(void **state) {
    (void)state;
    char path[4096];
    struct err_text err;
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    snprintf(path, sizeof path, "%s/tests/models/tiny.gguf", root ? root : ".");
    if (gguf_open(&tiny, path, &err) < 0) fail_msg("%s", err.text);
    return 0;
}

static int close_tiny(void **state) {
    (void)state;
    gguf_close(tiny);
    return 0;
}

static struct plan_ask ask_of(int ranks, int64_t context, int seqs, int rows) {
    return (struct plan_ask){.ranks = ranks,
                             .devices = 1,
                             .memory_bytes = (uint64_t)64 << 30,
                             .bytes_per_s = 1e11,
                             .context = context,
                             .max_seqs = seqs,
                             .max_rows = rows};
}

static struct plan *made(const struct gguf *g, const struct plan_ask *ask) {
    struct plan *p = check_alloc(sizeof *p);
    struct err_text err = {0};
    if (plan_make(p, g, ask, &err) < 0) fail_msg("%s", err.text);
    return p;
}

static void check_close(const char *what, int ranks, uint64_t allocated, uint64_t planned) {
    double apart = fabs((double)planned - (double)allocated);
    if (apart > APART * (double)allocated)
        fail_msg("%s of the fullest of %d ranks: expected %llu bytes as allocated, found %llu",
                 what, ranks, (unsigned long long)allocated, (unsigned long long)planned);
}

/* Loads every rank as a worker would, and keeps the fullest one's numbers. */
static void compare(const struct gguf *g, int ranks, int64_t context, int seqs, int rows) {
    const struct plan_ask ask = ask_of(ranks, context, seqs, rows);
    struct plan *p = made(g, &ask);
    uint64_t weights = 0, scratch = 0, page = 0;
    for (int rank = 0; rank < ranks; rank++) {
        struct model m = {0};
        struct err_text err = {0};
        const struct model_options o = {.rank = rank,
                                        .world = ranks,
                                        .max_slots = seqs,
                                        .max_rows = rows,
                                        .max_outs = MIN(MIN(4 * seqs, rows), LIMIT_STEP_SAMPLES),
                                        .context = context};
        if (model_load(&m, g, &o, (struct load_progress){0}, &err) < 0) fail_msg("%s", err.text);
        weights = MAX(weights, m.weight_bytes);
        scratch = MAX(scratch, m.scratch_bytes);
        page = MAX(page, m.page_bytes);
        model_unload(&m);
    }
    check_close("weights", ranks, weights, p->weight_bytes);
    check_close("scratch", ranks, scratch, p->scratch_bytes);
    check_close("a cache page", ranks, page, p->page_bytes);
    assert_true(p->fits);
    free(p);
}

static void the_demonstration_model_takes_what_was_planned(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        compare(tiny, ranks, 0, 64, 512);
        compare(tiny, ranks, 1000, 3, 64);
    }
    compare(tiny, 2, 4096, 256, 2048);
}

static void uneven_shares_take_what_was_planned(void **state) {
    (void)state;
    static const int types[] = {KT_F16, KT_Q4_0, KT_IQ2_XXS, KT_IQ1_M, KT_MXFP4, KT_NVFP4};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        struct bytes b = model_bytes(types[i], 256, false);
        struct gguf *g = parse_model(&b);
        for (int ranks = 1; ranks <= 8; ranks *= 2) compare(g, ranks, 0, 4, 16);
        gguf_close(g);
        free(b.p);
    }
}

static void what_does_not_split_is_said(void **state) {
    (void)state;
    struct bytes b = model_bytes(KT_IQ3_S, 64, false);
    struct gguf *g = parse_model(&b);
    struct plan_ask ask = ask_of(4, 0, 4, 16);
    struct plan *p = made(g, &ask);
    assert_false(p->fits);
    assert_true(p->dealt);
    int refused = 0, dealt = 0;
    for (int i = 0; i < p->n_notes; i++) {
        refused += p->notes[i].refused &&
                   strcmp(p->notes[i].tensor, "blk.0.attn_output.weight") == 0 &&
                   p->notes[i].tensors == 2;
        dealt += !p->notes[i].refused && strstr(p->notes[i].why, "dealt out whole") != NULL;
    }
    assert_int_equal(refused, 1);
    assert_int_equal(dealt, 3);
    free(p);
    ask = ask_of(1, 0, 4, 16);
    ask.cuda = true;
    p = made(g, &ask);
    assert_true(p->fits && p->n_notes == 0);
    free(p);
    gguf_close(g);
    free(b.p);
}

static void memory_bounds_pages_and_batches_share_them(void **state) {
    (void)state;
    struct plan_ask ask = ask_of(2, 0, 64, 512);
    struct plan *p = made(tiny, &ask);
    uint64_t beside = p->device_bytes;
    assert_true(p->pages > 0 && p->batch_at_context > 0);
    for (int i = 1; i < PLAN_BATCHES; i++) {
        const struct plan_batch *a = &p->batches[i - 1], *b = &p->batches[i];
        assert_int_equal(b->batch, 2 * a->batch);
        assert_true(b->context <= a->context && b->read_bytes > a->read_bytes);
        assert_true(b->floor_s > a->floor_s && b->step_s >= b->floor_s);
        assert_true(b->read_bytes < 2 * a->read_bytes); /* weights are shared */
    }
    free(p);
    ask.memory_bytes = beside;
    p = made(tiny, &ask);
    assert_false(p->fits);
    assert_int_equal(p->pages, 0);
    free(p);
    ask.memory_bytes = beside + 100 * 8 * 4 * 64 * 1000;
    p = made(tiny, &ask);
    assert_true(p->fits && p->pages < 1000);
    free(p);
    struct err_text err = {0};
    struct plan q;
    ask.ranks = 3;
    assert_int_equal(plan_make(&q, tiny, &ask, &err), ERR_SETUP);
    assert_string_equal(err.text, "--tp: expected a divisor of 8 heads and 4096 words, found 3");
    ask = ask_of(1, 5000, 4, 16);
    assert_int_equal(plan_make(&q, tiny, &ask, &err), ERR_SETUP);
    assert_string_equal(err.text, "--ctx: expected at most the model's 4096 tokens, found 5000");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_demonstration_model_takes_what_was_planned),
        cmocka_unit_test(uneven_shares_take_what_was_planned),
        cmocka_unit_test(what_does_not_split_is_said),
        cmocka_unit_test(memory_bounds_pages_and_batches_share_them),
    };
    return cmocka_run_group_tests(tests, open_tiny, close_tiny);
}
