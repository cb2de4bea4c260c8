/* tests/kernels/check.h: what the kernel tests share: a seeded generator, comparison of bits, a
 * context per instruction set.
 *
 * A failure prints what, where, expected, found and the seed. OCTAVO_SEED=n repeats a run with
 * another seed.
 */
#ifndef OCTAVO_TESTS_KERNELS_CHECK_H
#define OCTAVO_TESTS_KERNELS_CHECK_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/dot.h"
#include "tests/kernels/tame.h"

static inline uint64_t check_seed(void) {
    const char *s = getenv("OCTAVO_SEED");
    return s ? strtoull(s, NULL, 10) : 1;
}

/* SplitMix64 (Steele, Lea, Flood 2014). */
struct rng {
    uint64_t state;
};

static inline struct rng rng_new(uint64_t stream) {
    return (struct rng){check_seed() * 1000003 + stream};
}

static inline uint64_t rng_next(struct rng *r) {
    uint64_t z = r->state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

static inline int rng_below(struct rng *r, int n) {
    return (int)(rng_next(r) % (uint64_t)n);
}

/* Uniform in [-1, 1). */
static inline float rng_float(struct rng *r) {
    return (float)((int64_t)(rng_next(r) >> 40) - (1 << 23)) * 0x1p-23f;
}

static inline void rng_fill(struct rng *r, float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = rng_float(r);
}

static inline void *check_alloc(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    assert_non_null(p);
    return p;
}

static inline bool same_bits(float a, float b) {
    return memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

/* Fails unless found[0..n) has the bits of expected[0..n). */
static inline void check_same(const char *what, const float *expected, const float *found,
                              int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!same_bits(expected[i], found[i]))
            fail_msg("%s: element %lld of %lld: expected %a, found %a (OCTAVO_SEED=%llu)", what,
                     (long long)i, (long long)n, (double)expected[i], (double)found[i],
                     (unsigned long long)check_seed());
}

static inline void check_near(const char *what, double expected, double found, double tolerance) {
    if (!(fabs(expected - found) <= tolerance))
        fail_msg("%s: expected %.9g within %g, found %.9g (OCTAVO_SEED=%llu)", what, expected,
                 tolerance, found, (unsigned long long)check_seed());
}

static inline void check_same_ints(const char *what, const int32_t *expected, const int32_t *found,
                                   int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (expected[i] != found[i])
            fail_msg("%s: element %lld of %lld: expected %d, found %d (OCTAVO_SEED=%llu)", what,
                     (long long)i, (long long)n, expected[i], found[i],
                     (unsigned long long)check_seed());
}

/* Every instruction set of this machine, as contexts; closed by the process's end. */
static inline int check_contexts(struct kctx *out[3]) {
    static struct kctx *all[3];
    static int n;
    if (!n) {
        const struct cpu_isa *isas[3];
        n = cpu_isa_list(isas);
        for (int i = 0; i < n; i++) assert_non_null(all[i] = cpu_open_isa(isas[i]));
    }
    memcpy(out, all, sizeof all);
    return n;
}

/* Random blocks of a weight type with ordinary scales; n elements, whole blocks. */
static inline void check_random_weights(struct rng *r, int type, uint8_t *dst, int64_t n) {
    int64_t bytes = ktype_row_bytes(type, n);
    int size = ktype_block_bytes(type);
    if (type == KT_F32) {
        for (int64_t i = 0; i < n; i++) {
            float f = rng_float(r);
            memcpy(dst + 4 * i, &f, 4);
        }
        return;
    }
    for (int64_t i = 0; i < bytes; i++) dst[i] = (uint8_t)rng_next(r);
    if (type == KT_F16 || type == KT_BF16) { /* a sane exponent: |w| in [1/16, 1) or so */
        for (int64_t i = 0; i < n; i++) {
            dst[2 * i + 1] = (uint8_t)(type == KT_F16 ? (dst[2 * i + 1] & 0x83) | 0x34
                                                      : (dst[2 * i + 1] & 0x80) | 0x3E);
        }
        return;
    }
    for (int64_t b = 0; b < bytes; b += size) tame_block(type, dst + b);
}

#endif
