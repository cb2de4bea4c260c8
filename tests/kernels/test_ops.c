/* tests/kernels/test_ops.c: the operations that are neither products, attention nor sampling, the
 * exponential, the backend's memory; and the list of checks, one for each slot of the table.
 */
#include "tests/kernels/check.h"

/* Which test stands for which slot. The list is as long as the table, and a test reads the sources
 * to see that each of them is there. */
static const struct slot_check {
    const char *slot, *file, *test;
} slot_checks[] = {
    {"feed", "test_ops.c", "feeding_replaces_and_counts_tokens"},
    {"angles", "test_ops.c", "angles_are_exact_at_large_positions"},
    {"embed", "test_ops.c", "embedding_is_the_decoded_row"},
    {"norm", "test_ops.c", "norms_are_the_formula"},
    {"matmul", "test_matmul.c", "products_of_every_type_are_the_plain_dot_products_bit_by_bit"},
    {"head_matmul", "test_matmul.c", "heads_multiply_their_own_part_of_a_row"},
    {"attn_prep", "test_attention.c", "caches_hold_normed_latents_and_rotated_keys"},
    {"rope", "test_attention.c", "queries_are_rotated_where_the_layout_says"},
    {"select", "test_attention.c",
     "the_highest_scores_are_selected_and_ties_go_to_the_lower_position"},
    {"attend", "test_attention.c", "attention_is_the_softmax_over_the_selected_positions"},
    {"swiglu", "test_ops.c", "swiglu_is_the_formula"},
    {"experts_up", "test_ops.c", "experts_are_the_formula_whatever_rows_are_together"},
    {"experts_down", "test_ops.c", "experts_are_the_formula_whatever_rows_are_together"},
    {"gather", "test_ops.c", "gathering_copies_rows_and_zeroes_padding"},
    {"sample", "test_sample.c", "tokens_are_those_of_the_rule"},
};
_Static_assert(sizeof slot_checks / sizeof slot_checks[0] == K_OPERATIONS,
               "a slot without a check");
_Static_assert((sizeof(struct kernels) - offsetof(struct kernels, feed)) / sizeof(void (*)(void)) ==
                   K_OPERATIONS,
               "K_OPERATIONS counts the slots of struct kernels");

static char *source_of(const char *name) {
    char path[4096];
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    snprintf(path, sizeof path, "%s/%s", root ? root : ".", name);
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s: expected a readable file", path);
    char *text = check_alloc(1 << 20);
    assert_true(fread(text, 1, (1 << 20) - 1, f) > 0);
    fclose(f);
    return text;
}

static void every_slot_has_a_check(void **state) {
    (void)state;
    char *header = source_of("kernels/kernels.h"), what[256], file[256];
    for (int i = 0; i < K_OPERATIONS; i++) {
        snprintf(what, sizeof what, "    void (*%s)(struct kctx *", slot_checks[i].slot);
        if (!strstr(header, what)) fail_msg("kernels.h: expected slot %s", slot_checks[i].slot);
        snprintf(file, sizeof file, "tests/kernels/%s", slot_checks[i].file);
        snprintf(what, sizeof what, "cmocka_unit_test(%s)", slot_checks[i].test);
        char *text = source_of(file);
        if (!strstr(text, what))
            fail_msg("%s: expected %s for slot %s", file, what, slot_checks[i].slot);
        free(text);
    }
    free(header);
}

static double ulps(float found, double exact) {
    int exponent;
    frexp(exact, &exponent);
    double ulp = ldexp(1, exponent < -125 ? -149 : exponent - 24);
    return fabs((double)found - exact) / ulp;
}

static void the_exponential_is_within_two_ulps_everywhere(void **state) {
    (void)state;
    double worst = 0;
    for (uint32_t bits = 0; bits < 0x42D00000; bits += 4099) { /* |x| from 0 to 104, both signs */
        for (uint32_t sign = 0; sign < 2; sign++) {
            float x;
            uint32_t b = bits | sign << 31;
            memcpy(&x, &b, 4);
            double exact = exp((double)x);
            if (exact > 3.4028234e38) continue;
            double u = ulps(exp_plain(x), exact);
            if (u > worst) worst = u;
            if (u > 2)
                fail_msg("exp(%a): expected %a, found %a", (double)x, exact, (double)exp_plain(x));
        }
    }
    if (getenv("OCTAVO_VERBOSE")) print_message("largest error of exp: %.3f ulp\n", worst);
    assert_true(exp_plain(0) == 1 && exp_plain(-0.0f) == 1);
    assert_true(exp_plain(89) == INFINITY && exp_plain(INFINITY) == INFINITY);
    assert_true(same_bits(exp_plain(-INFINITY), 0) && same_bits(exp_plain(-1e30f), 0));
    assert_true(isnan(exp_plain(NAN)));
}

static void instruction_sets_give_the_same_exponentials(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(40);
    for (int n = 0; n <= 67; n++) {
        float x[67], y[67], lanes[K_LANES] = {0}, expected[67], shift = rng_float(&rng),
                            factor = rng_float(&rng);
        for (int i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)rng_next(&rng);
            memcpy(&x[i], &bits, 4); /* any float, NaN and infinities too */
            if (n % 2) x[i] = 100 * rng_float(&rng);
            expected[i] = exp_plain((x[i] - shift) * factor);
            lanes[i % K_LANES] = lanes[i % K_LANES] + expected[i];
        }
        float sum = dot_combine(lanes), most = -INFINITY;
        for (int i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
        for (int i = 0; i < n_ctx; i++) {
            float found = ctx[i]->isa->exp(y, x, shift, factor, n);
            check_same("exp", expected, y, n);
            check_same("sum of exp", &sum, &found, 1);
            found = ctx[i]->isa->max(x, n);
            check_same("max", &most, &found, 1);
        }
    }
}

static void inner_loops_of_odd_lengths_agree_with_plain_loops(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(41);
    for (int n = 0; n <= 200; n += n < 40 ? 1 : 23) {
        float x[200], g[200], y[200], found[200], expected[200], w = rng_float(&rng), p[5];
        const float *rows[5];
        static float block[5][200];
        rng_fill(&rng, x, 200), rng_fill(&rng, g, 200), rng_fill(&rng, y, 200),
            rng_fill(&rng, p, 5);
        for (int u = 0; u < 5; u++) rng_fill(&rng, block[u], 200), rows[u] = block[u];
        for (int i = 0; i < n_ctx; i++) {
            const struct cpu_isa *isa = ctx[i]->isa;
            float dot = dot_plain(x, g, n), found_dot = isa->dot(x, g, n);
            check_same("dot", &dot, &found_dot, 1);
            for (int c = 0; c < n; c++) expected[c] = fmaf(w, x[c], y[c]);
            memcpy(found, y, sizeof y);
            isa->add_scaled(found, x, w, n);
            check_same("add_scaled", expected, found, n);
            for (int c = 0; c < n; c++) expected[c] = fmaf(w, x[c] > 0 ? x[c] : 0, y[c]);
            memcpy(found, y, sizeof y);
            isa->add_relu(found, x, w, n);
            check_same("add_relu", expected, found, n);
            for (int c = 0; c < n; c++) expected[c] = x[c] * w;
            isa->scale(found, x, w, n);
            check_same("scale", expected, found, n);
            memcpy(expected, y, sizeof y), memcpy(found, y, sizeof y);
            for (int c = 0; c < n; c++)
                for (int u = 0; u < 5; u++) expected[c] = fmaf(p[u], rows[u][c], expected[c]);
            isa->accumulate(found, n, rows, p, 5);
            check_same("accumulate", expected, found, n);
            for (int c = n; c < 200; c++) assert_true(found[c] == y[c]);
        }
    }
}

static void feeding_replaces_and_counts_tokens(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    enum { VOCAB = 11 };
    uint16_t prompt[2 * VOCAB] = {0}, output[2 * VOCAB] = {0};
    int32_t last[2] = {7, 99};
    struct ksampling params[2] = {{.n_prompt = 3}, {.n_prompt = 0}};
    struct kseqs q = {.max_slots = 2,
                      .vocab = VOCAB,
                      .last_token = last,
                      .seen_prompt = prompt,
                      .seen_output = output,
                      .sampling = params};
    int32_t token[7] = {4, 4, 5, K_TOKEN_LAST, 4, 10, K_TOKEN_LAST};
    int32_t pos[7] = {1, 2, 3, 4, 0, 0, 9}, slot[7] = {0, 0, 0, 0, 1, -1, 1};
    struct kbatch b = {.n_rows = 7, .token = token, .pos = pos, .slot = slot};
    output[VOCAB + 4] = UINT16_MAX;
    cpu_feed(ctx[0], &(struct kop_feed){&b, &q});
    check_same_ints("tokens", (const int32_t[]){4, 4, 5, 7, 4, 10, 0}, token, 7);
    assert_true(prompt[4] == 1 && prompt[5] == 0 && output[4] == 0 && output[5] == 1 &&
                output[7] == 1);
    assert_true(output[VOCAB + 4] == UINT16_MAX && output[10] == 0 && output[VOCAB + 10] == 0);
    for (int i = 0; i < VOCAB; i++) assert_int_equal(prompt[VOCAB + i], 0);
}

static void angles_are_exact_at_large_positions(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    double freq[3] = {1, 0.01, 1e-5};
    int32_t pos[3] = {0, 200001, 5}, slot[3] = {0, 1, -1};
    float a[3][3][2];
    struct kbatch b = {.n_rows = 3, .pos = pos, .slot = slot};
    cpu_angles(ctx[0], &(struct kop_angles){&b, freq, &a[0][0][0], 3});
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < 3; i++) {
            float expected[2] = {(float)cos(pos[t] * freq[i]), (float)sin(pos[t] * freq[i])};
            check_same("angle", expected, a[t][i], 2);
        }
    check_near("cos 200001", 0.5990460151, (double)a[1][0][0], 6e-8);
}

static void embedding_is_the_decoded_row(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(42);
    enum { VOCAB = 9, D = 512 };
    uint8_t *bytes = check_alloc((size_t)(VOCAB * ktype_row_bytes(KT_Q6_K, D)));
    float h[3][D], expected[D], zero[D] = {0};
    int32_t token[3] = {8, 1000, 3}, slot[3] = {0, -1, 1};
    struct kmat table = {KT_Q6_K, 1, VOCAB, D, bytes, 0, 0, NULL};
    struct kbatch b = {.n_rows = 3, .token = token, .slot = slot};
    check_random_weights(&rng, KT_Q6_K, bytes, VOCAB * D);
    for (int i = 0; i < n_ctx; i++) {
        cpu_embed(ctx[i], &(struct kop_embed){&b, &table, h[0]});
        for (int t = 0; t < 3; t += 2) {
            kdequant_row(KT_Q6_K, bytes + token[t] * ktype_row_bytes(KT_Q6_K, D), expected, D);
            check_same("embed", expected, h[t], D);
        }
        check_same("padding", zero, h[1], D);
    }
    free(bytes);
}

static void norms_are_the_formula(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(43);
    static const int widths[] = {1, 17, 64, 301};
    for (int k = 0; k < 4; k++) {
        int n = widths[k];
        float h[2 * 301], add[2 * 301], gain[301], sum[2 * 301], y[2 * 301], first[2 * 301];
        rng_fill(&rng, h, 2 * n), rng_fill(&rng, add, 2 * n), rng_fill(&rng, gain, n);
        for (int i = 0; i < n_ctx; i++) {
            memcpy(sum, h, sizeof h);
            cpu_norm(ctx[i], &(struct kop_norm){2, n, sum, add, gain, 1e-5f, y});
            for (int t = 0; t < 2; t++) {
                double mean = 0;
                for (int c = t * n; c < (t + 1) * n; c++) {
                    assert_true(sum[c] == h[c] + add[c]);
                    mean += (double)sum[c] * (double)sum[c] / n;
                }
                for (int c = 0; c < n; c++)
                    check_near("norm", (double)sum[t * n + c] * (double)gain[c] / sqrt(mean + 1e-5),
                               (double)y[t * n + c], 2e-6);
            }
            if (i == 0) memcpy(first, y, sizeof y);
            check_same("norm", first, y, 2 * n);
            cpu_norm(ctx[i], &(struct kop_norm){2, n, sum, NULL, gain, 1e-5f, sum}); /* in place */
            check_same("norm in place", first, sum, 2 * n);
        }
    }
}

static void swiglu_is_the_formula(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(44);
    enum { T = 3, WIDTH = 37 };
    float gate[T * WIDTH], up[T * WIDTH], act[T * WIDTH], expected[T * WIDTH];
    rng_fill(&rng, gate, T * WIDTH), rng_fill(&rng, up, T * WIDTH);
    for (int i = 0; i < T * WIDTH; i++) gate[i] *= i % 5 ? 8 : 200;
    for (int i = 0; i < T * WIDTH; i++) expected[i] = silu_plain(gate[i]) * up[i];
    for (int i = 0; i < T * WIDTH; i++)
        check_near("silu", (double)gate[i] / (1 + exp(-(double)gate[i])) * (double)up[i],
                   (double)expected[i], fabs((double)expected[i]) * 1e-6 + 1e-37);
    for (int i = 0; i < n_ctx; i++) {
        cpu_swiglu(ctx[i], &(struct kop_swiglu){T, WIDTH, gate, up, act});
        check_same("swiglu", expected, act, T * WIDTH);
    }
    cpu_swiglu(ctx[0], &(struct kop_swiglu){T, WIDTH, gate, up, gate}); /* in place */
    check_same("swiglu in place", expected, gate, T * WIDTH);
}

static void gathering_copies_rows_and_zeroes_padding(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    float x[3][5], y[4][5], zero[5] = {0};
    int32_t out[4] = {2, -1, 0, 2};
    struct rng rng = rng_new(45);
    struct kbatch b = {.n_rows = 3, .n_out = 4, .out_row = out};
    rng_fill(&rng, x[0], 15), rng_fill(&rng, y[0], 20);
    cpu_gather(ctx[0], &(struct kop_gather){&b, 5, x[0], y[0]});
    for (int s = 0; s < 4; s++) check_same("gather", out[s] < 0 ? zero : x[out[s]], y[s], 5);
}

/* A layer of experts; F and FS are not multiples of anything but the blocks, D crosses a row block.
 */
enum { E = 12, U = 3, D = 96, F = 160, FS = 32, TOKENS = 70 };

struct layer {
    struct kdims d;
    struct kmat gate, up, down, shared;
    float logits[TOKENS * E], bias[E], x[TOKENS * D], shared_act[TOKENS * FS];
    int32_t slot[TOKENS], ids[TOKENS * U];
    float weights[TOKENS * U], act[TOKENS * U * F], y[TOKENS * D];
};

static struct kmat layer_mat(struct rng *rng, int type, int64_t count, int64_t rows, int64_t cols) {
    struct kmat m = {
        type, count, rows, cols, check_alloc((size_t)(count * rows * ktype_row_bytes(type, cols))),
        0, 0, NULL};
    check_random_weights(rng, type, m.data, count * rows * cols);
    return m;
}

static struct layer *layer_new(struct rng *rng) {
    struct layer *l = check_alloc(sizeof *l);
    l->d = (struct kdims){.n_experts = E,
                          .n_used = U,
                          .n_groups = 1,
                          .n_groups_used = 1,
                          .gating = 2,
                          .norm_weights = true,
                          .weights_scale = 2.5f};
    l->gate = layer_mat(rng, KT_Q8_0, E, F, D);
    l->up = layer_mat(rng, KT_IQ4_NL, E, F, D);
    l->down = layer_mat(rng, KT_Q5_0, E, D, F);
    l->shared = layer_mat(rng, KT_Q8_0, 1, D, FS);
    rng_fill(rng, l->logits, TOKENS * E), rng_fill(rng, l->bias, E),
        rng_fill(rng, l->x, TOKENS * D);
    rng_fill(rng, l->shared_act, TOKENS * FS);
    return l;
}

static void layer_free(struct layer *l) {
    free(l->gate.data), free(l->up.data), free(l->down.data), free(l->shared.data);
    free(l);
}

/* Rows from .. from + n of the layer's inputs, in one step. */
static void layer_run(struct kctx *c, struct layer *l, int from, int n) {
    struct kbatch b = {.n_rows = n, .slot = l->slot + from};
    struct kbounds bounds = {n, n, 1, 1};
    void *scratch = check_alloc(cpu_experts_scratch(&l->d, &bounds));
    cpu_experts_up(c,
                   &(struct kop_experts_up){&b, &l->d, l->logits + from * E, l->bias, &l->gate,
                                            &l->up, l->x + from * D, l->ids + from * U,
                                            l->weights + from * U, l->act + from * U * F, scratch,
                                            0});
    cpu_experts_down(
        c, &(struct kop_experts_down){&b, &l->d, l->ids + from * U, l->weights + from * U, &l->down,
                                      l->act + from * U * F, &l->shared, l->shared_act + from * FS,
                                      l->y + from * D, scratch, 0});
    free(scratch);
}

static float mat_dot(const struct kmat *m, int at, int row, const float *x) {
    float w[512];
    kdequant_row(m->type,
                 (uint8_t *)m->data + (at * m->rows + row) * ktype_row_bytes(m->type, m->cols), w,
                 m->cols);
    return dot_plain(w, x, m->cols);
}

/* One row after the formulas of kernels.h (sigmoid gating, one group). */
static void check_layer_row(const struct layer *l, int t) {
    double g[E], score[E], sum = 0;
    for (int e = 0; e < E; e++) {
        g[e] = 1 / (1 + exp(-(double)l->logits[t * E + e]));
        score[e] = g[e] + (double)l->bias[e];
    }
    int32_t ids[U];
    for (int j = 0; j < U; j++) {
        int best = 0;
        for (int e = 1; e < E; e++)
            if (score[e] > score[best]) best = e;
        ids[j] = best;
        score[best] = -9;
        sum += g[best];
    }
    check_same_ints("experts", ids, l->ids + t * U, U);
    for (int j = 0; j < U; j++) {
        check_near("weight", g[ids[j]] / sum * 2.5, (double)l->weights[t * U + j], 1e-6);
        for (int f = 0; f < F; f++) {
            float gate = mat_dot(&l->gate, ids[j], f, l->x + t * D),
                  up = mat_dot(&l->up, ids[j], f, l->x + t * D);
            check_same("act", &(float){silu_plain(gate) * up}, &l->act[(t * U + j) * F + f], 1);
        }
    }
    for (int r = 0; r < D; r++) {
        float y = 0;
        for (int j = 0; j < U; j++)
            y = fmaf(l->weights[t * U + j], mat_dot(&l->down, ids[j], r, l->act + (t * U + j) * F),
                     y);
        y += mat_dot(&l->shared, 0, r, l->shared_act + t * FS);
        check_same("y", &y, &l->y[t * D + r], 1);
    }
}

static void experts_are_the_formula_whatever_rows_are_together(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(46);
    struct layer *l = layer_new(&rng);
    float *first = check_alloc(sizeof l->y);
    l->slot[5] = l->slot[68] = -1;
    for (int i = 0; i < n_ctx; i++) {
        layer_run(ctx[i], l, 0, TOKENS);
        for (int t = 0; t < TOKENS; t += 23) check_layer_row(l, t);
        for (int j = 0; j < U; j++)
            assert_true(l->ids[5 * U + j] == -1 && l->ids[68 * U + j] == -1);
        if (i == 0) memcpy(first, l->y, sizeof l->y);
        for (int part = 1; part <= TOKENS; part += 22) {
            memset(l->y, 0xFF, sizeof l->y);
            for (int from = 0; from < TOKENS; from += part)
                layer_run(ctx[i], l, from, TOKENS - from < part ? TOKENS - from : part);
            for (int t = 0; t < TOKENS; t++)
                if (l->slot[t] >= 0) check_same("split rows", first + t * D, l->y + t * D, D);
        }
    }
    free(first);
    layer_free(l);
}

static void routing_knows_softmax_groups_ties_and_broken_logits(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct rng rng = rng_new(47);
    struct layer *l = layer_new(&rng);
    memset(l->bias, 0, sizeof l->bias);
    memset(l->logits, 0, sizeof l->logits);
    layer_run(ctx[0], l, 0, 1); /* all equal */
    check_same_ints("ties", (const int32_t[]){0, 1, 2}, l->ids, U);
    for (int e = 0; e < E; e++) l->logits[e] = e == 4 ? 3 : e == 9 ? 2 : e == 10 ? 1.9f : 0;
    l->d.n_groups = 4, l->d.n_groups_used = 1; /* groups of three: 9 + 10 beat 4 with 3 or 5 */
    layer_run(ctx[0], l, 0, 1);
    check_same_ints("groups", (const int32_t[]){9, 10, 11}, l->ids, U);
    l->d.n_groups = 1, l->d.gating = 1, l->d.norm_weights = false, l->d.weights_scale = 1;
    layer_run(ctx[0], l, 0, 1);
    double total = exp(3) + exp(2) + exp(1.9) + 9;
    check_same_ints("softmax", (const int32_t[]){4, 9, 10}, l->ids, U);
    check_near("softmax", exp(3) / total, (double)l->weights[0], 1e-6);
    for (int e = 0; e < E; e++) l->logits[e] = NAN;
    for (int gating = 1; gating <= 2; gating++) {
        l->d.gating = gating;
        layer_run(ctx[0], l, 0, 1);
        check_same_ints("not a number", (const int32_t[]){0, 1, 2}, l->ids, U);
    }
    layer_free(l);
}

static void memory_is_aligned_and_the_table_is_complete(void **state) {
    (void)state;
    const struct kernels *k = kernels_table();
    char err[256] = "";
    struct kctx *c = k->open(0, err, sizeof err);
    struct kdevice_info info;
    assert_non_null(c);
    void (*const *slot)(void) = (void (*const *)(void)) & k->feed;
    for (int i = 0; i < K_OPERATIONS; i++) assert_true(slot[i] != NULL);
    k->info(c, &info);
    assert_true(strncmp(info.name, "cpu ", 4) == 0 && info.total_bytes > 0);
    for (size_t n = 0; n < 1000; n += 333) {
        unsigned char *p = k->alloc(c, n), in[1000], out[1000] = {0};
        assert_true(p && (uintptr_t)p % 256 == 0);
        memset(in, 0x5A, sizeof in);
        k->put(c, p, in, n);
        k->get(c, out, p, n);
        assert_memory_equal(in, out, n);
        k->zero(c, p, n);
        k->get(c, out, p, n);
        for (size_t i = 0; i < n; i++) assert_int_equal(out[i], 0);
        k->free(c, p);
    }
    k->sync(c);
    k->close(c);
    k->switches[0].choices[1] = "abacus";
    k->switches[0].chosen = 1;
    assert_null(k->open(0, err, sizeof err));
    assert_non_null(strstr(err, "found abacus"));
    k->switches[0].chosen = 3;
    c = k->open(0, err, sizeof err);
    k->info(c, &info);
    assert_string_equal(info.name, "cpu plain");
    k->close(c);
    k->switches[0].choices[1] = "AVX-512";
    k->switches[0].chosen = 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_slot_has_a_check),
        cmocka_unit_test(the_exponential_is_within_two_ulps_everywhere),
        cmocka_unit_test(instruction_sets_give_the_same_exponentials),
        cmocka_unit_test(inner_loops_of_odd_lengths_agree_with_plain_loops),
        cmocka_unit_test(feeding_replaces_and_counts_tokens),
        cmocka_unit_test(angles_are_exact_at_large_positions),
        cmocka_unit_test(embedding_is_the_decoded_row),
        cmocka_unit_test(norms_are_the_formula),
        cmocka_unit_test(swiglu_is_the_formula),
        cmocka_unit_test(gathering_copies_rows_and_zeroes_padding),
        cmocka_unit_test(experts_are_the_formula_whatever_rows_are_together),
        cmocka_unit_test(routing_knows_softmax_groups_ties_and_broken_logits),
        cmocka_unit_test(memory_is_aligned_and_the_table_is_complete),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
