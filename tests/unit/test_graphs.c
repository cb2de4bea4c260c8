/* tests/unit/test_graphs.c: buckets, tiers, and what step graphs are counted as before memory is
 * allocated.
 *
 * The backend is a stand-in: the CPU's memory and sizes, operations that only count, and graphs
 * that are numbers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "worker/graphs.h"

#define GRAPHS 512

static struct kernels table;
static bool measuring, preparing;
static int operations, measured, allocations, n_graphs, room;
static uint64_t keys[GRAPHS], reserved;

#define COUNTED(op)                                                                                \
    static void count_##op(struct kctx *c, const struct kop_##op *o) {                             \
        UNUSED(c), UNUSED(o);                                                                      \
        assert_true(measuring || preparing);                                                       \
        operations++;                                                                              \
    }
COUNTED(feed)
COUNTED(angles)
COUNTED(embed)
COUNTED(norm)
COUNTED(head_matmul)
COUNTED(attn_prep)
COUNTED(rope)
COUNTED(select)
COUNTED(attend)
COUNTED(swiglu)
COUNTED(experts_up)
COUNTED(experts_down)
COUNTED(gather)
COUNTED(sample)

static void count_matmul(struct kctx *c, const struct kop_matmul *jobs, int n) {
    UNUSED(c), UNUSED(jobs), UNUSED(n);
    assert_true(measuring || preparing);
    operations++;
}

static void measure_begin(struct kctx *c) {
    UNUSED(c);
    assert_int_equal(allocations, 0);
    measuring = true;
    operations = 0;
}

static void measure_end(struct kctx *c, struct kneeds *out) {
    UNUSED(c);
    measuring = false;
    measured++;
    out->work_bytes = 1000 + (size_t)measured % 7; /* the largest counts */
    out->graph_bytes = (size_t)operations * 10;
}

static bool work_reserve(struct kctx *c, size_t bytes) {
    UNUSED(c);
    reserved = bytes;
    return true;
}

static bool known(uint64_t key) {
    for (int i = 0; i < n_graphs; i++)
        if (keys[i] == key) return true;
    return false;
}

static bool graph_begin(struct kctx *c, uint64_t key) {
    UNUSED(c);
    return known(key);
}

static bool graph_prepare(struct kctx *c, uint64_t key) {
    UNUSED(c);
    preparing = !known(key) && n_graphs < room;
    return preparing;
}

static void graph_end(struct kctx *c, uint64_t key) {
    UNUSED(c);
    preparing = false;
    keys[n_graphs++] = key;
}

static dptr counted_alloc(struct kctx *c, size_t bytes) {
    allocations++;
    return kernels_table()->alloc(c, bytes);
}

static void make_table(void) {
    table = *kernels_table();
    table.alloc = counted_alloc;
    table.measure_begin = measure_begin, table.measure_end = measure_end;
    table.work_reserve = work_reserve;
    table.graph_begin = graph_begin, table.graph_prepare = graph_prepare;
    table.graph_end = graph_end;
    table.feed = count_feed, table.angles = count_angles, table.embed = count_embed;
    table.norm = count_norm, table.matmul = count_matmul, table.head_matmul = count_head_matmul;
    table.attn_prep = count_attn_prep, table.rope = count_rope, table.select = count_select;
    table.attend = count_attend, table.swiglu = count_swiglu;
    table.experts_up = count_experts_up, table.experts_down = count_experts_down;
    table.gather = count_gather, table.sample = count_sample;
    operations = measured = allocations = n_graphs = 0;
    room = GRAPHS;
}

/* A rank of the demonstration model on the stand-in, for 5 slots and 200 positions. */
static void load_of(struct model *m, int world) {
    char path[512], why[64];
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    struct gguf *g;
    struct err_text err = {0};
    const struct model_options o = {
        .world = world, .max_slots = 5, .max_rows = 80, .max_outs = 20, .context = 200};
    snprintf(path, sizeof path, "%s/tests/models/tiny.gguf", root ? root : ".");
    make_table();
    *m = (struct model){.k = &table, .ctx = table.open(0, why, sizeof why)};
    if (gguf_open(&g, path, &err) < 0) fail_msg("%s", err.text);
    if (model_load(m, g, &o, (struct load_progress){0}, &err) < 0) fail_msg("%s", err.text);
    gguf_close(g);
}

static void load(struct model *m) {
    load_of(m, 1);
}

/* ---- tests ------------------------------------------------------------------------------- */

static void a_bucket_is_the_smallest_that_holds_the_rows(void **state) {
    UNUSED(state);
    static const int want[] = {1,  2,  3,  4,  6,  6,  8,  8,  12, 12, 12, 12, 16, 16, 16, 16,
                               24, 24, 24, 24, 24, 24, 24, 24, 32, 32, 32, 32, 32, 32, 32, 32};
    for (int rows = 1; rows <= (int)ARRAY_LEN(want); rows++)
        assert_int_equal(graphs_bucket(rows), want[rows - 1]);
    assert_int_equal(graphs_bucket(33), 48);
    assert_int_equal(graphs_bucket(48), 48);
    assert_int_equal(graphs_bucket(49), 64);
    assert_int_equal(graphs_bucket(64), 64);
    assert_int_equal(graphs_bucket(65), 0);
    int n = 0;
    for (int b = graphs_next_bucket(0); b; b = graphs_next_bucket(b)) n++;
    assert_int_equal(n, 12);
}

static void rows_are_padded_only_as_far_as_the_batch_has_room(void **state) {
    UNUSED(state);
    struct model m = {.max_rows = 40, .max_outs = 20};
    assert_int_equal(graphs_padded(&m, 5), 6);
    assert_int_equal(graphs_padded(&m, 16), 16);
    assert_int_equal(graphs_padded(&m, 17), 17); /* 24 samples do not fit */
    m.max_outs = 64;
    assert_int_equal(graphs_padded(&m, 17), 24);
    assert_int_equal(graphs_padded(&m, 33), 33); /* 48 rows do not fit */
    m.max_rows = 64;
    assert_int_equal(graphs_padded(&m, 65), 65);
}

static void tiers_meet_the_selection_and_the_longest_context(void **state) {
    UNUSED(state);
    struct model m = {.max_context = 202752, .hp.dims.ix_topk = 2048};
    const struct {
        int context, tier;
    } rows[] = {{1, 512},     {512, 512},    {513, 1024},     {1025, 2048},     {2048, 2048},
                {2049, 8192}, {8193, 32768}, {32769, 131072}, {131073, 202752}, {202752, 202752}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++)
        if (graphs_tier(&m, rows[i].context) != rows[i].tier)
            fail_msg("context %d: expected tier %d, found %d", rows[i].context, rows[i].tier,
                     graphs_tier(&m, rows[i].context));
    m.hp.dims.ix_topk = 0;
    assert_int_equal(graphs_tier(&m, 2049), 8192);
    m.hp.dims.ix_topk = 32; /* less than a page */
    assert_int_equal(graphs_tier(&m, 1), 64);
    assert_int_equal(graphs_tier(&m, 65), 256);
    m.max_context = 100;
    assert_int_equal(graphs_tier(&m, 65), 100);
}

static void workspace_and_graphs_are_counted_before_memory_is_allocated(void **state) {
    UNUSED(state);
    struct model m;
    char *text = NULL;
    size_t n = 0;
    load(&m);
    assert_true(measured >= m.n_graphs && m.n_graphs > 0);
    assert_int_equal(m.n_graphs, graphs_count(&m));
    assert_int_equal(m.work_bytes, 1006);
    assert_int_equal(reserved, m.work_bytes);
    assert_true(m.graph_bytes > (uint64_t)m.n_graphs * 10 * (uint64_t)m.hp.n_layers);
    FILE *f = open_memstream(&text, &n);
    model_print_plan(f, &m);
    fclose(f);
    if (!strstr(text, "\n  workspace ") || !strstr(text, "\n  step graphs "))
        fail_msg("expected rows for workspace and step graphs, found:\n%s", text);
    free(text);
    uint64_t alone = m.graph_bytes;
    model_unload(&m);
    load_of(&m, 2);
    assert_int_equal(m.graph_bytes, alone);
    model_unload(&m);
}

static void all_pairs_are_captured_once(void **state) {
    UNUSED(state);
    struct model m;
    struct coll *coll;
    struct graphs_report r;
    load(&m);
    assert_int_equal(coll_open_none(&coll), OK);
    assert_int_equal(graphs_capture(&m, coll, NULL, NULL, &r), OK);
    assert_int_equal(r.made, m.n_graphs);
    assert_int_equal(n_graphs, m.n_graphs);
    /* 5 slots: buckets 1, 2, 3, 4, 6; whatever context a step of theirs has is known */
    for (int rows = 1; rows <= 5; rows++)
        for (int context = 1; context <= 200; context++) {
            m.batch.n_rows = m.batch.n_out = graphs_padded(&m, rows);
            m.batch.max_context = context;
            assert_int_equal(forward(&m, coll, NULL), OK); /* an operation run would fail */
        }
    assert_int_equal(graphs_capture(&m, coll, NULL, NULL, &r), OK);
    assert_int_equal(r.made, 0);
    coll_close(coll);
    model_unload(&m);
}

static int asked;

static bool stop_at_third(void *user) {
    UNUSED(user);
    return ++asked == 3;
}

static void what_was_not_captured_is_captured_later(void **state) {
    UNUSED(state);
    struct model m;
    struct coll *coll;
    struct graphs_report r;
    load(&m);
    asked = 0;
    assert_int_equal(coll_open_none(&coll), OK);
    assert_int_equal(graphs_capture(&m, coll, stop_at_third, NULL, &r), ERR_ABORTED);
    assert_int_equal(r.made, 2);
    room = 3; /* what does not fit is no failure */
    assert_int_equal(graphs_capture(&m, coll, NULL, NULL, &r), OK);
    assert_int_equal(r.made, 1);
    room = GRAPHS;
    assert_int_equal(graphs_capture(&m, coll, NULL, NULL, &r), OK);
    assert_int_equal(r.made, m.n_graphs - 3);
    coll_close(coll);
    model_unload(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_bucket_is_the_smallest_that_holds_the_rows),
        cmocka_unit_test(rows_are_padded_only_as_far_as_the_batch_has_room),
        cmocka_unit_test(tiers_meet_the_selection_and_the_longest_context),
        cmocka_unit_test(workspace_and_graphs_are_counted_before_memory_is_allocated),
        cmocka_unit_test(all_pairs_are_captured_once),
        cmocka_unit_test(what_was_not_captured_is_captured_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
