/* kernels/cpu/dot.h: the order of additions, and the exponential: the arithmetic that every
 * instruction set must reproduce bit by bit.
 *
 * Owns: nothing; pure.  Called by: cpu/ and its tests.  Fails how: cannot.  Limits: none.
 * Tested by: tests/kernels/test_matmul.c, tests/kernels/test_ops.c
 *
 * A dot product keeps sixteen partial sums: lane i takes elements i, i + 16, i + 32, … by fused
 * multiply-add, beginning at +0. Sixteen, because that is one AVX-512 register, two of AVX2 and
 * four of NEON; fused, because the wide units do it in one operation and the plain fmaf is exact,
 * so nobody has to give way. The lanes are added in a fixed tree: i + (i+8), then + 4, + 2, + 1.
 */
#ifndef OCTAVO_KERNELS_CPU_DOT_H
#define OCTAVO_KERNELS_CPU_DOT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define K_LANES 16

/* The tree. lanes [16] is overwritten. */
static inline float dot_combine(float *lanes) {
    for (int half = K_LANES / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

static inline float dot_plain(const float *a, const float *b, int64_t n) {
    float lanes[K_LANES] = {0};
    for (int64_t i = 0; i < n; i++) lanes[i % K_LANES] = fmaf(a[i], b[i], lanes[i % K_LANES]);
    return dot_combine(lanes);
}

/* e^x, error below 2 ulp, subnormal results included. x is clamped to where the result is 0 or
 * infinite; x = n ln 2 + r with |r| <= ln 2 / 2, the polynomial is the Taylor series to r^7, and
 * 2^n is applied as two exact powers so that a subnormal result is rounded once. */
#define EXP_LOW    (-104.0f)
#define EXP_HIGH   89.0f
#define EXP_LOG2E  0x1.715476p+0f
#define EXP_MAGIC  0x1.8p23f /* adding it leaves the nearest integer in the low bits */
#define EXP_LN2_HI 0x1.62e430p-1f
#define EXP_LN2_LO (-0x1.05c610p-29f)
#define EXP_C7     (1.0f / 5040)
#define EXP_C6     (1.0f / 720)
#define EXP_C5     (1.0f / 120)
#define EXP_C4     (1.0f / 24)
#define EXP_C3     (1.0f / 6)

static inline float exp_plain(float x) {
    x = EXP_HIGH < x ? EXP_HIGH : x; /* written so that NaN passes through */
    x = EXP_LOW > x ? EXP_LOW : x;
    float t = fmaf(x, EXP_LOG2E, EXP_MAGIC), magic = EXP_MAGIC, n = t - magic;
    float r = fmaf(n, -EXP_LN2_HI, x);
    r = fmaf(n, -EXP_LN2_LO, r);
    float p = fmaf(EXP_C7, r, EXP_C6);
    p = fmaf(p, r, EXP_C5);
    p = fmaf(p, r, EXP_C4);
    p = fmaf(p, r, EXP_C3);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    uint32_t ti, mi, half, s1, s2;
    memcpy(&ti, &t, 4);
    memcpy(&mi, &magic, 4);
    uint32_t i = ti - mi;
    half = (uint32_t)((int32_t)i >> 1);
    s1 = (half + 127) << 23;
    s2 = (i - half + 127) << 23;
    float f1, f2;
    memcpy(&f1, &s1, 4);
    memcpy(&f2, &s2, 4);
    return p * f1 * f2;
}

static inline float silu_plain(float x) {
    return x / (1.0f + exp_plain(-x));
}

#endif
