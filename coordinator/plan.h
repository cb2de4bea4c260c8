/* coordinator/plan.h: what a model would need of given devices, from its header alone.
 *
 * Owns: nothing; pure.  Called by: cmd_plan.c.
 * Fails how: ERR_FORMAT or ERR_SETUP with a sentence when the header is not that of a model.
 * Limits: PLAN_NOTES.  Tested by: tests/unit/test_plan.c (against what the worker allocates)
 *
 * A second opinion on purpose: the worker counts with its own code, over the same header, and the
 * test compares the two for every number of ranks. Neither can be wrong alone unnoticed.
 */
#ifndef OCTAVO_COORDINATOR_PLAN_H
#define OCTAVO_COORDINATOR_PLAN_H

#include "proto/gguf.h"
#include "proto/limits.h"

#define PLAN_BATCHES 7 /* 1, 2, 4 … 64 */
#define PLAN_NOTES   16

struct plan_ask {
    int ranks, devices; /* ranks get devices in turn */
    bool cuda;
    bool nvlink;
    uint64_t memory_bytes; /* of each device; of the host for the CPU backend */
    double bytes_per_s;    /* read bandwidth of each device; of the host */
    int64_t context;       /* of the longest sequence; 0: the model's */
    int64_t depth;         /* of each sequence where speed is estimated; 0: 1,024 */
    int max_seqs, max_rows; /* --max-seqs, --max-step-tokens */
};

struct plan_dims {
    char arch[32];
    int64_t layers, mtp, dense, context, d_model, heads, r_q, r_kv, d_rope, d_nope, d_v;
    int64_t ix_heads, ix_dim, ix_topk, experts, used, vocab;
    int64_t full_layers; /* with an indexer of their own */
    bool full[LIMIT_LAYERS];
};

enum plan_part {
    PART_EMBEDDING, PART_HEAD, PART_ATTENTION, PART_INDEXER, PART_DENSE, PART_EXPERTS,
    PART_SHARED, PART_SMALL,
    PLAN_PARTS
};
extern const char *const plan_part_names[PLAN_PARTS];

/* What does not split, or is not served: one for each kind of tensor. */
struct plan_note {
    char tensor[64]; /* the first of them */
    int tensors;
    bool refused;    /* the worker will not load the model so */
    char why[160];
};

struct plan_batch {
    int batch;
    int64_t context;     /* longest that all of them can have */
    uint64_t read_bytes; /* by a device, in a step that gives each of them a token */
    double floor_s;      /* that over the bandwidth */
    double step_s;       /* to expect */
};

struct plan {
    struct plan_dims dims;
    struct plan_ask ask;                     /* completed */
    uint64_t part_bytes[PLAN_PARTS];         /* of the fullest rank */
    uint64_t index_query_bytes;              /* of PART_INDEXER, read only past the top-k width */
    uint64_t weight_bytes, scratch_bytes;    /* of the fullest rank */
    uint64_t reserve_bytes;                  /* CUDA: context and graphs, a rule of thumb */
    uint64_t page_bytes, latent_row_bytes, index_row_bytes;
    uint64_t unread_bytes;                   /* of the file, that no rank loads */
    int unread_tensors;
    uint64_t device_bytes;                   /* of the fullest device, without pages */
    int64_t pages;                           /* that fit beside it, as `octavo serve` would have it */
    int64_t batch_at_context;                /* sequences that all reach the full context */
    bool dealt;                              /* experts are dealt out whole */
    bool fits;
    struct plan_note notes[PLAN_NOTES];
    int n_notes;
    struct plan_batch batches[PLAN_BATCHES];
};

int plan_make(struct plan *p, const struct gguf *g, const struct plan_ask *ask,
              struct err_text *err);

/* plan_shape.c: the dimensions; and the bytes that each rank holds. */
int plan_read_dims(struct plan_dims *d, const struct gguf *g, struct err_text *err);
void plan_count_weights(struct plan *p, const struct gguf *g);

/* Memory is given out in multiples of this. */
static inline uint64_t plan_align(uint64_t n) {
    return (n + 255) / 256 * 256;
}

/* The widest share of a rank, for scratch: of dense and shared, and of an expert. */
void plan_widths(const struct plan *p, const struct gguf *g, int64_t *wide, int64_t *expert);

#endif
