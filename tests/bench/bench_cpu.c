/* tests/bench/bench_cpu.c: how fast the CPU backend's inner loops are, per instruction set.
 *
 * usage: bench_cpu [SECONDS PER ROW]     (default 0.1)
 *
 * One thread. `ns/weight` at one row of x is what decoding a token costs; at 64 rows, what a prompt
 * token costs (per weight and row). `GB/s` counts the bytes of the quantised weights. Each row
 * repeats until its time is up and prints the fastest repetition.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cpu/cpu.h"

static double seconds_per_row = 0.1;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t random_state = 1;

static uint32_t random_u32(void) {
    random_state = random_state * 1664525 + 1013904223;
    return random_state >> 8;
}

static void *filled(size_t bytes) {
    unsigned char *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) exit(1);
    for (size_t i = 0; i < bytes; i++) p[i] = (unsigned char)random_u32();
    return p;
}

static float *filled_floats(size_t n) {
    float *p = filled(n * sizeof *p);
    for (size_t i = 0; i < n; i++) p[i] = (float)(random_u32() & 0xFFFF) * 0x1p-16f - 0.5f;
    return p;
}

/* Fastest time of one call. */
static double fastest(void (*call)(void *), void *user) {
    double best = 1e9, until = now_s() + seconds_per_row;
    do {
        double from = now_s();
        call(user);
        double took = now_s() - from;
        best = took < best ? took : best;
    } while (now_s() < until);
    return best;
}

struct product {
    struct kctx *c;
    struct kop_matmul job;
};

static void call_product(void *user) {
    struct product *p = user;
    cpu_matmul(p->c, &p->job, 1);
}

static void bench_types(struct kctx **ctx, int n_ctx) {
    static const int types[] = {KT_F32,     KT_F16,    KT_BF16,   KT_Q4_0,    KT_Q4_1,   KT_Q5_0,
                                KT_Q5_1,    KT_Q8_0,   KT_Q2_K,   KT_Q3_K,    KT_Q4_K,   KT_Q5_K,
                                KT_Q6_K,    KT_IQ4_NL, KT_IQ4_XS, KT_IQ2_XXS, KT_IQ2_XS, KT_IQ2_S,
                                KT_IQ3_XXS, KT_IQ3_S,  KT_IQ1_S,  KT_IQ1_M,   KT_MXFP4,  KT_NVFP4};
    enum { ROWS = 512, COLS = 2048, MANY = 64 };
    float *x = filled_floats((size_t)MANY * COLS), *y = filled_floats((size_t)MANY * ROWS);
    printf("%-8s %-8s %12s %8s %14s %8s\n", "type", "set", "ns/w 1 row", "GB/s", "ns/w 64 rows",
           "ratio");
    for (size_t k = 0; k < sizeof types / sizeof types[0]; k++) {
        size_t bytes = (size_t)ktype_row_bytes(types[k], COLS) * ROWS;
        unsigned char *w = filled(bytes);
        for (size_t i = 0; types[k] <= KT_F16 && i < bytes; i++) w[i] &= 0x3B; /* finite */
        struct kmat m = {types[k], 1, ROWS, COLS, w, 0, 0, NULL};
        double plain = 0;
        for (int i = n_ctx - 1; i >= 0; i--) {
            struct product p = {ctx[i], {&m, x, y, COLS, ROWS, 1}};
            double one = fastest(call_product, &p);
            p.job.n_rows = MANY;
            double many = fastest(call_product, &p) / MANY, n = (double)ROWS * COLS;
            plain = plain > 0 ? plain : one;
            printf("%-8s %-8s %12.4f %8.2f %14.4f %8.1f\n", ktype_name(types[k]), ctx[i]->isa->name,
                   one / n * 1e9, (double)bytes / one * 1e-9, many / n * 1e9, plain / one);
        }
        free(w);
    }
    free(x);
    free(y);
}

struct attention {
    struct kctx *c;
    struct kop_attend attend;
    struct kop_select select;
};

static void call_attend(void *user) {
    struct attention *a = user;
    cpu_attend(a->c, &a->attend);
}

static void call_select(void *user) {
    struct attention *a = user;
    cpu_select(a->c, &a->select);
}

static void bench_attention(struct kctx **ctx, int n_ctx) {
    enum { POSITIONS = 4096, HEADS = 8, PAGES = POSITIONS / K_PAGE, TOPK = 64 };
    struct kdims d = {.n_heads = HEADS,
                      .d_rope = 64,
                      .r_kv = 512,
                      .ix_heads = 4,
                      .ix_dim = 128,
                      .ix_topk = TOPK,
                      .attn_scale = 0.0625f,
                      .n_used = 1};
    struct kbounds bounds = {1, 1, POSITIONS, 1};
    int32_t pages[PAGES], pos = POSITIONS - 1, slot = 0, selected[TOPK], n_selected;
    for (int i = 0; i < PAGES; i++) pages[i] = i * 37 % PAGES;
    struct kseqs q = {.max_slots = 1, .max_pages = PAGES, .page_table = pages};
    struct kbatch b = {.n_rows = 1, .max_context = POSITIONS, .pos = &pos, .slot = &slot};
    struct kcache cache = {filled_floats((size_t)POSITIONS * 576),
                           filled_floats((size_t)POSITIONS * 128)};
    float *qk = filled_floats(HEADS * 576), *out = filled_floats(HEADS * 512);
    float *iq = filled_floats(4 * 128), *w = filled_floats(4);
    void *scratch = filled(kernels_table()->scratch_bytes(&d, &bounds));
    struct attention a = {.attend = {&b, &q, &d, &cache, qk, NULL, NULL, out, scratch},
                          .select = {&b, &q, &d, &cache, iq, w, selected, &n_selected, scratch}};
    printf("\n%-32s %-8s %10s\n", "one row at position 4095", "set", "us");
    for (int i = n_ctx - 1; i >= 0; i--) {
        a.c = ctx[i];
        printf("%-32s %-8s %10.1f\n", "attend, dense, 8 heads", a.c->isa->name,
               fastest(call_attend, &a) * 1e6);
        printf("%-32s %-8s %10.1f\n", "select 64, 4 heads", a.c->isa->name,
               fastest(call_select, &a) * 1e6);
    }
    free(cache.latent), free(cache.index), free(qk), free(out), free(iq), free(w), free(scratch);
}

struct sampled {
    struct kctx *c;
    struct kop_sample o;
};

static void call_sample(void *user) {
    struct sampled *s = user;
    cpu_sample(s->c, &s->o);
}

static void bench_sample(struct kctx **ctx, int n_ctx) {
    enum { VOCAB = 154880 };
    static const struct {
        const char *name;
        struct ksampling p;
    } cases[] = {
        {"greedy", {.temperature = 0, .repetition = 1, .top_p = 1}},
        {"temperature 1", {.temperature = 1, .repetition = 1, .top_p = 1}},
        {"top_p 0.95", {.temperature = 1, .repetition = 1, .top_p = 0.95f}},
        {"top_k 40, penalties", {.temperature = 1, .repetition = 1.1f, .top_p = 1, .top_k = 40}},
    };
    float *logits = filled_floats(VOCAB);
    for (int i = 0; i < VOCAB; i++) logits[i] *= 20;
    uint16_t *counts = calloc(2 * VOCAB, sizeof *counts);
    struct ksampling params;
    int32_t zero = 0, last, token, top[K_TOP_MAX];
    float logprob, top_logprob[K_TOP_MAX];
    struct kseqs q = {.max_slots = 1,
                      .vocab = VOCAB,
                      .last_token = &last,
                      .seen_prompt = counts,
                      .seen_output = counts + VOCAB,
                      .sampling = &params};
    struct kbatch b = {.n_rows = 1, .n_out = 1, .pos = &zero, .slot = &zero, .out_row = &zero};
    void *scratch = filled(cpu_sample_scratch(VOCAB));
    struct sampled s = {
        NULL, {&b, &q, logits, 1, VOCAB, VOCAB, &token, &logprob, top, top_logprob, scratch}};
    printf("\n%-32s %-8s %10s\n", "one row of 154880 logits", "set", "us");
    for (int i = n_ctx - 1; i >= 0; i--)
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            s.c = ctx[i];
            params = cases[k].p;
            printf("%-32s %-8s %10.1f\n", cases[k].name, s.c->isa->name,
                   fastest(call_sample, &s) * 1e6);
        }
    free(logits), free(counts), free(scratch);
}

int main(int argc, char **argv) {
    const struct cpu_isa *isas[3];
    struct kctx *ctx[3];
    int n = cpu_isa_list(isas);
    if (argc > 1) seconds_per_row = atof(argv[1]);
    for (int i = 0; i < n; i++)
        if (!(ctx[i] = cpu_open_isa(isas[i]))) return 1;
    bench_types(ctx, n);
    bench_attention(ctx, n);
    bench_sample(ctx, n);
    for (int i = 0; i < n; i++) kernels_table()->close(ctx[i]);
    return 0;
}
