/* worker/bench.h: measuring the backend on models that exist only in device memory.
 *
 * octavo-worker-cuda --bench, octavo-worker --bench, and bench_cuda, the same without the messaging
 * libraries. A run measures the ceilings of its own machine first and puts every row beside them.
 *
 * Owns: struct bench: one model of random weights, its ceilings, where rows go.
 * Called by: worker/main.c, bench_main.c; the parts by each other: bench.c (arguments, order),
 * bench_model.c (weights), bench_step.c (whole steps), bench_ops.c (operations alone),
 * bench_table.c (rows), bench_device.cu or bench_device_cpu.c (what the kernel table has no slot
 * for). Fails how: exit 2 with a sentence for arguments, exit 1 when memory is refused. Limits:
 * BENCH_LIST values per list, one device.  Tested by: tests/tree/test_bench.py
 */
#ifndef OCTAVO_WORKER_BENCH_H
#define OCTAVO_WORKER_BENCH_H

#include "worker/model.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BENCH_LIST  16
#define BENCH_GROUP 8 /* steps queued at once */
#define BENCH_TURNS 7 /* of which the median counts */
#define BENCH_SLOTS 64
#define BENCH_ROWS  LIMIT_STEP_ROWS /* longer prompts are fed in chunks of so many */

struct bench_list {
    int n, at[BENCH_LIST];
};

struct bench {
    struct model m;
    struct coll *coll; /* of decode steps: loop-back, or of one rank */
    int ranks;         /* the model is one rank's share of so many */
    int moe_layers;
    double bytes_s, flops_s; /* ceilings: reading, and products of half-precision matrices */
    uint64_t seed;
    uint64_t fixed_bytes,
        expert_bytes;               /* of weights: read by each step; by each expert and layer */
    uint64_t select_bytes;          /* read besides where positions are selected */
    double fixed_macs, expert_macs; /* multiplications per row: all layers'; an expert's */
    int32_t *token, *pos, *slot, *out_row; /* host [max_rows] */
    char shape[32];
    FILE *csv; /* or NULL */
};

/* Arguments after --bench. 0, or 2 with a sentence on stderr when they make no sense. */
int bench_main(int argc, char **argv);

/* ---- bench_model.c */

/* full:LAYERS, shard:N[:LAYERS] or tiny; false: neither. Memory: weights, scratch, and cache pages
 * for as much of `pages` as fits. */
struct bench_size {
    int max_rows, max_context;
    int64_t pages;
};
bool bench_make(struct bench *b, const char *shape, const struct bench_size *size);

/* ---- bench_step.c */

/* Rows of one step, with fresh random tokens: `prompts` slots, each fed `each` positions from `at`
 * on (decode: one each). The last position of each slot is sampled. */
void bench_rows(struct bench *b, int prompts, int each, int at);

/* Gives the first `slots` slots pages for so many positions; false: they do not fit. */
bool bench_pages(struct bench *b, int slots, int positions);
int64_t bench_pages_of(int slots, int positions);

/* How many of so many prompts of `each` tokens go into one step of up to max_rows; at least one. */
int bench_together(int prompts, int each, int max_rows);

void bench_run(struct bench *b, struct coll *coll); /* one step; ends the process on failure */
int bench_distinct(
    struct bench *b); /* experts that the rows of the last step chose in its last layer */
double bench_now_us(void);
double bench_median(double *us, int n); /* sorts */

void bench_decode(struct bench *b, int rows, int context);
void bench_prompts(struct bench *b, int prompts, int each);

/* ---- bench_ops.c: each operation alone, at rows of one position each or of one prompt */
void bench_ops(struct bench *b, int rows, int context, bool prompt);

/* ---- bench_table.c */

struct bench_row {
    const char *section, *name; /* "decode" ""; "op" "norm" */
    int rows, context, calls;   /* calls: how many launches of it the time is the mean of; or 0 */
    double us, fastest_us, slowest_us;
    double bytes, flops; /* that must move, that must be done; 0: not counted */
    double distinct;     /* experts per layer; 0: not counted */
    double tokens;       /* fed in that time; 0: not a step */
};
bool bench_table_open(struct bench *b, const char *csv_path);
void bench_table_head(const struct bench *b, const char *title);
void bench_table_put(const struct bench *b, const struct bench_row *r);
void bench_table_note(const struct bench *b, const char *section, int rows, int context,
                      const char *why);
void bench_table_close(struct bench *b);

/* ---- bench_device.cu, bench_device_cpu.c: device memory that the kernel table cannot fill */

/* Random quantised blocks of a type, `bytes` of them as the backend packs them, values about `size`
 * in magnitude; or random float32 in ±size for type 0. */
void bench_fill_weights(int type, void *p, uint64_t bytes, float size, uint64_t seed);
void bench_fill_floats(float *p, uint64_t n, float size, uint64_t seed);
void bench_fill_constant(float *p, uint64_t n, float value);
void bench_fill_cache(void *p, uint64_t bytes, uint64_t element_bytes, uint64_t seed);

/* Bytes per second of reading, over a buffer far larger than the caches. */
double bench_read_bandwidth(void);

/* Operations per second of half-precision products, from registers; 0: not measured here. */
double bench_matrix_rate(void);

/* Leaves nothing of interest in the device's caches. */
void bench_flush(struct kctx *ctx);

/* The real collectives of `ranks` ranks, played by this one; *out untouched and false: there are
 * none here. */
bool bench_loopback(struct coll **out, struct kctx *ctx, int ranks);

#ifdef __cplusplus
}
#endif
#endif
