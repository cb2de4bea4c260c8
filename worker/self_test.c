/* worker/self_test.c: one rank of an all-reduce without a model: opens its device, meets its peers,
 * adds up and says how long it took.
 *
 * Owns: a context, a communicator, two buffers.  Called by: main.c, for octavo doctor.
 * Fails how: one sentence on standard error and an exit code, see self_test.h. A peer that never
 * comes is waited for without end: whoever started the ranks has the clock and kills them.
 * Limits: SELF_TEST_BYTES a sum.  Tested by: tests/faults/test_doctor.py
 *
 * Standard output is for the caller, a line each, so that it can tell which rank stopped where:
 *   stage device | meet | sum BYTES | done     what comes next
 *   opened NAME                                the collective that the ranks agreed on
 *   sum BYTES MICROSECONDS                     this rank's median of one sum
 * The values are small whole numbers: their sum has no rounding, whatever the order of adding, so
 * that one comparison serves all collectives.
 */
#include "worker/self_test.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/log.h"
#include "proto/opt.h"
#include "worker/coll_open.h"
#include "worker/process.h"

#define SELF_TEST_BYTES (64 << 20)
#define TURNS           5
#define CHAIN           4 /* sums timed at once */

struct self_test {
    int64_t rank, world, device_index, shm_bytes, bytes_max;
    const char *collective, *shm_path;
    const struct kernels *k;
    struct kctx *ctx;
    struct coll_maker *maker;
    struct coll *coll;
    float *host, *x; /* [bytes_max / 4], of this host and of the device */
};

static int read_options(struct self_test *t, int argc, char **argv, struct err_text *err) {
    const struct opt rows[] = {
        {.name = "rank",
         .value = "N",
         .kind = OPT_INT,
         .out = &t->rank,
         .max = LIMIT_RANKS - 1,
         .help = "This rank."},
        {.name = "world",
         .value = "N",
         .kind = OPT_INT,
         .out = &t->world,
         .min = 1,
         .max = LIMIT_RANKS,
         .help = "Ranks that add up."},
        {.name = "device-index",
         .value = "N",
         .kind = OPT_INT,
         .out = &t->device_index,
         .max = 1024,
         .help = "Which device."},
        {.name = "collective",
         .value = "NAME",
         .kind = OPT_CHOICE,
         .out = &t->collective,
         .choices = COLL_CHOICES,
         .help = "How to add up."},
        {.name = "shm",
         .value = "PATH",
         .kind = OPT_STRING,
         .out = &t->shm_path,
         .help = "Fresh shared memory of these ranks."},
        {.name = "shm-bytes",
         .value = "N",
         .kind = OPT_INT,
         .out = &t->shm_bytes,
         .max = INT64_MAX,
         .help = "Its size."},
        {.name = "bytes-max",
         .value = "N",
         .kind = OPT_INT,
         .out = &t->bytes_max,
         .min = 4096,
         .max = SELF_TEST_BYTES,
         .help = "The largest sum."},
    };
    TRY(opt_parse(rows, ARRAY_LEN(rows), argc, argv, 0,
                  "usage: octavo-worker --self-test-collective [OPTION…]\n"
                  "One rank of an all-reduce without a model, for octavo doctor.",
                  err));
    if (t->rank >= t->world)
        return err_set(err, ERR_SETUP, "--rank: expected less than --world %d, found %d",
                       (int)t->world, (int)t->rank);
    if (t->world > 1 && !t->shm_path)
        return err_set(err, ERR_SETUP, "--shm: expected a path, found none");
    return OK;
}

static void say(const char *line) {
    puts(line);
    fflush(stdout);
}

static int meet(struct self_test *t, struct err_text *err) {
    struct coll *shm = NULL;
    char line[32];
    say("stage meet");
    TRY(coll_maker_new(&t->maker, t->k, t->ctx, (int)t->rank, (int)t->world, t->collective, err));
    if (t->world > 1)
        TRY(coll_open_shm(&shm, t->shm_path, (uint64_t)t->shm_bytes, (int)t->rank, (int)t->world, 1,
                          err));
    int rc = coll_maker_open(&t->coll, t->maker, shm, 1, err);
    if (rc < 0) {
        if (shm) coll_close(shm);
        return rc;
    }
    snprintf(line, sizeof line, "opened %s", t->coll->ops->name);
    say(line);
    return OK;
}

static int open_device(struct self_test *t, struct err_text *err) {
    char text[256] = "";
    say("stage device");
    t->k = kernels_table();
    t->ctx = t->k->open((int)t->device_index, text, sizeof text);
    if (!t->ctx) return err_set(err, ERR_SETUP, "%s", text);
    t->host = malloc((size_t)t->bytes_max);
    t->x = t->k->alloc(t->ctx, (size_t)t->bytes_max);
    if (!t->host || !t->x)
        return err_set(err, ERR_NOMEM, "self test: expected %lld bytes of the device, found none",
                       (long long)t->bytes_max);
    return OK;
}

/* Within 2^19, so that sixteen of them fit a float's 24 bits. */
static float value(int64_t rank, int64_t i) {
    uint64_t r = ((uint64_t)i * 31 + (uint64_t)rank + 1) * 0x9e3779b97f4a7c15u;
    return (float)(int64_t)(r >> 44) - (float)(1 << 19);
}

static int check_sum(struct self_test *t, int64_t n, struct err_text *err) {
    int64_t wrong = 0, first = -1;
    t->k->get(t->ctx, t->host, t->x, (size_t)n * sizeof(float));
    TRY(coll_check(t->coll));
    for (int64_t i = n - 1; i >= 0; i--) {
        float want = 0;
        for (int64_t r = 0; r < t->world; r++) want += value(r, i);
        if (want != t->host[i]) wrong++, first = i;
    }
    if (wrong == 0) return OK;
    return err_set(err, ERR_FORMAT,
                   "sum of %lld values: expected all right, found %lld wrong, the "
                   "first at %lld",
                   (long long)n, (long long)wrong, (long long)first);
}

static double now_us(void) {
    struct timespec c;
    clock_gettime(CLOCK_MONOTONIC, &c);
    return (double)c.tv_sec * 1e6 + (double)c.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* What is summed for the clock is what the sums before have left: only its size matters. */
static int time_sums(struct self_test *t, int64_t n, double *median) {
    double us[TURNS];
    for (int i = 0; i < TURNS; i++) {
        t->k->zero(t->ctx, t->x, (size_t)n * sizeof(float));
        t->k->sync(t->ctx);
        TRY(coll_barrier(t->coll));
        double start = now_us();
        for (int c = 0; c < CHAIN; c++) TRY(coll_all_reduce(t->coll, t->x, n));
        t->k->sync(t->ctx);
        us[i] = (now_us() - start) / CHAIN;
    }
    qsort(us, TURNS, sizeof us[0], by_value);
    *median = us[TURNS / 2];
    return coll_check(t->coll);
}

static int sum(struct self_test *t, int64_t bytes, struct err_text *err) {
    int64_t n = bytes / (int64_t)sizeof(float);
    double us = 0;
    char line[80];
    snprintf(line, sizeof line, "stage sum %lld", (long long)bytes);
    say(line);
    for (int64_t i = 0; i < n; i++) t->host[i] = value(t->rank, i);
    t->k->put(t->ctx, t->x, t->host, (size_t)bytes);
    TRY(coll_all_reduce(t->coll, t->x, n));
    TRY(check_sum(t, n, err));
    TRY(time_sums(t, n, &us));
    snprintf(line, sizeof line, "sum %lld %.1f", (long long)bytes, us);
    say(line);
    return OK;
}

static int run(struct self_test *t, struct err_text *err) {
    static const int64_t sizes[] = {24 << 10, 1 << 20, 16 << 20};
    TRY(open_device(t, err));
    TRY(meet(t, err));
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++)
        if (sizes[i] <= t->bytes_max) TRY(sum(t, sizes[i], err));
    say("stage done");
    return coll_barrier(t->coll); /* nobody leaves while a peer still reads its memory */
}

static void deinit(struct self_test *t) {
    if (t->coll) coll_close(t->coll);
    coll_maker_free(t->maker);
    if (t->x) t->k->free(t->ctx, t->x);
    if (t->ctx) t->k->close(t->ctx);
    free(t->host);
}

int self_test_main(int argc, char **argv) {
    struct self_test t = {.world = 1, .collective = "auto", .bytes_max = 1 << 20};
    struct err_text err = {0};
    char who[32];
    process_die_with_parent();
    int rc = read_options(&t, argc, argv, &err);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    snprintf(who, sizeof who, "self-test/%d", (int)t.rank);
    log_init(who, LOG_INFO, NULL);
    if (rc >= 0) rc = run(&t, &err);
    if (rc < 0)
        fprintf(stderr, "rank %d: %s\n", (int)t.rank, err.text[0] ? err.text : err_name(rc));
    deinit(&t);
    return rc >= 0 ? EXIT_ASKED : rc == ERR_SETUP || rc == ERR_NOMEM ? EXIT_SETUP : EXIT_FAILED;
}
