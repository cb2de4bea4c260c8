/* tests/gpu/check.c: the harness behind check.h. */
#include "tests/gpu/check.h"

#include "tests/kernels/tame.h"

struct side side[SIDES];
int checks_failed, checks_done;
static int group_failed, group_done;
static double group_worst;
static char where[256], worst_where[320];
static uint64_t state;

const int all_types[] = {KT_F32,  KT_F16,  KT_BF16, KT_Q4_0, KT_Q4_1, KT_Q5_0, KT_Q5_1,   KT_Q8_0,
                         KT_Q2_K, KT_Q3_K, KT_Q4_K, KT_Q5_K, KT_Q6_K, KT_IQ4_NL, KT_IQ4_XS,
                         KT_IQ2_XXS, KT_IQ2_XS, KT_IQ2_S, KT_IQ3_XXS, KT_IQ3_S, KT_IQ1_S, KT_IQ1_M,
                         KT_MXFP4, KT_NVFP4};
const int n_all_types = sizeof all_types / sizeof all_types[0];

uint64_t random_seed(void) {
    const char *s = getenv("OCTAVO_SEED");
    return s ? strtoull(s, NULL, 10) : 1;
}

uint64_t random_next(void) {
    if (!state) state = random_seed() * 1000003;
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

float random_unit(void) {
    return (float)((int64_t)(random_next() >> 40) - (1 << 23)) * 0x1p-23f;
}

int random_below(int n) { return (int)(random_next() % (uint64_t)n); }

/* ---- memory ---------------------------------------------------------------------------------- */

#define KEPT_MAX 4096
static struct both kept[KEPT_MAX];
static int n_kept;

static void *must(void *p, const char *what, size_t bytes) {
    if (p) return p;
    fprintf(stderr, "check: no memory for %s of %zu bytes\n", what, bytes);
    exit(1);
}

struct both both_new(size_t bytes) {
    struct both b = {.bytes = bytes};
    for (int s = 0; s < SIDES; s++)
        b.p[s] = must(side[s].k->alloc(side[s].c, bytes), "an array", bytes);
    if (n_kept == KEPT_MAX) must(NULL, "one more array", bytes);
    kept[n_kept++] = b;
    both_poison(&b);
    return b;
}

void both_free_all(void) {
    while (n_kept > 0) {
        struct both *b = &kept[--n_kept];
        for (int s = 0; s < SIDES; s++) side[s].k->free(side[s].c, b->p[s]);
    }
}

void both_poison(const struct both *b) {
    void *h = must(malloc(b->bytes ? b->bytes : 1), "poison", b->bytes);
    memset(h, 0xFF, b->bytes);
    for (int s = 0; s < SIDES; s++) side[s].k->put(side[s].c, b->p[s], h, b->bytes);
    side[1].k->sync(side[1].c);
    free(h);
}

struct both both_bytes(const void *src, size_t bytes) {
    struct both b = both_new(bytes);
    for (int s = 0; s < SIDES; s++) side[s].k->put(side[s].c, b.p[s], src, bytes);
    side[1].k->sync(side[1].c);
    return b;
}

struct both both_floats(int64_t n, float size) {
    float *h = must(malloc((size_t)n * sizeof *h + 1), "numbers", (size_t)n * sizeof *h);
    for (int64_t i = 0; i < n; i++) h[i] = random_unit() * size;
    struct both b = both_bytes(h, (size_t)n * sizeof *h);
    free(h);
    return b;
}

struct both both_ints(int64_t n, const int32_t *values) {
    return both_bytes(values, (size_t)n * sizeof *values);
}

float *host_floats(const struct both *b, int s) {
    float *h = must(malloc(b->bytes ? b->bytes : 1), "a copy", b->bytes);
    side[s].k->get(side[s].c, h, b->p[s], b->bytes);
    return h;
}

int32_t *host_ints(const struct both *b, int s) { return (int32_t *)(void *)host_floats(b, s); }

/* ---- weights --------------------------------------------------------------------------------- */

void random_weights(int type, uint8_t *dst, int64_t n) {
    int64_t bytes = ktype_row_bytes(type, n), size = ktype_block_bytes(type);
    if (type == KT_F32) {
        for (int64_t i = 0; i < n; i++) {
            float f = random_unit();
            memcpy(dst + 4 * i, &f, 4);
        }
        return;
    }
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        uint64_t v = random_next();
        memcpy(dst + i, &v, 8);
    }
    for (; i < bytes; i++) dst[i] = (uint8_t)random_next();
    if (type == KT_F16 || type == KT_BF16) {
        for (i = 0; i < n; i++)
            dst[2 * i + 1] = (uint8_t)(type == KT_F16 ? (dst[2 * i + 1] & 0x83) | 0x34
                                                      : (dst[2 * i + 1] & 0x80) | 0x3E);
        return;
    }
    for (int64_t b = 0; b < bytes; b += size) tame_block(type, dst + b);
}

struct kmat_both mat_new(int type, int64_t count, int64_t rows, int64_t cols) {
    struct kmat_both b;
    struct both data = {0};
    for (int s = 0; s < SIDES; s++) {
        size_t bytes = side[s].k->mat_bytes(type, count, rows, cols);
        data.p[s] = must(side[s].k->alloc(side[s].c, bytes), "a matrix", bytes);
        b.m[s] = (struct kmat){type, count, rows, cols, data.p[s], 0, 0, NULL};
    }
    if (n_kept == KEPT_MAX) must(NULL, "one more matrix", 0);
    kept[n_kept++] = data;
    size_t one = (size_t)(rows * ktype_row_bytes(type, cols));
    uint8_t *h = must(malloc(one), "weights", one);
    for (int64_t i = 0; i < count; i++) {
        random_weights(type, h, rows * cols);
        for (int s = 0; s < SIDES; s++) side[s].k->mat_pack(side[s].c, &b.m[s], i, h);
    }
    free(h);
    return b;
}

/* ---- comparing ------------------------------------------------------------------------------- */

void begin(const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    vsnprintf(where, sizeof where, format, ap);
    va_end(ap);
}

void passed(int n) {
    checks_done += n;
    group_done += n;
}

void fail(const char *format, ...) {
    va_list ap;
    checks_failed++;
    if (group_failed++ >= 8) return; /* the first say enough */
    printf("FAIL %s: ", where);
    va_start(ap, format);
    vprintf(format, ap);
    va_end(ap);
    printf(" (OCTAVO_SEED=%llu)\n", (unsigned long long)random_seed());
}

static void settle(const char *what, double error, double tolerance, int64_t at, float expected,
                   float found) {
    checks_done++;
    group_done++;
    if (!(error <= group_worst)) {
        group_worst = error;
        snprintf(worst_where, sizeof worst_where, "%s %s", where, what);
    }
    if (!(error <= tolerance))
        fail("%s: relative error %.3g, at most %.3g; first of the worst at %lld: expected %.9g, "
             "found %.9g", what, error, tolerance, (long long)at, (double)expected, (double)found);
}

void compare_rows(const char *what, const struct both *b, int64_t rows, int64_t width,
                  const int32_t *skip, double tolerance) {
    float *x = host_floats(b, 0), *y = host_floats(b, 1);
    double norm = 0, diff = 0, worst = -1;
    int64_t at = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (skip && skip[r] < 0) continue;
        for (int64_t i = r * width; i < (r + 1) * width; i++) {
            double d = fabs((double)x[i] - (double)y[i]);
            if (!(d <= 1e30)) d = 1e30; /* NaN too */
            if (d > worst) worst = d, at = i;
            norm += (double)x[i] * (double)x[i];
            diff += d * d;
        }
    }
    settle(what, diff == 0 ? 0 : sqrt(diff / (norm > 0 ? norm : 1e-30)), tolerance, at, x[at],
           y[at]);
    free(x);
    free(y);
}

void compare(const char *what, const struct both *b, int64_t n, double tolerance) {
    compare_rows(what, b, 1, n, NULL, tolerance);
}

void compare_ints(const char *what, const struct both *b, int64_t n) {
    int32_t *x = host_ints(b, 0), *y = host_ints(b, 1);
    checks_done++;
    group_done++;
    for (int64_t i = 0; i < n; i++)
        if (x[i] != y[i]) {
            fail("%s: element %lld of %lld: expected %d, found %d", what, (long long)i,
                 (long long)n, x[i], y[i]);
            break;
        }
    free(x);
    free(y);
}

void report(const char *group) {
    printf("%s %-34s %5d checks  worst relative error %.2e  (%s)\n",
           group_failed ? "FAIL" : "PASS", group, group_done, group_worst, worst_where);
    fflush(stdout);
    group_failed = group_done = 0;
    group_worst = 0;
    worst_where[0] = 0;
    both_free_all();
}
