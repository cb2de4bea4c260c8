/* tests/kernels/test_sample.c: sampling against a slow rendering of the rule in kernels.h, against
 * published random numbers, and against the distributions it promises.
 */
#include "tests/kernels/check.h"

#define VOCAB_MAX 5000

/* One slot, one sampled row; logits are cut into parts of part_cols. */
struct bench {
    struct kctx *c;
    int vocab, parts, part_cols;
    struct ksampling p;
    uint16_t prompt[VOCAB_MAX], output[VOCAB_MAX];
    float logits[VOCAB_MAX];
    int32_t pos;
    int32_t token, last, top[K_TOP_MAX];
    float logprob, top_logprob[K_TOP_MAX];
};

static struct bench *bench_new(struct kctx *c, int vocab) {
    struct bench *b = check_alloc(sizeof *b);
    b->c = c, b->vocab = vocab, b->parts = 1, b->part_cols = vocab;
    b->p = (struct ksampling){.temperature = 1, .top_p = 1, .repetition = 1, .seed = 42};
    return b;
}

static void bench_run(struct bench *b) {
    int32_t slot = 0, out_row = 0;
    struct kseqs q = {.max_slots = 1,
                      .vocab = b->vocab,
                      .last_token = &b->last,
                      .seen_prompt = b->prompt,
                      .seen_output = b->output,
                      .sampling = &b->p};
    struct kbatch batch = {
        .n_rows = 1, .n_out = 1, .pos = &b->pos, .slot = &slot, .out_row = &out_row};
    size_t cells = (size_t)b->parts * (size_t)b->part_cols;
    float *logits = check_alloc(cells * sizeof *logits);
    void *scratch = check_alloc(cpu_sample_scratch(b->vocab));
    for (size_t i = 0; i < cells; i++) logits[i] = i < (size_t)b->vocab ? b->logits[i] : 1e30f;
    b->last = 12345;
    cpu_sample(b->c, &(struct kop_sample){&batch, &q, logits, b->parts, b->part_cols, b->vocab,
                                          &b->token, &b->logprob, b->top, b->top_logprob, scratch});
    free(logits);
    free(scratch);
}

struct entry {
    float l;
    int32_t id;
    double e;
};

static int falling_entries(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    if (x->l != y->l) return x->l > y->l ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The rule, read aloud: everything sorted, nothing clever. */
static int32_t rule(const struct bench *b) {
    static struct entry v[VOCAB_MAX];
    int n = 0;
    for (int i = 0; i < b->vocab; i++) {
        float l = b->logits[i];
        for (int k = 0; k < b->p.n_bias; k++)
            if (b->p.bias_token[k] == i) l += b->p.bias_value[k];
        if (b->prompt[i] || b->output[i]) l = l > 0 ? l / b->p.repetition : l * b->p.repetition;
        l -= b->p.frequency * (float)b->output[i] + b->p.presence * (float)(b->output[i] > 0);
        if (l == l && l > -INFINITY) v[n++] = (struct entry){l, i, 0};
    }
    if (n == 0) return -1;
    qsort(v, (size_t)n, sizeof *v, falling_entries);
    if (b->p.temperature <= 0) return v[0].id;
    for (int i = 0; i < n; i++)
        v[i].e = exp(((double)v[i].l - (double)v[0].l) / (double)b->p.temperature);
    if (b->p.top_k > 0 && b->p.top_k < n) n = b->p.top_k;
    double total = 0, sum = 0;
    for (int i = 0; i < n; i++) total += v[i].e;
    for (int i = 0; i < n && b->p.top_p < 1; i++)
        if ((sum += v[i].e) >= (double)b->p.top_p * total) n = i + 1;
    for (int i = 0; i < n; i++)
        if (v[i].e < (double)b->p.min_p * v[0].e) n = i;
    uint32_t word[4] = {0};
    cpu_philox(b->p.seed, (uint64_t)b->pos + 1, word);
    total = sum = 0;
    for (int i = 0; i < n; i++) total += v[i].e;
    for (int i = 0; i < n; i++)
        if ((sum += v[i].e) > (double)word[0] / 4294967296.0 * total) return v[i].id;
    return v[n - 1].id;
}

static void philox_gives_the_published_numbers(void **state) {
    (void)state;
    static const struct {
        uint64_t key, counter;
        uint32_t high[2], expected[4];
    } known[] = {
        {0, 0, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {~0ull, ~0ull, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822,
         0x85a308d3243f6a88,
         {0x13198a2e, 0x03707344},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t word[4] = {0, 0, known[i].high[0], known[i].high[1]};
        cpu_philox(known[i].key, known[i].counter, word);
        assert_memory_equal(word, known[i].expected, sizeof word);
    }
}

static void random_settings(struct rng *rng, struct bench *b) {
    struct ksampling *p = &b->p;
    *p = (struct ksampling){.temperature = 1, .top_p = 1, .repetition = 1, .seed = rng_next(rng)};
    b->pos = rng_below(rng, 100000);
    if (rng_below(rng, 2)) p->temperature = 0.1f + 2 * fabsf(rng_float(rng));
    if (rng_below(rng, 8) == 0) p->temperature = 0;
    if (rng_below(rng, 2)) p->top_k = rng_below(rng, b->vocab + 3);
    if (rng_below(rng, 2)) p->top_p = fabsf(rng_float(rng));
    if (rng_below(rng, 3) == 0) p->min_p = 0.5f * fabsf(rng_float(rng));
    if (rng_below(rng, 3) == 0)
        p->repetition = 1.3f, p->presence = 0.5f, p->frequency = rng_float(rng);
    if (rng_below(rng, 3) == 0) {
        p->n_bias = 1 + rng_below(rng, 5);
        for (int i = 0; i < p->n_bias; i++)
            p->bias_token[i] = rng_below(rng, b->vocab), p->bias_value[i] = 10 * rng_float(rng);
    }
    p->top_logprobs = rng_below(rng, 3) ? 0 : rng_below(rng, K_TOP_MAX + 1);
    b->parts = 1 + rng_below(rng, 8);
    b->part_cols = (b->vocab + b->parts - 1) / b->parts + rng_below(rng, 3);
}

/* Settings, shapes and cuts at random; a token may differ from the rule's only where u falls on a
 * border within rounding, which these seeds do not. */
static void tokens_are_those_of_the_rule(void **state) {
    (void)state;
    static const int sizes[] = {1, 2, 17, 64, 65, 300, 5000};
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(20);
    for (int round = 0; round < 2000; round++) {
        struct bench *b = bench_new(NULL, sizes[rng_below(&rng, 7)]);
        float scale = 0.5f * (float)(1 << rng_below(&rng, 6)),
              coarse = rng_below(&rng, 3) ? 0 : 4.0f;
        random_settings(&rng, b);
        for (int i = 0; i < b->vocab; i++) {
            b->logits[i] = scale * rng_float(&rng);
            if (coarse > 0) b->logits[i] = roundf(b->logits[i] * coarse) / coarse; /* ties */
            if (rng_below(&rng, 50) == 0) b->logits[i] = rng_below(&rng, 2) ? NAN : -INFINITY;
            b->prompt[i] = rng_below(&rng, 4) == 0;
            b->output[i] = (uint16_t)(rng_below(&rng, 4) == 0 ? rng_below(&rng, 5) : 0);
        }
        int32_t expected = rule(b);
        for (int i = 0; i < n_ctx; i++) {
            b->c = ctx[i];
            bench_run(b);
            if (b->token != expected)
                fail_msg("round %d, %d tokens, %s: expected %d, found %d (OCTAVO_SEED=%llu)", round,
                         b->vocab, b->c->isa->name, expected, b->token,
                         (unsigned long long)check_seed());
            assert_int_equal(b->last, expected < 0 ? 12345 : expected);
        }
        free(b);
    }
}

/* Pearson's statistic of n draws at successive positions against probabilities p[0..k). */
static double chi_square(struct bench *b, const double *p, int k, int n) {
    double *count = check_alloc((size_t)b->vocab * sizeof *count), sum = 0;
    for (b->pos = 0; b->pos < n; b->pos++) {
        bench_run(b);
        assert_true(b->token >= 0 && b->token < b->vocab);
        count[b->token]++;
    }
    for (int i = 0; i < b->vocab; i++) {
        if (i >= k || p[i] == 0) {
            assert_true(count[i] == 0);
            continue;
        }
        double expected = p[i] * n;
        sum += (count[i] - expected) * (count[i] - expected) / expected;
    }
    free(count);
    return sum;
}

static void draws_follow_the_softmax(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    static const double p[5] = {0.1, 0.4, 0.2, 0.25, 0.05};
    struct bench *b = bench_new(ctx[0], 5);
    for (int i = 0; i < 5; i++) b->logits[i] = (float)log(p[i]) + 3;
    for (b->p.seed = 0; b->p.seed < 4; b->p.seed++) {
        double chi = chi_square(b, p, 5, 20000);
        if (chi > 23.5)
            fail_msg("chi-square: expected below 23.5 (p = 1e-4, 4 degrees), found %g", chi);
    }
    free(b);
}

static void temperature_sharpens_and_top_p_cuts(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct bench *b = bench_new(ctx[0], 4);
    static const double p[4] = {0.4, 0.3, 0.2, 0.1}, kept[4] = {4.0 / 7, 3.0 / 7, 0, 0};
    static const double cold[4] = {0.16 / 0.30, 0.09 / 0.30, 0.04 / 0.30, 0.01 / 0.30};
    for (int i = 0; i < 4; i++) b->logits[i] = (float)log(p[i]);
    b->p.top_p = 0.69f;
    double chi = chi_square(b, kept, 4, 20000);
    if (chi > 15.2) fail_msg("top_p: chi-square: expected below 15.2 (1 degree), found %g", chi);
    b->p.top_p = 1, b->p.temperature = 0.5f;
    chi = chi_square(b, cold, 4, 20000);
    if (chi > 21.2)
        fail_msg("temperature: chi-square: expected below 21.2 (3 degrees), found %g", chi);
    free(b);
}

static void edges_of_top_k_top_p_and_min_p_leave_one_token_at_least(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct bench *b = bench_new(ctx[0], 100);
    for (int i = 0; i < 100; i++)
        b->logits[i] = (float)((i * 37) % 100) * 0.01f; /* largest: id 27 */
    const struct ksampling edges[] = {
        {.temperature = 1, .top_p = 1, .repetition = 1, .top_k = 1},
        {.temperature = 1, .top_p = 0, .repetition = 1},
        {.temperature = 1, .top_p = 1, .min_p = 1, .repetition = 1},
        {.temperature = 1, .top_p = -1, .min_p = 2, .repetition = 1, .top_k = -5},
        {.temperature = 1e-9f, .top_p = 1, .repetition = 1},
        {.temperature = 0, .top_p = 1, .repetition = 1},
    };
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++)
        for (b->pos = 0; b->pos < 50; b->pos++) {
            b->p = edges[i];
            bench_run(b);
            assert_int_equal(b->token, 27);
        }
    free(b);
}

static void ties_fall_to_the_lower_id(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct bench *b = bench_new(ctx[0], 1000);
    b->p.temperature = 0, b->p.top_logprobs = 5;
    for (int i = 300; i < 1000; i += 100) b->logits[i] = i == 300 ? 2 : 2.0f;
    bench_run(b);
    assert_int_equal(b->token, 300);
    check_same_ints("alternatives", (const int32_t[]){300, 400, 500, 600, 700, -1}, b->top, 6);
    b->p.temperature = 1, b->p.top_k = 1;
    bench_run(b);
    assert_int_equal(b->token, 300);
    free(b);
}

static void log_probabilities_are_those_of_the_raw_logits(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(21);
    struct bench *b = bench_new(ctx[0], 3001);
    rng_fill(&rng, b->logits, 3001);
    for (int i = 0; i < 3001; i++) b->logits[i] *= 12;
    b->logits[5] = NAN;
    double sum = 0;
    for (int i = 0; i < 3001; i++) sum += i == 5 ? 0 : exp((double)b->logits[i]);
    b->p.top_logprobs = K_TOP_MAX, b->p.temperature = 0.7f, b->p.n_bias = 1,
    b->p.bias_token[0] = 77;
    b->p.bias_value[0] = 100; /* chosen for certain, reported as it was */
    float first[1 + K_TOP_MAX];
    for (int i = 0; i < n_ctx; i++) {
        b->c = ctx[i];
        bench_run(b);
        assert_int_equal(b->token, 77);
        check_near("chosen", (double)b->logits[77] - log(sum), (double)b->logprob, 1e-5);
        for (int k = 0; k < K_TOP_MAX; k++) {
            check_near("top", (double)b->logits[b->top[k]] - log(sum), (double)b->top_logprob[k],
                       1e-5);
            assert_true(k == 0 || b->logits[b->top[k]] <= b->logits[b->top[k - 1]]);
        }
        if (i == 0) first[0] = b->logprob, memcpy(first + 1, b->top_logprob, sizeof b->top_logprob);
        check_same("logprob", first, &b->logprob, 1);
        check_same("top_logprob", first + 1, b->top_logprob, K_TOP_MAX);
    }
    free(b);
}

static void a_row_without_a_finite_logit_chooses_nothing(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct bench *b = bench_new(ctx[0], 40);
    for (int i = 0; i < 40; i++) b->logits[i] = i % 2 ? NAN : -INFINITY;
    bench_run(b);
    assert_int_equal(b->token, -1);
    assert_int_equal(b->last, 12345);
    assert_true(b->logprob == 0);
    b->logits[31] = -50;
    bench_run(b);
    assert_int_equal(b->token, 31);
    check_near("logprob", 0, (double)b->logprob, 0);
    b->logits[7] = INFINITY;
    bench_run(b);
    assert_int_equal(b->token, 7);
    b->p.n_bias = 1, b->p.bias_token[0] = 7, b->p.bias_value[0] = -INFINITY;
    bench_run(b);
    assert_int_equal(b->token, 31);
    free(b);
}

static void only_the_vocabulary_is_ever_chosen_and_padding_chooses_nothing(void **state) {
    (void)state;
    struct kctx *ctx[3];
    check_contexts(ctx);
    enum { VOCAB = 10, PARTS = 3, COLS = 4, S = 4 };
    struct ksampling params[2] = {
        {.temperature = 0, .top_p = 1, .repetition = 1, .top_logprobs = 2},
        {.temperature = 0, .top_p = 1, .repetition = 1}};
    int32_t slot[4] = {1, -1, 0, 1}, pos[4] = {3, 0, 5, 4}, out[S] = {2, -1, 1, 3},
            last[2] = {9, 9};
    uint16_t seen[2 * VOCAB] = {0};
    struct kseqs q = {.max_slots = 2,
                      .vocab = VOCAB,
                      .last_token = last,
                      .seen_prompt = seen,
                      .seen_output = seen,
                      .sampling = params};
    struct kbatch batch = {.n_rows = 4, .n_out = S, .pos = pos, .slot = slot, .out_row = out};
    float logits[PARTS][S][COLS] = {0}, logprob[S], top_logprob[S * K_TOP_MAX];
    int32_t token[S], top[S * K_TOP_MAX];
    logits[2][0][1] = 5, logits[2][0][2] = 9,
    logits[2][0][3] = 9; /* ids 9, and 10 and 11: outside */
    logits[1][3][2] = 5; /* id 6 */
    void *scratch = check_alloc(cpu_sample_scratch(VOCAB));
    cpu_sample(ctx[0], &(struct kop_sample){&batch, &q, &logits[0][0][0], PARTS, COLS, VOCAB, token,
                                            logprob, top, top_logprob, scratch});
    check_same_ints("tokens", (const int32_t[]){9, -1, -1, 6}, token, S);
    check_same_ints("last", (const int32_t[]){9, 6}, last, 2);
    check_same_ints("alternatives", (const int32_t[]){9, 0, -1}, top, 3);
    assert_int_equal(top[3 * K_TOP_MAX], -1);
    free(scratch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_numbers),
        cmocka_unit_test(tokens_are_those_of_the_rule),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(temperature_sharpens_and_top_p_cuts),
        cmocka_unit_test(edges_of_top_k_top_p_and_min_p_leave_one_token_at_least),
        cmocka_unit_test(ties_fall_to_the_lower_id),
        cmocka_unit_test(log_probabilities_are_those_of_the_raw_logits),
        cmocka_unit_test(a_row_without_a_finite_logit_chooses_nothing),
        cmocka_unit_test(only_the_vocabulary_is_ever_chosen_and_padding_chooses_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
