/* coordinator/plan.c: memory, room for sequences and speed to expect. See plan.h.
 *
 * Owns: nothing.  Called by: cmd_plan.c.  Fails how: see plan.h.  Limits: none of its own.
 * Tested by: tests/unit/test_plan.c
 *
 * Weights and caches are exact on both backends; scratch is exact on the CPU and close on CUDA,
 * where context and graphs are a rule of thumb. The floor is what must be read over what the device
 * reads; what to expect is the floor times what this build was measured at (README, Figures), and
 * at least the fixed cost of a layer. Which experts a batch meets is taken as independent and even:
 * an upper bound, since real batches agree with themselves.
 */
#include "coordinator/plan.h"

#include <math.h>
#include <string.h>

#include "coordinator/cacheplan.h"

#define TOP_LOGPROBS   20
#define SAMPLING_BYTES 8240 /* parameters of one sequence: 1,024 biases and a dozen numbers */
#define DEPTH          1024
#define RESERVE_BYTES  ((uint64_t)1536 << 20) /* CUDA context, libraries, graphs of one rank */
#define SELECT_BYTES   ((uint64_t)256 << 20)  /* CUDA: scores of the indexer at a time */
#define PARTIAL_BYTES  ((uint64_t)256 << 20)  /* CUDA: partial sums of experts at a time */
#define ATTEND_SPLITS  8192                   /* CUDA: partial results of attention */

/* Measured on one H200, December 2026, at batch 1, 2, 4 … 64: times the floor at full width, and
 * what a layer of a narrow share takes over its bytes (4 and 16 in between the others). */
static const double times_floor[PLAN_BATCHES] = {1.6, 2.2, 2.2, 2.0, 2.3, 2.0, 2.1};
static const double layer_s[PLAN_BATCHES] = {49e-6, 117e-6, 140e-6, 172e-6, 220e-6, 290e-6, 440e-6};
#define CPU_TIMES_FLOOR 3.0 /* bound by arithmetic */

/* An all-reduce of one row, and of each further one. */
#define PCIE_SUM_S       10e-6
#define PCIE_SUM_ROW_S   1.1e-6
#define NVLINK_SUM_S     8e-6
#define NVLINK_SUM_ROW_S 0.15e-6

/* ---- memory ------------------------------------------------------------------------------ */

struct sum {
    uint64_t bytes;
};

static void add(struct sum *s, int64_t elements, int64_t each) {
    s->bytes += plan_align((uint64_t)elements * (uint64_t)each);
}

/* Scratch of single operations: the largest. */
static uint64_t operation_bytes(const struct plan *p, int64_t rows, int64_t outs) {
    const struct plan_dims *d = &p->dims;
    const bool cuda = p->ask.cuda;
    int64_t context = p->ask.context, heads = d->heads / p->ask.ranks;
    int64_t pairs = rows * MAX(d->used, 1), spelled = MAX(context, d->ix_topk);
    uint64_t scores = 4 * (uint64_t)rows * (uint64_t)context;
    uint64_t partial = 4 * (uint64_t)pairs * (uint64_t)d->d_model;
    uint64_t select = cuda ? MIN(MAX(SELECT_BYTES, 4 * (uint64_t)context), scores)
                           : (uint64_t)(context * (16 + 4 * d->ix_heads));
    uint64_t attend =
        cuda ? 4 * ATTEND_SPLITS * (uint64_t)(d->r_kv + 2) : (uint64_t)(spelled * (8 + 4 * heads));
    uint64_t experts = cuda ? MIN(PARTIAL_BYTES, partial)
                            : (uint64_t)(pairs * (16 + 4 * 64 + 4) + 4 * (d->experts + 1));
    uint64_t sample = cuda ? 4 * (uint64_t)outs * (uint64_t)d->vocab : 34 * (uint64_t)d->vocab;
    if (d->ix_heads == 0) select = 0;
    return MAX(MAX(select, attend), MAX(experts, sample));
}

static uint64_t scratch_bytes(const struct plan *p, const struct gguf *g) {
    const struct plan_dims *d = &p->dims;
    const int64_t T = p->ask.max_rows, H = d->heads / p->ask.ranks, slots = p->ask.max_seqs;
    const int64_t S = MIN(MIN(4 * slots, T), LIMIT_STEP_SAMPLES), W = d->vocab / p->ask.ranks;
    int64_t wide, expert;
    struct sum s = {0};
    plan_widths(p, g, &wide, &expert); /* at most what the file has bytes for */
    for (int i = 0; i < 3; i++) add(&s, T * d->d_model, 4);
    add(&s, T * d->r_q, 4), add(&s, T * (d->r_kv + d->d_rope), 4);
    add(&s, T * d->ix_dim, 4), add(&s, T * d->ix_heads, 4), add(&s, T * d->ix_heads * d->ix_dim, 4);
    add(&s, T * H * (d->d_nope + d->d_rope), 4), add(&s, T * H * (d->r_kv + d->d_rope), 4);
    add(&s, T * H * d->r_kv, 4), add(&s, T * H * d->d_v, 4);
    add(&s, T * d->ix_topk, 4), add(&s, T, 4);
    add(&s, T * d->experts, 4), add(&s, T * d->used, 4), add(&s, T * d->used, 4);
    add(&s, T * d->used * expert, 4), add(&s, T * wide, 4), add(&s, T * wide, 4);
    add(&s, T * d->d_rope, 4);
    add(&s, S * d->d_model, 4), add(&s, S * W, 4);
    if (p->ask.ranks > 1) add(&s, S * d->vocab, 4);
    add(&s, 2 * S, 4), add(&s, 2 * S * TOP_LOGPROBS, 4);
    s.bytes += plan_align(operation_bytes(p, T, S));
    add(&s, 3 * T + S, 4), add(&s, d->d_rope / 2, 8);
    add(&s, slots * ((p->ask.context + LIMIT_PAGE_TOKENS - 1) / LIMIT_PAGE_TOKENS + 1), 4);
    add(&s, slots * d->vocab, 2), add(&s, slots * d->vocab, 2);
    add(&s, slots * SAMPLING_BYTES, 1);
    return s.bytes;
}

static void count_page(struct plan *p) {
    const struct plan_dims *d = &p->dims;
    uint64_t each = p->ask.cuda ? 2 : 4;
    p->latent_row_bytes = (uint64_t)(d->r_kv + d->d_rope) * each;
    p->index_row_bytes = (uint64_t)d->ix_dim * each;
    p->page_bytes = (uint64_t)d->layers * plan_align(LIMIT_PAGE_TOKENS * p->latent_row_bytes) +
                    (uint64_t)d->full_layers * plan_align(LIMIT_PAGE_TOKENS * p->index_row_bytes);
}

static int ranks_per_device(const struct plan *p) {
    return p->ask.cuda ? (p->ask.ranks + p->ask.devices - 1) / p->ask.devices : p->ask.ranks;
}

/* The largest number of pages that any sequences could use, beside the weights. */
static int64_t pages_that_fit(const struct plan *p) {
    uint64_t memory = p->ask.memory_bytes;
    if (p->device_bytes >= memory) return 0;
    const struct cache_room room = {.host_memory = !p->ask.cuda,
                                    .host_available_bytes = memory - p->device_bytes,
                                    .free_bytes = memory - p->device_bytes,
                                    .ranks_per_device = ranks_per_device(p),
                                    .world = p->ask.ranks,
                                    .page_bytes = p->page_bytes,
                                    .context = p->ask.context,
                                    .max_seqs = p->ask.max_seqs};
    return cache_plan_pages(&room);
}

/* ---- speed ------------------------------------------------------------------------------- */

static double sum_seconds(const struct plan_ask *a, int batch) {
    if (a->ranks == 1) return 0;
    return a->nvlink ? NVLINK_SUM_S + NVLINK_SUM_ROW_S * batch
                     : PCIE_SUM_S + PCIE_SUM_ROW_S * batch;
}

/* Share of the experts that a batch meets. Dealt out, the rank that got most of them is waited for:
 * a fit to the expectation over eight ranks. */
static double experts_met(const struct plan *p, int batch) {
    const struct plan_dims *d = &p->dims;
    if (d->experts == 0) return 0;
    double met = 1 - pow(1 - (double)d->used / (double)d->experts, batch);
    return p->dealt ? MIN(1, met * (1 + 1.6 / sqrt(batch))) : met;
}

static uint64_t read_bytes(const struct plan *p, int batch) {
    const struct plan_dims *d = &p->dims;
    const int64_t depth = p->ask.depth;
    const bool sparse = d->ix_topk > 0 && depth > d->ix_topk;
    uint64_t weights = p->weight_bytes - p->part_bytes[PART_EMBEDDING] -
                       p->part_bytes[PART_EXPERTS] - (sparse ? 0 : p->index_query_bytes);
    double experts = (double)p->part_bytes[PART_EXPERTS] * experts_met(p, batch);
    int64_t rows = sparse ? d->ix_topk : depth;
    uint64_t cache = (uint64_t)(d->layers * rows) * p->latent_row_bytes;
    if (sparse) cache += (uint64_t)(d->full_layers * depth) * p->index_row_bytes;
    return (uint64_t)ranks_per_device(p) * (weights + (uint64_t)experts + (uint64_t)batch * cache);
}

static void estimate(struct plan *p, int i, int64_t pages) {
    struct plan_batch *b = &p->batches[i];
    const struct plan_dims *d = &p->dims;
    b->batch = 1 << i;
    b->context = MIN(d->context, pages / b->batch * LIMIT_PAGE_TOKENS);
    b->read_bytes = read_bytes(p, b->batch);
    b->floor_s = (double)b->read_bytes / p->ask.bytes_per_s;
    double layers = p->ask.cuda ? (double)d->layers * layer_s[i] * ranks_per_device(p) : 0;
    double factor = p->ask.cuda ? times_floor[i] : CPU_TIMES_FLOOR;
    b->step_s = MAX(factor * b->floor_s, b->floor_s + layers) +
                2 * (double)d->layers * sum_seconds(&p->ask, b->batch);
}

/* ---- all of it --------------------------------------------------------------------------- */

static int complete(struct plan *p, struct err_text *err) {
    struct plan_ask *a = &p->ask;
    assert(a->ranks >= 1 && a->ranks <= LIMIT_RANKS && a->devices >= 1);
    assert(a->bytes_per_s > 0 && a->max_seqs > 0 && a->max_rows > 0);
    if (a->context > p->dims.context)
        return err_set(err, ERR_SETUP,
                       "--ctx: expected at most the model's %lld tokens, found %lld",
                       (long long)p->dims.context, (long long)a->context);
    if (p->dims.heads % a->ranks || p->dims.vocab % a->ranks)
        return err_set(err, ERR_SETUP,
                       "--tp: expected a divisor of %lld heads and %lld words, found %d",
                       (long long)p->dims.heads, (long long)p->dims.vocab, a->ranks);
    if (a->context == 0) a->context = p->dims.context;
    if (a->depth == 0) a->depth = DEPTH;
    a->depth = MIN(a->depth, a->context);
    return OK;
}

int plan_make(struct plan *p, const struct gguf *g, const struct plan_ask *ask,
              struct err_text *err) {
    *p = (struct plan){.ask = *ask};
    TRY(plan_read_dims(&p->dims, g, err));
    TRY(complete(p, err));
    plan_count_weights(p, g);
    p->scratch_bytes = scratch_bytes(p, g);
    p->reserve_bytes = ask->cuda ? RESERVE_BYTES : 0;
    count_page(p);
    p->device_bytes =
        (uint64_t)ranks_per_device(p) * (p->weight_bytes + p->scratch_bytes + p->reserve_bytes);
    p->pages = pages_that_fit(p);
    int64_t per_seq = (p->ask.context + LIMIT_PAGE_TOKENS - 1) / LIMIT_PAGE_TOKENS;
    p->batch_at_context = p->pages / per_seq;
    p->fits = p->pages > 0;
    for (int i = 0; i < p->n_notes; i++) p->fits &= !p->notes[i].refused;
    for (int i = 0; i < PLAN_BATCHES; i++) estimate(p, i, p->pages);
    return OK;
}
