/* kernels/cpu/inner.c: the inner loops, compiled once per instruction set.
 *
 * Owns: nothing; pure.  Called by: the operations of cpu/, through struct cpu_isa.
 * Fails how: cannot.  Limits: CPU_TILE_W rows of weights per tile.
 * Tested by: tests/kernels/test_matmul.c, tests/kernels/test_ops.c (all sets against plain C)
 *
 * One source rather than one per instruction set: what differs is in simd.h, so the order of
 * operations, which is the promise, stands here once. CPU_ISA_SYMBOL and CPU_ISA_NAME come from the
 * build.
 *
 * A tile is four weight rows by up to four rows of x, kept in registers over a run of columns. Four
 * independent sums per row of x hide the latency of the fused multiply-add, and a weight once
 * loaded serves all rows of x. Which rows share a tile never touches a sum, so results do not
 * depend on it.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/decode.h"
#include "kernels/cpu/dot.h"
#include "kernels/cpu/simd.h"

static void (*const decoders[KT_MAX])(const uint8_t *, float *, int64_t) = {DECODERS};

/* NW rows of weights by NX rows of x; both are constants after inlining. */
static inline __attribute__((always_inline)) void tile_body(const float *const *w,
                                                            const float *const *x, int64_t n,
                                                            struct cpu_lanes *acc, int NW, int NX) {
    v16 a[4][4];
    for (int j = 0; j < NX; j++)
        for (int i = 0; i < NW; i++) a[j][i] = v16_load(acc[j].at[i]);
    for (int64_t c = 0; c < n; c += 16) {
        v16 wv[4];
#pragma GCC unroll 4
        for (int i = 0; i < NW; i++) wv[i] = v16_load(w[i] + c);
#pragma GCC unroll 4
        for (int j = 0; j < NX; j++) {
            v16 xv = v16_load(x[j] + c);
#pragma GCC unroll 4
            for (int i = 0; i < NW; i++) a[j][i] = v16_fma(wv[i], xv, a[j][i]);
        }
    }
    for (int j = 0; j < NX; j++)
        for (int i = 0; i < NW; i++) v16_store(acc[j].at[i], a[j][i]);
}

static void tile(const float *const *w, int n_w, const float *const *x, int n_x, int64_t n,
                 struct cpu_lanes *acc) {
    int64_t whole = n & ~(int64_t)15;
    int j = 0;
    if (n_w == 4) {
#if SIMD_REGISTERS / SIMD_PER_V16 >= 32
        for (; j + 4 <= n_x; j += 4) tile_body(w, x + j, whole, acc + j, 4, 4);
        for (; j + 2 <= n_x; j += 2) tile_body(w, x + j, whole, acc + j, 4, 2);
#endif
        for (; j < n_x; j++) tile_body(w, x + j, whole, acc + j, 4, 1);
    } else {
        for (; j < n_x; j++)
            for (int i = 0; i < n_w; i++) {
                v16 a = v16_load(acc[j].at[i]);
                for (int64_t c = 0; c < whole; c += 16)
                    a = v16_fma(v16_load(w[i] + c), v16_load(x[j] + c), a);
                v16_store(acc[j].at[i], a);
            }
    }
    for (j = 0; whole < n && j < n_x; j++)
        for (int i = 0; i < n_w; i++)
            for (int64_t c = whole; c < n; c++)
                acc[j].at[i][c & 15] = fmaf(w[i][c], x[j][c], acc[j].at[i][c & 15]);
}

static void tile_sum(const struct cpu_lanes *acc, int n_w, int n_x, float *const *y) {
    for (int j = 0; j < n_x; j++) {
        if (n_w == 4)
            v16_sum4(y[j], v16_load(acc[j].at[0]), v16_load(acc[j].at[1]), v16_load(acc[j].at[2]),
                     v16_load(acc[j].at[3]));
        else
            for (int i = 0; i < n_w; i++) y[j][i] = v16_sum(v16_load(acc[j].at[i]));
    }
}

/* Four rows of `type` at w, columns at .. at + n, as floats: decoded into `run`, a run's length or
 * the whole row apart, or where they are. Rows of at most a run lie end to end in the file and are
 * decoded together. */
static inline const float *four_rows(int type, const uint8_t *w, int64_t cols, int64_t at,
                                     int64_t n, float *run) {
    if (type == KT_F32) return (const float *)w;
    if (cols <= CPU_RUN) {
        decoders[type](w, run, 4 * cols);
        return run;
    }
    int64_t row_bytes = ktype_row_bytes(type, cols), skip = ktype_row_bytes(type, at);
    for (int i = 0; i < 4; i++) decoders[type](w + i * row_bytes + skip, run + i * CPU_RUN, n);
    return run;
}

/* A tile without a memory: one row of x, all columns, sums in registers. */
static void product_one(int type, const uint8_t *w, int64_t rows, int64_t cols, const float *x,
                        float *y, float *run) {
    int64_t row_bytes = ktype_row_bytes(type, cols);
    int64_t length = type == KT_F32 || cols < CPU_RUN ? cols : CPU_RUN;
    for (int64_t r = 0; r < rows; r += 4, w += 4 * row_bytes) {
        v16 a[4] = {v16_set(0), v16_set(0), v16_set(0), v16_set(0)};
        for (int64_t at = 0; at < cols; at += length) {
            int64_t n = cols - at < length ? cols - at : length;
            const float *wp = four_rows(type, w, cols, at, n, run);
            for (int64_t c = 0; c < n; c += 16) {
                v16 xv = v16_load(x + at + c);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) a[i] = v16_fma(v16_load(wp + i * length + c), xv, a[i]);
            }
        }
        v16_sum4(y + r, a[0], a[1], a[2], a[3]);
    }
}

static float dot(const float *a, const float *b, int64_t n) {
    v16 sum = v16_set(0);
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) sum = v16_fma(v16_load(a + c), v16_load(b + c), sum);
    float lanes[16];
    v16_store(lanes, sum);
    for (; c < n; c++) lanes[c & 15] = fmaf(a[c], b[c], lanes[c & 15]);
    return dot_combine(lanes);
}

static inline __attribute__((always_inline)) void
accumulate_body(float *y, int64_t c, const float *const *rows, const float *p, int n, int NB) {
    v16 a[8];
#pragma GCC unroll 8
    for (int b = 0; b < NB; b++) a[b] = v16_load(y + c + 16 * b);
    for (int u = 0; u < n; u++) {
        v16 pu = v16_set(p[u]);
        const float *row = rows[u] + c;
#pragma GCC unroll 8
        for (int b = 0; b < NB; b++) a[b] = v16_fma(pu, v16_load(row + 16 * b), a[b]);
    }
#pragma GCC unroll 8
    for (int b = 0; b < NB; b++) v16_store(y + c + 16 * b, a[b]);
}

static void accumulate(float *y, int64_t width, const float *const *rows, const float *p, int n) {
    int64_t c = 0;
#if SIMD_REGISTERS / SIMD_PER_V16 >= 32
    for (; c + 128 <= width; c += 128) accumulate_body(y, c, rows, p, n, 8);
#endif
    for (; c + 64 <= width; c += 64) accumulate_body(y, c, rows, p, n, 4);
    for (; c + 16 <= width; c += 16) accumulate_body(y, c, rows, p, n, 1);
    for (; c < width; c++)
        for (int u = 0; u < n; u++) y[c] = fmaf(p[u], rows[u][c], y[c]);
}

static void add_scaled(float *y, const float *x, float w, int64_t n) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16)
        v16_store(y + c, v16_fma(v16_set(w), v16_load(x + c), v16_load(y + c)));
    for (; c < n; c++) y[c] = fmaf(w, x[c], y[c]);
}

static void scale(float *y, const float *x, float w, int64_t n) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) v16_store(y + c, v16_mul(v16_load(x + c), v16_set(w)));
    for (; c < n; c++) y[c] = x[c] * w;
}

static float max_of(const float *x, int64_t n) {
    v16 m = v16_set(-INFINITY);
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) m = v16_max(v16_load(x + c), m);
    if (c < n) m = v16_max(v16_load_part(x + c, n - c, -INFINITY), m);
    float lanes[16], best = -INFINITY;
    v16_store(lanes, m);
    for (int i = 0; i < 16; i++) best = lanes[i] > best ? lanes[i] : best;
    return best;
}

/* exp_plain, lane by lane. */
static inline v16 v16_exp(v16 x) {
    x = v16_min(v16_set(EXP_HIGH), x);
    x = v16_max(v16_set(EXP_LOW), x);
    v16 magic = v16_set(EXP_MAGIC), t = v16_fma(x, v16_set(EXP_LOG2E), magic);
    v16 n = v16_sub(t, magic);
    v16 r = v16_fma(n, v16_set(-EXP_LN2_HI), x);
    r = v16_fma(n, v16_set(-EXP_LN2_LO), r);
    v16 p = v16_fma(v16_set(EXP_C7), r, v16_set(EXP_C6));
    p = v16_fma(p, r, v16_set(EXP_C5));
    p = v16_fma(p, r, v16_set(EXP_C4));
    p = v16_fma(p, r, v16_set(EXP_C3));
    p = v16_fma(p, r, v16_set(0.5f));
    p = v16_fma(p, r, v16_set(1.0f));
    p = v16_fma(p, r, v16_set(1.0f));
    v16i i = v16i_sub(v16_bits(t), v16_bits(magic)), half = v16i_sra(i, 1);
    v16i s1 = v16i_shl(v16i_add(half, v16i_set(127)), 23);
    v16i s2 = v16i_shl(v16i_add(v16i_sub(i, half), v16i_set(127)), 23);
    return v16_mul(v16_mul(p, v16_of_bits(s1)), v16_of_bits(s2));
}

static float exp_of(float *y, const float *x, float shift, float factor, int64_t n) {
    v16 sum = v16_set(0), s = v16_set(shift), f = v16_set(factor);
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
        v16 e = v16_exp(v16_mul(v16_sub(v16_load(x + c), s), f));
        v16_store(y + c, e);
        sum = v16_add(sum, e);
    }
    if (c < n) { /* the missing lanes count as e^-inf = +0, which changes no sum */
        v16 e = v16_mul(v16_sub(v16_load_part(x + c, n - c, 0), s), f);
        float part[16];
        v16_store(part, e);
        e = v16_exp(v16_load_part(part, n - c, -INFINITY));
        v16_store_part(y + c, e, n - c);
        sum = v16_add(sum, e);
    }
    return v16_sum(sum);
}

static inline v16 v16_swiglu(v16 g, v16 u) {
    v16 e = v16_exp(v16_sub(v16_set(-0.0f), g));
    return v16_mul(v16_div(g, v16_add(v16_set(1.0f), e)), u);
}

static void swiglu(float *act, const float *gate, const float *up, int64_t n) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16)
        v16_store(act + c, v16_swiglu(v16_load(gate + c), v16_load(up + c)));
    if (c < n) {
        v16 g = v16_load_part(gate + c, n - c, 0), u = v16_load_part(up + c, n - c, 0);
        v16_store_part(act + c, v16_swiglu(g, u), n - c);
    }
}

static void gain(float *y, const float *x, float factor, const float *g, int64_t n) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16)
        v16_store(y + c, v16_mul(v16_mul(v16_load(x + c), v16_set(factor)), v16_load(g + c)));
    for (; c < n; c++) y[c] = x[c] * factor * g[c];
}

static void add_relu(float *s, const float *d, float w, int64_t n) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
        v16 relu = v16_max(v16_load(d + c), v16_set(0));
        v16_store(s + c, v16_fma(v16_set(w), relu, v16_load(s + c)));
    }
    for (; c < n; c++) s[c] = fmaf(w, d[c] > 0 ? d[c] : 0, s[c]);
}

const struct cpu_isa CPU_ISA_SYMBOL = {
    .name = CPU_ISA_NAME,
    .decode = {DECODERS},
    .tile = tile,
    .tile_sum = tile_sum,
    .product_one = product_one,
    .dot = dot,
    .accumulate = accumulate,
    .add_scaled = add_scaled,
    .scale = scale,
    .max = max_of,
    .exp = exp_of,
    .swiglu = swiglu,
    .gain = gain,
    .add_relu = add_relu,
};
