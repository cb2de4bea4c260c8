/* tests/gpu/check.h: two backends side by side: the same inputs to both, results compared.
 *
 * Every array lives twice, once per backend. Outputs are poisoned (NaN) before they are written, so
 * that an element nobody wrote fails. OCTAVO_SEED=n repeats a run with another seed.
 */
#ifndef OCTAVO_TESTS_GPU_CHECK_H
#define OCTAVO_TESTS_GPU_CHECK_H

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

#define SIDES 2 /* 0: the reference, 1: the device */

struct side {
    const struct kernels *k;
    struct kctx *c;
};

struct both {
    void *p[SIDES];
    size_t bytes;
};

extern struct side side[SIDES];
extern int checks_failed, checks_done;
extern struct both *both_all;

/* random numbers: SplitMix64 (Steele, Lea, Flood 2014) */
uint64_t random_next(void);
float random_unit(void); /* [-1, 1) */
int random_below(int n);
uint64_t random_seed(void);

struct both both_new(size_t bytes);                        /* poisoned */
struct both both_floats(int64_t n, float size);            /* random in ±size */
struct both both_ints(int64_t n, const int32_t *values);
struct both both_bytes(const void *src, size_t bytes);
void both_free_all(void);
void both_poison(const struct both *b);
float *host_floats(const struct both *b, int s);           /* malloc'ed copy of side s */
int32_t *host_ints(const struct both *b, int s);

/* Random blocks with ordinary scales, `n` elements. */
void random_weights(int type, uint8_t *dst, int64_t n);

/* A matrix stack of the type on both sides. */
struct kmat_both {
    struct kmat m[SIDES];
};
struct kmat_both mat_new(int type, int64_t count, int64_t rows, int64_t cols);

/* One line per comparison that fails, or a summary line by `report`. */
void begin(const char *format, ...);
void fail(const char *format, ...);
void passed(int n); /* comparisons made by hand */
void compare(const char *what, const struct both *b, int64_t n, double tolerance);
void compare_rows(const char *what, const struct both *b, int64_t rows, int64_t width,
                  const int32_t *skip, double tolerance);
void compare_ints(const char *what, const struct both *b, int64_t n);
void report(const char *group); /* PASS or FAIL, number of checks, worst error since the last */

extern const int all_types[];
extern const int n_all_types;

#endif
