/* tests/kernels/test_cuts.c: a small model of random weights, all matrices of one type, gives the
 * same logits on one rank and on two, four and eight, for every type; and what cannot be cut is
 * refused before anything is read.
 *
 * The widths are chosen so that types with blocks of 256 do not divide: experts are dealt out, and
 * of the dense width some ranks get nothing.
 */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/kernels/cut_model.h"
#include "worker/coll.h"
#include "worker/weights.h"

enum { ROWS = 5, OUTS = 2, RANKS_MAX = 8 };

/* A rounding of another order, relative to the largest logit; a block cut wrongly is 1. */
#define TOLERANCE 5e-5

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LIGHT 1
#else
#define LIGHT 0
#endif

/* ---- ranks as threads -------------------------------------------------------------------- */

struct rank {
    int rank, world, rc;
    struct model m;
    struct coll *coll;
    struct dump dump;
    float logits[OUTS * VOCAB]; /* [S, vocab] */
};

static void see_tensor(void *user, const char *name, int layer, const float *x, int rows,
                       int width) {
    struct rank *r = user;
    UNUSED(layer);
    if (strcmp(name, "logits") != 0) return;
    assert_int_equal(rows * width, OUTS * VOCAB);
    for (int part = 0; part < r->world; part++) /* [world, S, W] */
        for (int s = 0; s < OUTS; s++)
            memcpy(r->logits + s * VOCAB + part * width, x + (part * OUTS + s) * width,
                   (size_t)width * sizeof *x);
}

static void *rank_main(void *user) {
    struct rank *r = user;
    struct kbatch *b = &r->m.batch;
    b->n_rows = ROWS, b->n_out = OUTS, b->max_context = ROWS;
    for (int t = 0; t < ROWS; t++) b->token[t] = 7 * t + 3, b->pos[t] = t, b->slot[t] = 0;
    for (int s = 0; s < OUTS; s++) b->out_row[s] = ROWS - OUTS + s;
    r->m.seqs.sampling[0].top_p = r->m.seqs.sampling[0].repetition = 1;
    r->rc = forward(&r->m, r->coll, &r->dump);
    return NULL;
}

static int load(struct rank *r, const struct gguf *g, int rank, int world, struct err_text *err) {
    const struct model_options o = {
        .rank = rank, .world = world, .max_slots = 1, .max_rows = ROWS, .max_outs = OUTS};
    r->rank = rank;
    r->world = world;
    r->dump = (struct dump){.tensor = see_tensor, .user = r};
    return model_load(&r->m, g, &o, (struct load_progress){0}, err);
}

/* Runs the model on `world` ranks; returns the bytes of all ranks' feed-forward weights. */
static uint64_t run(const struct gguf *g, int world, struct rank *ranks) {
    const uint64_t bytes = coll_shm_bytes(world, ROWS * D * sizeof(float));
    uint64_t weights = 0;
    char path[64];
    pthread_t threads[RANKS_MAX];
    int fd = memfd_create("cuts", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    for (int i = 0; i < world; i++) {
        struct err_text err = {0};
        struct rank *r = &ranks[i];
        memset(r, 0, sizeof *r);
        if (load(r, g, i, world, &err) < 0) fail_msg("%s", err.text);
        if (model_alloc_caches(&r->m, 1, &err) < 0) fail_msg("%s", err.text);
        int rc = world == 1 ? coll_open_none(&r->coll)
                            : coll_open_shm(&r->coll, path, bytes, i, world, 1, &err);
        if (rc < 0) fail_msg("%s", err.text);
        for (int p = PLAN_DENSE; p <= PLAN_SHARED; p++) weights += r->m.group_bytes[p];
    }
    for (int i = 0; i < world; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    for (int i = 0; i < world; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < world; i++) assert_int_equal(ranks[i].rc, OK);
    close(fd);
    return weights;
}

static void drop(struct rank *ranks, int world) {
    for (int i = 0; i < world; i++) {
        coll_close(ranks[i].coll);
        model_unload(&ranks[i].m);
    }
}

static void compare(int type, int world, const float *one, const float *many) {
    double most = 0, apart = 0;
    for (int i = 0; i < OUTS * VOCAB; i++) {
        assert_true(isfinite(one[i]) && isfinite(many[i]));
        most = fmax(most, fabs((double)one[i]));
        apart = fmax(apart, fabs((double)one[i] - (double)many[i]));
    }
    assert_true(most > 0);
    if (apart > TOLERANCE * most)
        fail_msg("%s on %d ranks: expected the logits of one rank within %g of the largest, found "
                 "%g (OCTAVO_SEED=%llu)",
                 ktype_name(type), world, TOLERANCE, apart / most,
                 (unsigned long long)check_seed());
}

/* ---- the tests --------------------------------------------------------------------------- */

/* Every rank of the world holds some experts whole when blocks do not divide. */
static void check_dealt(int type, int world, const struct rank *ranks) {
    bool whole = EXPERT % (world * ktype_block_elems(type)) != 0;
    int64_t next = 0;
    for (int i = 0; i < world; i++) {
        const struct layer *b = &ranks[i].m.layers[1];
        assert_int_equal(b->gate_exps.rows, whole ? EXPERT : EXPERT / world);
        assert_int_equal(b->down_exps.cols, b->gate_exps.rows);
        assert_int_equal(b->first, whole ? next : 0);
        next += b->gate_exps.count;
        if (!whole) assert_int_equal(b->gate_exps.count, EXPERTS);
    }
    if (whole) assert_int_equal(next, EXPERTS);
}

static void ranks_share_every_type_and_agree_with_one(void **state) {
    UNUSED(state);
    struct rank *ranks = check_alloc(RANKS_MAX * sizeof *ranks);
    for (int type = 0; type < KT_MAX; type++) {
        if (!ktype_supported(type)) continue;
        if (LIGHT && type != KT_Q4_0 && type != KT_IQ3_S) continue;
        struct bytes b = model_bytes(type, 256, false);
        struct gguf *g = parse_model(&b);
        float one[OUTS * VOCAB];
        uint64_t whole = run(g, 1, ranks);
        memcpy(one, ranks[0].logits, sizeof one);
        drop(ranks, 1);
        for (int world = 2; world <= RANKS_MAX; world *= 2) {
            uint64_t weights = run(g, world, ranks);
            for (int i = 0; i < world; i++) compare(type, world, one, ranks[i].logits);
            check_dealt(type, world, ranks);
            assert_true(weights >= whole && weights <= whole + (uint64_t)world * 9 * ARENA_ALIGN);
            drop(ranks, world);
        }
        gguf_close(g);
        free(b.p);
    }
    free(ranks);
}

static void expect_refused(const struct gguf *g, const struct kernels *k, int world,
                           const char *sentence) {
    struct rank *r = check_alloc(sizeof *r);
    struct err_text err = {0};
    assert_int_equal(model_open(&r->m, 0, &err), OK);
    if (k) r->m.k = k;
    assert_int_equal(load(r, g, world - 1, world, &err), ERR_SETUP);
    assert_string_equal(err.text, sentence);
    assert_null(r->m.arena[ARENA_WEIGHTS]);
    model_unload(&r->m);
    free(r);
}

static void what_cannot_be_cut_or_multiplied_is_refused_before_reading(void **state) {
    UNUSED(state);
    struct kernels plain = *kernels_table(), even = plain;
    plain.takes_type = ktype_scalar;
    plain.name = "bare";
    even.takes_uneven = false;
    struct bytes narrow = model_bytes(KT_Q4_K, 64, false), wide = model_bytes(KT_IQ3_S, 256, false);
    struct gguf *g = parse_model(&narrow), *h = parse_model(&wide);
    expect_refused(g, NULL, 4,
                   "blk.0.attn_output.weight: expected 512 columns over 4 ranks to be whole blocks "
                   "of 256 (Q4_K), found 128 each");
    expect_refused(g, NULL, 3, "glm-dsa: expected attention heads to divide by 3 ranks, found 8");
    expect_refused(
        h, &even, 2,
        "blk.0.ffn_gate.weight: expected 768 rows over 2 ranks to be whole blocks of 256 "
        "of ffn_down, found 384 each");
    expect_refused(h, &plain, 1,
                   "token_embd.weight: expected a type that the bare backend multiplies, found "
                   "IQ3_S");
    gguf_close(g), gguf_close(h);
    free(narrow.p), free(wide.p);
}

/* The factors make up for each other but for the head's, and are powers of two. */
static void factors_beside_weights_are_applied_on_every_rank(void **state) {
    UNUSED(state);
    struct bytes bare = model_bytes(KT_NVFP4, 256, false),
                 scaled = model_bytes(KT_NVFP4, 256, true);
    struct gguf *g = parse_model(&bare), *h = parse_model(&scaled);
    struct rank *ranks = check_alloc(RANKS_MAX * sizeof *ranks);
    float half[OUTS * VOCAB];
    run(g, 1, ranks);
    for (int i = 0; i < OUTS * VOCAB; i++) half[i] = ranks[0].logits[i] / 2;
    drop(ranks, 1);
    for (int world = 1; world <= RANKS_MAX; world *= 2) {
        run(h, world, ranks);
        for (int i = 0; i < world; i++) {
            const struct layer *b = &ranks[i].m.layers[1];
            compare(KT_NVFP4, world, half, ranks[i].logits);
            assert_int_equal(b->v_b.scales, world < HEADS ? HEADS / world : 1);
            assert_int_equal(b->up_exps.scales, EXPERTS);
            assert_true(b->down_exps.scale[1] == 0.125f && b->q_b.scales == 0);
        }
        drop(ranks, world);
    }
    free(ranks);
    gguf_close(g), gguf_close(h);
    free(bare.p), free(scaled.p);
}

static void factors_of_another_number_are_refused(void **state) {
    UNUSED(state);
    struct bytes b = model_bytes(KT_NVFP4, 256, true);
    uint8_t *name = memmem(b.p, b.n, "blk.1.attn_v_b.scale", 20);
    memcpy(name, "blk.1.attn_q_b.scale", 20);
    struct gguf *g = parse_model(&b);
    struct hparams hp;
    struct err_text err = {0};
    assert_int_equal(model_read_hparams(&hp, g, &err), ERR_FORMAT);
    assert_string_equal(
        err.text, "cuts.gguf: blk.1.attn_q_b.scale: expected shape [1, 1, 1], found [8, 1, 1]");
    gguf_close(g);
    free(b.p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_share_every_type_and_agree_with_one),
        cmocka_unit_test(factors_beside_weights_are_applied_on_every_rank),
        cmocka_unit_test(factors_of_another_number_are_refused),
        cmocka_unit_test(what_cannot_be_cut_or_multiplied_is_refused_before_reading),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
