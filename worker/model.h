/* worker/model.h: the model as one rank holds it: hyperparameters, weights, caches, scratch.
 *
 * Glossary of dimension names: kernels/kernels.h. "Local" means this rank's share.
 *
 * Split over `world` ranks: heads (q_b, k_b, v_b by rows; attn_output by columns), expert, shared
 * and dense width (gate, up by rows; down by columns), head by vocabulary rows; q_a, kv_a, indexer,
 * router, norms and the embedding replicated. A width that does not divide on block boundaries is
 * dealt out in whole experts or uneven runs of blocks (cut.c), or refused with tensor, expected,
 * found: never a silent re-quantisation.
 *
 * Owns: all device memory of the worker.  Called by: worker/main.c, step.c, tests.
 * Fails how: ERR_SETUP / ERR_FORMAT / ERR_NOMEM with a sentence, before or after the memory plan
 * is printed, never half-loaded.
 */
#ifndef OCTAVO_WORKER_MODEL_H
#define OCTAVO_WORKER_MODEL_H

#include "kernels/kernels.h"
#include "proto/base.h"
#include "proto/gguf.h"
#include "proto/limits.h"
#include "worker/coll.h"

struct hparams {
    char arch[32];
    int n_layers;        /* trunk, without MTP blocks */
    int n_mtp;           /* MTP blocks in the file */
    int n_dense;         /* leading dense layers */
    int64_t context, vocab;
    int64_t vocab_used;  /* ids from here on carry no text and are never sampled */
    int n_heads;         /* all ranks' */
    int f_dense, f_expert, f_shared; /* widths, all ranks' */
    bool index_full[LIMIT_LAYERS]; /* layer has an indexer of its own (else it reuses the last) */
    double rope_freq[512]; /* [P/2] */
    struct kdims dims;   /* local head count, everything else as in the file */
};

/* Rows of the memory plan. */
enum plan_group {
    PLAN_EMBEDDING, PLAN_HEAD, PLAN_ATTENTION, PLAN_INDEXER, PLAN_DENSE, PLAN_EXPERTS, PLAN_SHARED,
    PLAN_SMALL, /* norms, router, biases */
    PLAN_GROUPS
};

struct layer {
    float *attn_norm, *q_a_norm, *kv_a_norm, *ffn_norm; /* [D] [Q] [R] [D] */
    struct kmat q_a, q_b, kv_a, k_b, v_b, o;
    bool has_index;
    struct kmat iq_b, ik, iw;      /* indexer.attn_q_b, .attn_k, .proj */
    float *ik_gain, *ik_bias;      /* [J] */
    bool dense;
    struct kmat gate, up, down;    /* dense FFN, or the shared expert of a MoE layer */
    struct kmat router;
    float *router_bias;            /* [E] or NULL */
    struct kmat gate_exps, up_exps, down_exps;
    int first;                     /* expert that these begin with, where they are dealt out */
    struct kcache cache;
};

enum model_arena { ARENA_WEIGHTS, ARENA_SCRATCH, ARENA_CACHES, MODEL_ARENAS };

/* Device scratch of the forward pass, sized for the largest step. Shapes: kernels.h names. */
struct scratch {
    float *h, *x, *y;        /* [T, D] residual, normed, partial sum */
    float *q_a, *kv, *ik, *iw; /* [T, Q] [T, R+P] [T, J] [T, I] */
    float *q, *qk, *ol, *ov; /* [T, H, N+P] [T, H, R+P] [T, H, R] [T, H, V] */
    float *iq;               /* [T, I, J] */
    int32_t *selected, *n_selected; /* [T, K] [T] */
    float *logits_r;         /* [T, E] router */
    int32_t *ids; float *weights; /* [T, U] */
    float *act, *gate, *up;  /* [T, U, F] [T, wider of dense and shared] x2 */
    float *angles;           /* [T, P/2, 2] */
    float *out_h;            /* [S, D] */
    float *logits_local, *logits; /* [S, W] and gathered [world, S, W] */
    int32_t *token; float *logprob; int32_t *top_token; float *top_logprob; /* sampled */
    dptr op;                 /* kernels' own scratch */
};

struct model {
    const struct kernels *k;
    struct kctx *ctx;
    int rank, world;
    struct hparams hp;
    struct kmat token_embd;
    struct kmat output;      /* local vocabulary rows */
    float *output_norm;
    double *rope_freq;       /* device copy */
    struct layer *layers;    /* [n_layers]; MTP blocks are not loaded yet */
    struct kseqs seqs;
    struct kbatch batch;     /* device arrays, capacity max_rows / max_outs */
    struct scratch s;
    int64_t f_wide, f_expert;      /* widest local share of dense and shared; of an expert */
    int max_rows, max_outs, max_context;
    int64_t n_pages;
    uint64_t weight_bytes, scratch_bytes, page_bytes;
    uint64_t work_bytes;     /* workspace of the device's context; 0: it has none */
    uint64_t graph_bytes;    /* set aside for the step graphs that are captured at the start */
    int n_graphs;            /* how many those are */
    bool pad_rows;           /* fill steps up to a bucket of rows even where no graph is used */
    uint64_t group_bytes[PLAN_GROUPS]; /* weight_bytes by kind */
    int group_tensors[PLAN_GROUPS];
    void *arena[MODEL_ARENAS]; /* allocated once each */
    uint64_t asked_bytes;    /* requested of the file, or of the shard, while loading */
    uint64_t staging_bytes;  /* host memory that loading used, given back since */
    bool from_shard;
};

struct model_options {
    int rank, world;
    int device;              /* CUDA ordinal */
    int max_slots, max_rows, max_outs;
    int64_t context;         /* 0: the file's */
    bool print_plan;
    const char *load_share;  /* page that the ranks of this host share while loading, or NULL */
    const char *shard_dir;   /* where repacked weights are kept for the next start, or NULL */
    uint64_t load_window_bytes; /* how far they may be apart; 0: convoy.h's */
    size_t load_piece_bytes; /* of one read; 0: weights.c's */
};

/* Called while loading, about every 50 ms and at the end, from the loading thread. */
struct load_progress {
    void (*report)(void *user, uint64_t bytes, uint64_t total);
    void *user;
};

/* Reads and checks the hyperparameters and every tensor's shape; touches no weights. */
int model_read_hparams(struct hparams *hp, const struct gguf *g, struct err_text *err);

/* Opens the backend's device into m->k and m->ctx; *m must be zeroed. ERR_SETUP with a sentence. */
int model_open(struct model *m, int device, struct err_text *err);

/* Counts, prints the memory plan, allocates once, loads. *m must be zeroed or just opened; on
 * failure model_unload clears it. */
int model_load(struct model *m, const struct gguf *g, const struct model_options *o,
               struct load_progress progress, struct err_text *err);

/* Allocates the caches; once. ERR_NOMEM with a sentence. */
int model_alloc_caches(struct model *m, int64_t n_pages, struct err_text *err);
void model_unload(struct model *m); /* closes the device too */
void model_print_plan(FILE *f, const struct model *m);

/* worker/forward.c: the forward pass over m->batch, to sampled tokens in m->s.token…
 * dump: NULL, or called with each named tensor (device memory) for comparison of backends.
 * OK or ERR_ABORTED. */
struct dump {
    void (*tensor)(void *user, const char *name, int layer, const float *x, int rows, int width);
    void (*ids)(void *user, const char *name, int layer, const int32_t *x, int rows, int width);
    void *user;
};
int forward(struct model *m, struct coll *coll, const struct dump *dump);

/* Whether forward makes, or replays, a graph of the step. */
bool forward_in_graphs(const struct model *m, const struct coll *coll, const struct dump *dump);

/* Captures a step of `rows` rows, all sampled, without running it; context is a tier (graphs.h).
 * *kept: a graph was made; false: it is known, or there is no room for more. */
int forward_prepare(struct model *m, struct coll *coll, int rows, int context, bool *kept);

/* What such a step needs of the device. Runs nothing, so that the model's pointers may be any. */
int forward_measure(struct model *m, struct coll *coll, int rows, int outs, int context,
                    struct kneeds *out);

#endif
