/* tests/kernels/test_attention.c: attn_prep, rope, select and attend: against their formulas, and
 * against themselves in other company: other batches, splits, slots, pages and instruction sets.
 *
 * Every input of a row is a function of (sequence, position), so that one row can be fed in many
 * ways.
 */
#include "tests/kernels/check.h"

enum { H = 3, N = 10, P = 8, R = 41, Q = 19, I = 5, J = 20, K = 24, W = R + P };
enum { SLOTS = 4, PAGES = 16, TABLE = 4, LENGTH = 140, ROWS_MAX = 2 * LENGTH + 32 };

static const struct kdims dims = {.n_heads = H,
                                  .d_nope = N,
                                  .d_rope = P,
                                  .r_q = Q,
                                  .r_kv = R,
                                  .ix_heads = I,
                                  .ix_dim = J,
                                  .ix_topk = K,
                                  .ix_rope_interleaved = true,
                                  .rms_eps = 1e-5f,
                                  .ix_eps = 1e-6f,
                                  .attn_scale = 0.23f,
                                  .n_used = 1};

struct row {
    int32_t sequence, slot, pos; /* slot < 0: padding */
};

struct world {
    struct kctx *c;
    struct kdims d;
    int32_t page_table[SLOTS * TABLE];
    float latent[PAGES * K_PAGE * W], index[PAGES * K_PAGE * J];
    float q_norm[Q], kv_norm[R], ik_gain[J], ik_bias[J];
    bool dense;
    /* of the last run, by row */
    float q_a[ROWS_MAX * Q], qk[ROWS_MAX * H * W], iq[ROWS_MAX * I * J], w[ROWS_MAX * I];
    float kv[ROWS_MAX * W], key[ROWS_MAX * J], q[ROWS_MAX * H * (N + P)], angles[ROWS_MAX * P];
    float out[ROWS_MAX * H * R];
    int32_t selected[ROWS_MAX * K], n_selected[ROWS_MAX];
};

static struct world *world_new(struct kctx *c) {
    struct world *w = check_alloc(sizeof *w);
    struct rng rng = rng_new(30);
    w->c = c;
    w->d = dims;
    for (int i = 0; i < SLOTS * TABLE; i++) w->page_table[i] = (i * 7 + 3) % PAGES;
    memset(w->latent, 0xFF, sizeof w->latent); /* NaN: to read what was not written shows */
    memset(w->index, 0xFF, sizeof w->index);
    rng_fill(&rng, w->q_norm, Q);
    rng_fill(&rng, w->kv_norm, R);
    rng_fill(&rng, w->ik_gain, J);
    rng_fill(&rng, w->ik_bias, J);
    return w;
}

static void fill_inputs(struct world *w, int t, struct row row) {
    struct rng rng = rng_new(1000 + (uint64_t)row.sequence * 100000 + (uint64_t)row.pos);
    rng_fill(&rng, w->q_a + t * Q, Q);
    rng_fill(&rng, w->kv + t * W, W);
    rng_fill(&rng, w->key + t * J, J);
    rng_fill(&rng, w->q + t * H * (N + P), H * (N + P));
    rng_fill(&rng, w->qk + t * H * W, H * W);
    rng_fill(&rng, w->iq + t * I * J, I * J);
    rng_fill(&rng, w->w + t * I, I);
    for (int i = 0; i < H * W; i++) w->qk[t * H * W + i] *= 4; /* a softmax worth the name */
}

/* Feeds the rows as one step. */
static void world_run(struct world *w, const struct row *rows, int n) {
    int32_t pos[ROWS_MAX], slot[ROWS_MAX];
    double freq[P / 2];
    struct kbatch b = {.n_rows = n, .pos = pos, .slot = slot};
    struct kseqs q = {.max_slots = SLOTS, .max_pages = TABLE, .page_table = w->page_table};
    struct kcache cache = {w->latent, w->index};
    assert_true(n <= ROWS_MAX);
    for (int t = 0; t < n; t++) {
        pos[t] = rows[t].pos, slot[t] = rows[t].slot;
        fill_inputs(w, t, rows[t]);
        if (slot[t] >= 0 && pos[t] + 1 > b.max_context) b.max_context = pos[t] + 1;
    }
    for (int i = 0; i < P / 2; i++) freq[i] = pow(10000, -2.0 * i / P);
    struct kbounds bounds = {n, n, b.max_context, 1};
    void *scratch = check_alloc(kernels_table()->scratch_bytes(&w->d, &bounds));
    cpu_angles(w->c, &(struct kop_angles){&b, freq, w->angles, P / 2});
    cpu_attn_prep(w->c, &(struct kop_attn_prep){&b, &q, &w->d, &cache, w->angles, w->q_a, w->q_norm,
                                                w->kv, w->kv_norm, w->key, w->ik_gain, w->ik_bias});
    cpu_rope(w->c, &(struct kop_rope){&b, &w->d, w->angles, w->q, w->qk, w->iq});
    cpu_select(w->c, &(struct kop_select){&b, &q, &w->d, &cache, w->iq, w->w, w->selected,
                                          w->n_selected, scratch});
    cpu_attend(w->c,
               &(struct kop_attend){&b, &q, &w->d, &cache, w->qk, w->dense ? NULL : w->selected,
                                    w->n_selected, w->out, scratch});
    free(scratch);
}

static int sequence_rows(struct row *rows, int sequence, int slot, int from, int to) {
    for (int p = from; p < to; p++) rows[p - from] = (struct row){sequence, slot, p};
    return to - from;
}

static const float *cached(const struct world *w, const float *cache, int width, int slot,
                           int pos) {
    return cache + (w->page_table[slot * TABLE + pos / K_PAGE] * K_PAGE + pos % K_PAGE) * width;
}

static void caches_hold_normed_latents_and_rotated_keys(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    for (int i = 0; i < n_ctx; i++)
        for (int half = 0; half < 2; half++) {
            struct world *w = world_new(ctx[i]);
            w->d.ix_rope_interleaved = !half;
            struct row row = {3, 2, 70};
            float q_a[Q];
            struct row before[71];
            world_run(w, before, sequence_rows(before, 3, 2, 0, 70));
            world_run(w, &row, 1);
            memcpy(q_a, w->q_a, sizeof q_a);
            fill_inputs(w, 0, row);
            double mean = 0, key_mean = 0, variance = 0, kv_mean = 0;
            for (int c = 0; c < Q; c++) mean += (double)w->q_a[c] * (double)w->q_a[c] / Q;
            for (int c = 0; c < R; c++) kv_mean += (double)w->kv[c] * (double)w->kv[c] / R;
            for (int c = 0; c < J; c++) key_mean += (double)w->key[c] / J;
            for (int c = 0; c < J; c++) variance += pow((double)w->key[c] - key_mean, 2) / J;
            for (int c = 0; c < Q; c++)
                check_near("q_a", (double)w->q_a[c] * (double)w->q_norm[c] / sqrt(mean + 1e-5),
                           (double)q_a[c], 1e-6);
            const float *latent = cached(w, w->latent, W, 2, 70),
                        *key = cached(w, w->index, J, 2, 70);
            for (int c = 0; c < R; c++)
                check_near("latent",
                           (double)w->kv[c] * (double)w->kv_norm[c] / sqrt(kv_mean + 1e-5),
                           (double)latent[c], 1e-6);
            double normed[J];
            for (int c = 0; c < J; c++)
                normed[c] =
                    ((double)w->key[c] - key_mean) / sqrt(variance + 1e-6) * (double)w->ik_gain[c] +
                    (double)w->ik_bias[c];
            for (int k = 0; k < P / 2; k++) {
                double angle = 70 * pow(10000, -2.0 * k / P), c = cos(angle), s = sin(angle);
                double a = (double)w->kv[R + 2 * k], b = (double)w->kv[R + 2 * k + 1];
                check_near("rope", a * c - b * s, (double)latent[R + 2 * k], 1e-6);
                check_near("rope", a * s + b * c, (double)latent[R + 2 * k + 1], 1e-6);
                int at = half ? k : 2 * k, other = half ? k + P / 2 : 2 * k + 1;
                a = normed[at], b = normed[other];
                check_near("key rope", a * c - b * s, (double)key[at], 2e-6);
                check_near("key rope", a * s + b * c, (double)key[other], 2e-6);
            }
            for (int c = P; c < J; c++) check_near("key", normed[c], (double)key[c], 2e-6);
            free(w);
        }
}

static void queries_are_rotated_where_the_layout_says(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct world *w = world_new(ctx[0]), *raw = world_new(ctx[0]);
    struct row rows[LENGTH];
    int n = sequence_rows(rows, 1, 0, 0, 5);
    world_run(w, rows, n);
    for (int t = 0; t < n; t++) fill_inputs(raw, t, rows[t]);
    for (int t = 0; t < n; t++)
        for (int k = 0; k < P / 2; k++) {
            double angle = t * pow(10000, -2.0 * k / P), c = cos(angle), s = sin(angle);
            for (int h = 0; h < H; h++) {
                const float *from = raw->q + (t * H + h) * (N + P) + N + 2 * k;
                const float *to = w->qk + (t * H + h) * W + R + 2 * k;
                check_near("q", (double)from[0] * c - (double)from[1] * s, (double)to[0], 1e-6);
                check_near("q", (double)from[0] * s + (double)from[1] * c, (double)to[1], 1e-6);
            }
            for (int h = 0; h < I; h++) {
                const float *from = raw->iq + (t * I + h) * J + 2 * k,
                            *to = w->iq + (t * I + h) * J + 2 * k;
                check_near("iq", (double)from[0] * c - (double)from[1] * s, (double)to[0], 1e-6);
                check_near("iq", (double)from[0] * s + (double)from[1] * c, (double)to[1], 1e-6);
            }
        }
    for (int t = 0; t < n; t++)
        for (int h = 0; h < H; h++)
            check_same("absorbed part", raw->qk + (t * H + h) * W, w->qk + (t * H + h) * W, R);
    free(w), free(raw);
}

/* Positions 0..n-1 by falling score, ties to the lower; the first K of them, ascending. */
static void select_plain(const float *score, int n, int32_t *out) {
    bool taken[LENGTH] = {false};
    for (int k = 0; k < K; k++) {
        int best = -1;
        for (int u = 0; u < n; u++)
            if (!taken[u] && (best < 0 || score[u] > score[best])) best = u;
        taken[best] = true;
    }
    for (int u = 0, at = 0; u < n; u++)
        if (taken[u]) out[at++] = u;
}

static void the_highest_scores_are_selected_and_ties_go_to_the_lower_position(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    for (int i = 0; i < n_ctx; i++)
        for (int tied = 0; tied < 2; tied++) {
            struct world *w = world_new(ctx[i]);
            struct row rows[LENGTH];
            int n = sequence_rows(rows, 1, 1, 0, LENGTH);
            if (tied) memset(w->ik_gain, 0, sizeof w->ik_gain); /* every key is the bias, rotated */
            if (tied)
                memset(w->ik_bias, 0, P * sizeof *w->ik_bias); /* and nothing is left to rotate */
            world_run(w, rows, n);
            for (int t = 0; t < n; t++) {
                float score[LENGTH];
                int32_t expected[K];
                assert_int_equal(w->n_selected[t], t + 1 < K ? t + 1 : K);
                if (t < K) {
                    for (int u = 0; u <= t; u++) assert_int_equal(w->selected[t * K + u], u);
                    continue;
                }
                for (int u = 0; u <= t; u++) {
                    float sum = 0;
                    for (int h = 0; h < I; h++) {
                        float dot =
                            dot_plain(w->iq + (t * I + h) * J, cached(w, w->index, J, 1, u), J);
                        sum = fmaf(w->w[t * I + h], dot > 0 ? dot : 0, sum);
                    }
                    score[u] = sum * (1.0f / sqrtf(J * I));
                }
                select_plain(score, t + 1, expected);
                check_same_ints("selected", expected, w->selected + t * K, K);
                if (tied) assert_int_equal(w->selected[t * K + K - 1], K - 1);
            }
            free(w);
        }
}

static void attention_is_the_softmax_over_the_selected_positions(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    for (int i = 0; i < n_ctx; i++)
        for (int dense = 0; dense < 2; dense++) {
            struct world *w = world_new(ctx[i]);
            struct row rows[LENGTH];
            w->dense = dense;
            world_run(w, rows, sequence_rows(rows, 1, 1, 0, LENGTH));
            for (int t = 0; t < LENGTH; t += 13)
                for (int h = 0; h < H; h++) {
                    int n = dense ? t + 1 : w->n_selected[t];
                    double s[LENGTH], sum = 0, out[R] = {0};
                    for (int u = 0; u < n; u++) {
                        const float *latent =
                            cached(w, w->latent, W, 1, dense ? u : w->selected[t * K + u]);
                        s[u] = 0;
                        for (int c = 0; c < W; c++)
                            s[u] += (double)latent[c] * (double)w->qk[(t * H + h) * W + c];
                        sum += s[u] = exp(s[u] * (double)dims.attn_scale);
                    }
                    for (int u = 0; u < n; u++)
                        for (int c = 0; c < R; c++)
                            out[c] += s[u] / sum *
                                      (double)cached(w, w->latent, W, 1,
                                                     dense ? u : w->selected[t * K + u])[c];
                    for (int c = 0; c < R; c++)
                        check_near("attend", out[c], (double)w->out[(t * H + h) * R + c], 3e-6);
                }
            free(w);
        }
}

static void a_selection_of_everything_is_dense_attention_bit_by_bit(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    for (int i = 0; i < n_ctx; i++) {
        struct world *w = world_new(ctx[i]);
        struct row rows[LENGTH];
        static float sparse[K * H * R];
        int n = sequence_rows(rows, 2, 3, 0, K);
        world_run(w, rows, n);
        memcpy(sparse, w->out, sizeof sparse);
        w->dense = true;
        world_run(w, rows, n);
        check_same("dense", sparse, w->out, K * H * R);
        free(w);
    }
}

/* What one sequence gives when it is fed at once and alone, in slot 0, by the first instruction
 * set. */
static const struct world *alone(int sequence) {
    static struct world *kept[4];
    struct kctx *ctx[3];
    check_contexts(ctx);
    if (!kept[sequence]) {
        struct row rows[LENGTH];
        kept[sequence] = world_new(ctx[0]);
        world_run(kept[sequence], rows, sequence_rows(rows, sequence, 0, 0, LENGTH));
    }
    return kept[sequence];
}

static void check_row(const char *what, struct row row, const struct world *w, int t) {
    const struct world *expected = alone(row.sequence);
    int p = row.pos;
    check_same(what, expected->out + p * H * R, w->out + t * H * R, H * R);
    check_same(what, expected->q_a + p * Q, w->q_a + t * Q, Q);
    assert_int_equal(expected->n_selected[p], w->n_selected[t]);
    check_same_ints(what, expected->selected + p * K, w->selected + t * K, w->n_selected[t]);
}

static void decoding_gives_the_bits_of_prefill_at_every_split(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    for (int i = 0; i < n_ctx; i++)
        for (int split = 1; split < LENGTH; split += i < n_ctx - 1 || n_ctx == 1 ? 1 : 9) {
            struct world *w = world_new(ctx[i]);
            struct row rows[LENGTH];
            char what[64];
            snprintf(what, sizeof what, "%s, split at %d", ctx[i]->isa->name, split);
            world_run(w, rows, sequence_rows(rows, 1, 0, 0, split));
            for (int t = 0; t < split; t++) check_row(what, rows[t], w, t);
            int n = sequence_rows(rows, 1, 0, split, LENGTH);
            world_run(w, rows, n);
            for (int t = 0; t < n; t++) check_row(what, rows[t], w, t);
            free(w);
        }
}

static void decoding_one_by_one_gives_the_bits_of_prefill(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    for (int i = 0; i < n_ctx; i++) {
        struct world *w = world_new(ctx[i]);
        for (int p = 0; p < LENGTH; p++) {
            struct row row = {2, 3, p};
            world_run(w, &row, 1);
            check_row("one by one", row, w, 0);
        }
        free(w);
    }
}

static void company_order_slots_pages_and_padding_change_no_bit(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(31);
    for (int i = 0; i < n_ctx; i++)
        for (int round = 0; round < 4; round++) {
            struct world *w = world_new(ctx[i]);
            struct row rows[ROWS_MAX];
            int at[2] = {0, 0}, slot[2] = {round, 3 - round};
            for (int k = PAGES - 1; k > 0; k--) {
                int other = rng_below(&rng, k + 1);
                int32_t kept = w->page_table[k];
                w->page_table[k] = w->page_table[other], w->page_table[other] = kept;
            }
            while (at[0] < LENGTH || at[1] < LENGTH) { /* steps of any mixture */
                int n = 0, count = 1 + rng_below(&rng, 60);
                while (n < count) {
                    int s = rng_below(&rng, 3);
                    if (s == 2 || at[s] == LENGTH)
                        rows[n++] = (struct row){1, -1, 7};
                    else
                        rows[n++] = (struct row){1 + s, slot[s], at[s]++};
                }
                for (int k = 0; k < n / 2;
                     k++) { /* in any order: a step's keys are written first */
                    int a = rng_below(&rng, n), b = rng_below(&rng, n);
                    struct row kept = rows[a];
                    rows[a] = rows[b], rows[b] = kept;
                }
                world_run(w, rows, n);
                for (int t = 0; t < n; t++)
                    if (rows[t].slot >= 0)
                        check_row("company", rows[t], w, t);
                    else
                        assert_int_equal(w->n_selected[t], 0);
            }
            free(w);
        }
}

static int falling_keys(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x > y ? -1 : x < y;
}

static void the_kth_key_is_that_of_a_sorted_list(void **state) {
    (void)state;
    struct rng rng = rng_new(32);
    for (int round = 0; round < 300; round++) {
        uint32_t keys[500], sorted[500];
        int n = 1 + rng_below(&rng, 500), k = 1 + rng_below(&rng, n), shift = rng_below(&rng, 32);
        for (int i = 0; i < n; i++)
            keys[i] = sorted[i] = (uint32_t)rng_next(&rng) >> shift << rng_below(&rng, 2);
        qsort(sorted, (size_t)n, sizeof *sorted, falling_keys);
        int64_t ties, expected = 0;
        uint32_t kth = cpu_kth_key(keys, n, k, &ties);
        for (int i = 0; i < k; i++) expected += sorted[i] == sorted[k - 1];
        if (kth != sorted[k - 1] || ties != expected)
            fail_msg("round %d: expected %u with %lld ties, found %u with %lld (OCTAVO_SEED=%llu)",
                     round, sorted[k - 1], (long long)expected, kth, (long long)ties,
                     (unsigned long long)check_seed());
    }
    assert_true(cpu_order_key(-0.0f) == cpu_order_key(0.0f));
    assert_true(cpu_order_key(NAN) == cpu_order_key(-INFINITY));
    assert_true(cpu_order_key(-1) < cpu_order_key(-0.5f) &&
                cpu_order_key(-0.5f) < cpu_order_key(1e-40f));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(caches_hold_normed_latents_and_rotated_keys),
        cmocka_unit_test(queries_are_rotated_where_the_layout_says),
        cmocka_unit_test(the_highest_scores_are_selected_and_ties_go_to_the_lower_position),
        cmocka_unit_test(attention_is_the_softmax_over_the_selected_positions),
        cmocka_unit_test(a_selection_of_everything_is_dense_attention_bit_by_bit),
        cmocka_unit_test(decoding_gives_the_bits_of_prefill_at_every_split),
        cmocka_unit_test(decoding_one_by_one_gives_the_bits_of_prefill),
        cmocka_unit_test(company_order_slots_pages_and_padding_change_no_bit),
        cmocka_unit_test(the_kth_key_is_that_of_a_sorted_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
