/* kernels/cpu/cpu.h: what the files of the CPU backend share: the context, and the inner loops that
 * exist once per instruction set.
 *
 * Owns: nothing.  Called by: cpu/ and its tests only; the worker sees kernels.h.
 * Fails how: cannot.  Limits: CPU_*.  Tested by: tests/kernels/
 *
 * Everything that costs time goes through struct cpu_isa. Its three instances are one source
 * (inner.c, decode.h over simd.h) compiled three times, and give identical bits.
 */
#ifndef OCTAVO_KERNELS_CPU_CPU_H
#define OCTAVO_KERNELS_CPU_CPU_H

#include "kernels/kernels.h"

#define CPU_TILE_W 4   /* weight rows that go together */
#define CPU_TILE_X 64  /* rows of x that share a decoded run of weights */
#define CPU_RUN    256 /* elements decoded at a time: the largest block, and well inside L1 */

/* Partial sums of CPU_TILE_W weight rows with one row of x. */
struct cpu_lanes {
    float at[CPU_TILE_W][16];
};

struct cpu_isa {
    const char *name; /* "plain", "AVX2", "AVX-512" */

    /* Decodes n elements (whole blocks) to dst. As kdequant_row, bit by bit. */
    void (*decode[KT_MAX])(const uint8_t *src, float *dst, int64_t n);

    /* acc[j].at[i] += products of w[i][0..n) and x[j][0..n) (dot.h's lanes); n is a multiple of 16
     * but for the last run of a row. n_w <= CPU_TILE_W. */
    void (*tile)(const float *const *w, int n_w, const float *const *x, int n_x, int64_t n,
                 struct cpu_lanes *acc);

    /* y[j][i] = sum of the lanes acc[j].at[i]. */
    void (*tile_sum)(const struct cpu_lanes *acc, int n_w, int n_x, float *const *y);

    /* y[r] = row r of w . x, rows in file order, a multiple of four of them; cols a multiple of 16.
     * run: room for CPU_TILE_W runs. */
    void (*product_one)(int type, const uint8_t *w, int64_t rows, int64_t cols, const float *x,
                        float *y, float *run);

    /* dot_plain */
    float (*dot)(const float *a, const float *b, int64_t n);

    /* y[c] = fmaf(p[u], rows[u][c], y[c]) for u ascending. */
    void (*accumulate)(float *y, int64_t width, const float *const *rows, const float *p, int n);

    /* y[c] = fmaf(w, x[c], y[c]); y[c] = x[c] * w */
    void (*add_scaled)(float *y, const float *x, float w, int64_t n);
    void (*scale)(float *y, const float *x, float w, int64_t n);

    /* Largest element; -inf for n = 0. NaN is passed over. */
    float (*max)(const float *x, int64_t n);

    /* y[i] = exp((x[i] - shift) * factor); returns the sum: sixteen lanes, dot.h's tree. */
    float (*exp)(float *y, const float *x, float shift, float factor, int64_t n);

    /* act = silu(gate) * up */
    void (*swiglu)(float *act, const float *gate, const float *up, int64_t n);

    /* y = x * scale * gain, two rounded products */
    void (*gain)(float *y, const float *x, float scale, const float *gain, int64_t n);

    /* s[u] += w[u'] relu: s[u] = fmaf(w, max(0, d[u]), s[u]) */
    void (*add_relu)(float *s, const float *d, float w, int64_t n);
};

extern const struct cpu_isa cpu_isa_plain;
#ifdef CPU_HAVE_X86
extern const struct cpu_isa cpu_isa_avx2, cpu_isa_avx512;
#endif

/* The instruction sets this machine can run, best first; at least one. */
int cpu_isa_list(const struct cpu_isa *out[3]);

struct kctx {
    const struct cpu_isa *isa;
    struct cpu_lanes lanes[CPU_TILE_X];
    float run[CPU_TILE_W][CPU_RUN] __attribute__((aligned(64)));
};

/* A context that uses the given instruction set (tests, benchmarks); the table closes it. */
struct kctx *cpu_open_isa(const struct cpu_isa *isa);

/* matmul.c: y[j][r] = row r of w . x[j], for n rows of x, given as pointers. w: `rows` rows of
 * `type` in file order. */
void cpu_product(struct kctx *c, int type, const uint8_t *w, int64_t rows, int64_t cols,
                 const float *const *x, float *const *y, int n);
/* The same for rows [row, row + rows) of matrix `at` of the stack, its scale included. */
void cpu_mat_product(struct kctx *c, const struct kmat *m, int64_t at, int64_t row, int64_t rows,
                     const float *const *x, float *const *y, int n);
const uint8_t *cpu_mat_row(const struct kmat *m, int64_t at, int64_t row);

/* topk.c: maps floats to integers of the same order; NaN counts as -inf, -0 equals 0. */
static inline uint32_t cpu_order_key(float x) {
    union {
        float f;
        uint32_t u;
    } v = {x != x ? -__builtin_inff() : x + 0.0f};
    return v.u & 0x80000000 ? ~v.u : v.u | 0x80000000;
}

/* The k-th largest of n keys (1 <= k <= n); *ties: how many keys equal to it belong to the k. */
uint32_t cpu_kth_key(const uint32_t *keys, int64_t n, int64_t k, int64_t *ties);

/* sample.c: Philox4x32-10; the upper half of the counter is out[2], out[3] on entry. */
void cpu_philox(uint64_t key, uint64_t counter, uint32_t out[4]);
size_t cpu_sample_scratch(int vocab);

/* Scratch of the others, bytes. */
size_t cpu_select_scratch(const struct kdims *d, const struct kbounds *b);
size_t cpu_attend_scratch(const struct kdims *d, const struct kbounds *b);
size_t cpu_experts_scratch(const struct kdims *d, const struct kbounds *b);

/* The operations, one function per slot of kernels.h. */
void cpu_feed(struct kctx *, const struct kop_feed *);
void cpu_angles(struct kctx *, const struct kop_angles *);
void cpu_embed(struct kctx *, const struct kop_embed *);
void cpu_norm(struct kctx *, const struct kop_norm *);
void cpu_matmul(struct kctx *, const struct kop_matmul *jobs, int n_jobs);
void cpu_head_matmul(struct kctx *, const struct kop_head_matmul *);
void cpu_attn_prep(struct kctx *, const struct kop_attn_prep *);
void cpu_rope(struct kctx *, const struct kop_rope *);
void cpu_select(struct kctx *, const struct kop_select *);
void cpu_attend(struct kctx *, const struct kop_attend *);
void cpu_swiglu(struct kctx *, const struct kop_swiglu *);
void cpu_experts_up(struct kctx *, const struct kop_experts_up *);
void cpu_experts_down(struct kctx *, const struct kop_experts_down *);
void cpu_gather(struct kctx *, const struct kop_gather *);
void cpu_sample(struct kctx *, const struct kop_sample *);

#endif
