/* kernels/kernels.h: the numbers. One table of operations that the forward pass is written over.
 *
 * Each slot has: its formula here, a plain C version in cpu/ (the specification), a check in
 * tests/kernels/, a CUDA version in cuda/ and a benchmark row. A static assert compares the number
 * of slots with the number of checks.
 *
 * Memory. Every pointer inside an operation's struct is *device* memory of the backend that runs it
 * (the CPU backend's device is the host); structs and scalars are host values. Device memory comes
 * from alloc, is filled with put and read with get. All operations of one context run in order;
 * on CUDA they are queued on its stream and may be captured into a graph, so whatever changes
 * from step to step (tokens, positions, slots, page tables) lives in device arrays at fixed
 * addresses, and only n_rows, n_out and the tier are host values.
 *
 * Determinism. No atomics on floats, fixed reduction order. CPU: the bits of a row's result depend
 * on that row and its cached context only, not on the other rows, chunking, slot or page numbers,
 * nor on the instruction set in use: dot products are sixteen interleaved partial sums of fused
 * multiply-adds, lane i summing elements i, i+16, …, combined in the fixed tree of cpu/dot.h.
 * CUDA: same batch, same bits.
 *
 * A backend may do an operation inside the one that follows if that reads its result; then what
 * nobody else reads (attn_prep's q_a, rope's part of qk, attend's out, swiglu's act) need not stand
 * in memory afterwards. It does for a caller who looks in between.
 *
 * A row whose slot is negative is padding: operations may compute rubbish for it (finite memory,
 * no faults), must not write any cache, and must not route it to an expert.
 *
 * Dimension names, in these comments and everywhere:
 *   T rows (tokens) of the step     D model width            H heads of this rank
 *   Q q rank                        R latent width (512)     P rope width (64)
 *   N no-rope width of a head (192) V value width of a head  I indexer heads
 *   J indexer head width (128)      K selected positions     E experts
 *   U experts used per token        F expert width, this rank's share
 *   S sampled rows                  W vocabulary rows of this rank
 *
 * Owns: the contract.  Called by: worker/.  Includes nothing of the project but quant.h.
 * Fails how: life and memory calls return NULL or a negative number; an operation that fails after
 * start-up is a device fault and ends the process (exit 1) with expression, file and line.
 */
#ifndef OCTAVO_KERNELS_KERNELS_H
#define OCTAVO_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

#define K_PAGE       64   /* positions per cache page */
#define K_BAND_ROWS  256  /* a matrix may be packed in bands of a multiple of so many rows */
#define K_TOP_MAX    20   /* alternatives reported per sampled token */
#define K_BIAS_MAX   1024 /* logit_bias entries per slot */
#define K_TOKEN_LAST (-1) /* in kbatch.token: feed what this slot sampled last */
#define K_GRAPHS_LATER 32 /* graphs that graph_begin may add to those of graph_prepare */
#define K_MARKS      16   /* marks that may stand in the queue of one context */

typedef void *dptr; /* device memory */

struct kctx; /* one device, one stream; opaque */

/* A stack of `count` weight matrices [count, rows, cols], each row a run of quantised blocks.
 * How the bytes lie on the device is the backend's business (layout); mat_pack makes it from file
 * order. count is 1 for a plain matrix, heads for k_b and v_b, experts for *_exps. */
struct kmat {
    int type;
    int64_t count, rows, cols;
    dptr data;
    int layout; /* backend's own; 0: file order */
    int scales; /* factors of the products: 0 none, 1 for all matrices, or count of them */
    const float *scale; /* [scales], of NVFP4 weights alone */
};

static inline int kmat_scale_at(const struct kmat *m, int64_t at) {
    return m->scales == 1 ? 0 : (int)at;
}

/* The rows of one step. Device arrays, filled by the worker before the first operation. */
struct kbatch {
    int n_rows;      /* T, padding included */
    int n_out;       /* S, padding included */
    int max_context; /* host's bound on position + 1 over all rows: chooses the attention tier */
    int32_t *token;  /* [T] token id or K_TOKEN_LAST; feed() replaces the latter */
    int32_t *pos;    /* [T] position in its sequence */
    int32_t *slot;   /* [T] row of the tables in kseqs; < 0: padding */
    int32_t *out_row; /* [S] row to sample after; < 0: padding */
};

/* Sampling parameters of a slot (device table; see sample below). */
struct ksampling {
    float temperature, top_p, min_p;
    float repetition, presence, frequency;
    int32_t top_k;
    int32_t top_logprobs;
    int32_t n_prompt; /* positions >= n_prompt are output */
    int32_t n_bias;
    uint64_t seed;
    int32_t bias_token[K_BIAS_MAX];
    float bias_value[K_BIAS_MAX];
};

/* Per-slot tables at fixed device addresses for the life of the worker. */
struct kseqs {
    int max_slots;
    int max_pages;              /* page-table width */
    int vocab;                  /* columns of the count tables */
    int32_t *page_table;        /* [max_slots, max_pages] page number of each 64 positions */
    int32_t *last_token;        /* [max_slots] sampled last */
    uint16_t *seen_prompt;      /* [max_slots, vocab] 1 if the token stands in the prompt */
    uint16_t *seen_output;      /* [max_slots, vocab] how often it stands in the output (saturates) */
    struct ksampling *sampling; /* [max_slots] */
};

/* Caches of one layer. Element types are the backend's (cache_bytes tells the size); position p of
 * slot s lies in page page_table[s][p / 64] at row p % 64. */
struct kcache {
    dptr latent; /* [pages, 64, R + P] normed latent, then the rotated shared key */
    dptr index;  /* [pages, 64, J]; NULL on layers without an indexer of their own */
};

/* Model constants that operations need. */
struct kdims {
    int d_model, n_heads, d_nope, d_rope, d_v, r_q, r_kv; /* n_heads: this rank's */
    int ix_heads, ix_dim, ix_topk;
    bool ix_rope_interleaved; /* GLM: true; DeepSeek-V3.2: half split */
    float rms_eps, ix_eps;    /* block norms; the indexer's LayerNorm */
    float attn_scale;         /* 1/sqrt(d_nope + d_rope), times YaRN's factor squared */
    int n_experts, n_used, n_groups, n_groups_used;
    int gating;               /* 1 softmax, 2 sigmoid */
    bool norm_weights;
    float weights_scale;      /* 1: none */
};

/* ---- operations ------------------------------------------------------------------------- */

/* Replaces K_TOKEN_LAST in batch->token by the slot's last token, and counts each fed token: below
 * n_prompt in seen_prompt, else in seen_output. (Counting when fed means that at sampling time
 * everything up to the row's own position has been counted, however it was chunked.) */
struct kop_feed {
    const struct kbatch *batch;
    const struct kseqs *seqs;
};

/* angles[t][i] = (cos, sin)(pos_t * freq_i), angle product in double, rounded to float last. */
struct kop_angles {
    const struct kbatch *batch;
    const double *freq; /* [P/2] */
    float *angles;      /* [T, P/2, 2] */
    int n_pairs;        /* P/2 */
};

/* h[t] = row token_t of table. */
struct kop_embed {
    const struct kbatch *batch;
    const struct kmat *table; /* [1, vocab, D] */
    float *h;                 /* [T, D] */
};

/* h += add (if add); y = h * gain / sqrt(mean(h^2) + eps). */
struct kop_norm {
    int n_rows, width;
    float *h;          /* [T, width], updated in place when add is given */
    const float *add;  /* [T, width] or NULL */
    const float *gain; /* [width] */
    float eps;
    float *y;          /* [T, width] may alias h when the sum is not wanted afterwards */
};

/* Independent products y_j = W_j x_j, one launch: y[t][r] = sum_c W[r][c] x[t][c]. */
struct kop_matmul {
    const struct kmat *w; /* count 1 */
    const float *x;       /* [T, x_stride], first cols used */
    float *y;             /* [T, y_stride], first rows written */
    int64_t x_stride, y_stride;
    int n_rows;           /* T */
};

/* Per head h: y[t][h][r] = sum_c W[h][r][c] x[t][h][c]. k_b (absorb) and v_b. */
struct kop_head_matmul {
    const struct kmat *w; /* count H */
    const float *x;       /* x + t*x_row + h*x_head */
    float *y;             /* y + t*y_row + h*y_head */
    int64_t x_row, x_head, y_row, y_head;
    int n_rows;
};

/* Between the A-projections and the queries, per row at its position p:
 *   a  = RMS(q_a; q_norm, eps)                         in place, NULL when the model has no q rank
 *   c  = RMS(kv[0..R); kv_norm, eps), k_r = rope(kv[R..R+P))   -> cache->latent row p
 *   ik = rope_first(LN(index_key; ik_gain, ik_bias))            -> cache->index row p, if given
 * rope rotates interleaved pairs (2i, 2i+1) by angles[t][i]; rope_first the first P of J values,
 * interleaved or half-split (i, i+P/2) as dims says. */
struct kop_attn_prep {
    const struct kbatch *batch;
    const struct kseqs *seqs;
    const struct kdims *dims;
    const struct kcache *cache;
    const float *angles;  /* [T, P/2, 2] */
    float *q_a;           /* [T, Q] or NULL */
    const float *q_norm;  /* [Q] */
    const float *kv;      /* [T, R + P] */
    const float *kv_norm; /* [R] */
    const float *index_key; /* [T, J] or NULL */
    const float *ik_gain, *ik_bias; /* [J] */
};

/* Rotates queries: the last P of each head of q go, rotated, to qk[t][h][R..R+P) (the absorbed part
 * qk[t][h][0..R) is head_matmul's); the first P of each indexer head of iq are rotated in place. */
struct kop_rope {
    const struct kbatch *batch;
    const struct kdims *dims;
    const float *angles;
    const float *q; /* [T, H, N + P] */
    float *qk;      /* [T, H, R + P] */
    float *iq;      /* [T, I, J] or NULL */
};

/* Lightning indexer: over positions u <= p of the row's sequence
 *   score(u) = 1/sqrt(J*I) * sum_h w[t][h] * max(0, iq[t][h] . ik_u)
 * and the K largest; ties go to the lower position. Rows with p + 1 <= K select everything.
 * selected[t] holds n_selected[t] positions in ascending order (all of them spelled out, also when
 * everything is selected). */
struct kop_select {
    const struct kbatch *batch;
    const struct kseqs *seqs;
    const struct kdims *dims;
    const struct kcache *cache;
    const float *iq;     /* [T, I, J] rotated */
    const float *w;      /* [T, I] */
    int32_t *selected;   /* [T, K] */
    int32_t *n_selected; /* [T] */
    dptr scratch;        /* select_scratch bytes */
};

/* Absorbed attention over the selected positions, or over all u <= p when selected is NULL:
 *   s[h][u] = scale * qk[t][h] . latent_u            (R + P values)
 *   out[t][h] = sum_u softmax_u(s[h]) * latent_u[0..R) */
struct kop_attend {
    const struct kbatch *batch;
    const struct kseqs *seqs;
    const struct kdims *dims;
    const struct kcache *cache;
    const float *qk;           /* [T, H, R + P] */
    const int32_t *selected;   /* [T, K] or NULL */
    const int32_t *n_selected; /* [T] */
    float *out;                /* [T, H, R] */
    dptr scratch;              /* attend_scratch bytes */
};

/* act = silu(gate) * up. */
struct kop_swiglu {
    int n_rows, width;
    const float *gate, *up; /* [T, width] */
    float *act;             /* [T, width], may alias gate */
};

/* Router and first half of the experts:
 *   g = sigmoid(logits) (or softmax); the U largest of g + bias (groups as dims says, ties to the
 *   lower expert); w = g of those, normalised and scaled as dims says      -> ids, weights
 *   act[t][j] = silu(gate[id_j] x_t) * (up[id_j] x_t)                       [F]
 * Padding rows get ids -1. Sum guard of the normalisation: + 1e-20. */
struct kop_experts_up {
    const struct kbatch *batch;
    const struct kdims *dims;
    const float *logits; /* [T, E] */
    const float *bias;   /* [E] or NULL */
    const struct kmat *gate, *up; /* [E, F, D], or fewer experts, from `first` on */
    const float *x;      /* [T, D] */
    int32_t *ids;        /* [T, U] in order of falling selection score */
    float *weights;      /* [T, U] */
    float *act;          /* [T, U, F] */
    dptr scratch;        /* experts_scratch bytes */
    int first;           /* choices outside of gate's experts are other ranks': no act is written */
};

/* Second half, with the shared expert's share added when given:
 *   y[t] = sum_j weights[t][j] * down[id_j] act[t][j]  (j ascending)  + shared_down shared_act[t] */
struct kop_experts_down {
    const struct kbatch *batch;
    const struct kdims *dims;
    const int32_t *ids;
    const float *weights;
    const struct kmat *down; /* [E, D, F], or fewer experts, from `first` on */
    const float *act;        /* [T, U, F] */
    const struct kmat *shared_down; /* [1, D, Fs] or NULL */
    const float *shared_act; /* [T, Fs] */
    float *y;                /* [T, D] */
    dptr scratch;
    int first;               /* choices outside of down's experts add nothing here */
};

/* y[s] = x[out_row[s]]; padding rows give zeros. */
struct kop_gather {
    const struct kbatch *batch;
    int width;
    const float *x; /* [T, width] */
    float *y;       /* [S, width] */
};

/* Chooses one token per sampled row, the same on every rank. logits are [parts, S, part_cols] as an
 * all-gather leaves them: token id = part * part_cols + column; ids >= vocab are never chosen.
 * For row s of slot b at position p (the token will stand at p + 1):
 *   raw log-probabilities: log softmax of the logits        -> logprob, top_*
 *   l = logits + bias; seen in prompt or output: l = l > 0 ? l / repetition : l * repetition;
 *   l -= frequency * count_output + presence * (count_output > 0)
 *   temperature 0 (<= 1e-6): argmax (ties to the lower id). Else each token weighs
 *   e = exp((l - max l) / temperature), and in falling order of l, ties to the lower id, are kept:
 *   the top_k largest (0: all); of those, the shortest prefix whose sum reaches top_p of their sum
 *   (>= 1: all); of those, the ones with e >= min_p * largest;
 *   u = Philox4x32-10(key = seed, counter = p + 1) word 0 / 2^32; the first token, in the same
 *   order, whose running sum exceeds u * total of the kept is chosen. Sums are in double.
 * NaN counts as minus infinity, plus infinity as the largest float; a row with no finite logit, and
 * a padding row, gets token -1, log-probability 0 and leaves last_token alone. The first
 * top_logprobs alternatives are filled, as far as their logits are finite; the rest are -1 and 0.
 * Also writes seqs->last_token[slot]. */
struct kop_sample {
    const struct kbatch *batch;
    const struct kseqs *seqs;
    const float *logits;
    int parts, part_cols, vocab;
    int32_t *token;     /* [S] */
    float *logprob;     /* [S] */
    int32_t *top_token; /* [S, K_TOP_MAX] falling probability, ties to the lower id */
    float *top_logprob; /* [S, K_TOP_MAX] */
    dptr scratch;       /* sample_scratch bytes */
};

/* Upper bounds that scratch and graphs are sized for. */
struct kbounds {
    int rows, outs, context, vocab;
};

struct kdevice_info {
    char name[96];       /* "cpu AVX-512", "NVIDIA H200 GPU-uuid 0000:01:00.0" */
    uint64_t total_bytes, free_bytes;
};

/* What a step asks of the context beside its scratch, as measure_end found. */
struct kneeds {
    size_t work_bytes;  /* of the context's own workspace */
    size_t graph_bytes; /* about so much device memory if it is kept as a graph */
};

/* A debug switch: which of its choices is taken says how something is computed, for comparisons and
 * bisecting. Set before open, by worker/switches.c; counts for the whole process. */
#define K_CHOICES 4
struct kswitch {
    const char *name, *help;
    const char *choices[K_CHOICES]; /* up to the first NULL; the first is the usual one */
    int chosen;
};

struct kernels {
    const char *name; /* "cpu", "cuda" */
    struct kswitch *switches;
    int n_switches;

    /* life. device: CUDA ordinal, ignored on the CPU. err: sentence for the set-up error. */
    struct kctx *(*open)(int device, char *err, size_t err_bytes);
    void (*close)(struct kctx *);
    void (*info)(struct kctx *, struct kdevice_info *out);

    /* memory: 256-byte aligned; NULL when refused. get waits for all queued work. */
    dptr (*alloc)(struct kctx *, size_t bytes);
    void (*free)(struct kctx *, dptr);
    void (*put)(struct kctx *, dptr dst, const void *src, size_t bytes);
    void (*get)(struct kctx *, void *dst, const void *src, size_t bytes);
    void (*zero)(struct kctx *, dptr dst, size_t bytes);
    void (*sync)(struct kctx *);

    /* Host memory that the device reads and writes by itself (pinned); NULL when refused. put from it
     * and get_later into it return at once: the memory is in use until a mark set after them has
     * passed. Where the host is the device, ordinary memory and ordinary copies. */
    void *(*host_alloc)(struct kctx *, size_t bytes);
    void (*host_free)(struct kctx *, void *);
    void (*get_later)(struct kctx *, void *dst, const void *src, size_t bytes);

    /* Marks 0 .. K_MARKS - 1: mark sets one behind all that is queued, passed tells whether the
     * device is through with that, wait returns when it is. span_us: device time between two that
     * have passed; 0 where there is no such clock. */
    void (*mark)(struct kctx *, int which);
    bool (*passed)(struct kctx *, int which);
    void (*wait)(struct kctx *, int which);
    float (*span_us)(struct kctx *, int from, int to);

    /* sizes, for counting before allocating */
    size_t (*mat_bytes)(int type, int64_t count, int64_t rows, int64_t cols);
    size_t (*latent_bytes)(const struct kdims *); /* one position, one layer */
    size_t (*index_bytes)(const struct kdims *);
    size_t (*scratch_bytes)(const struct kdims *, const struct kbounds *); /* the largest of all */

    /* Weights. src: `rows` rows of matrix `at` in file order, host memory; called once per matrix of
     * the stack. mat_unpack is its inverse, for checks. A tall matrix may be packed in bands: a kmat
     * of its rows [r, r + n), r a multiple of K_BAND_ROWS, stands mat_bytes(type, 1, r, cols) bytes
     * from the matrix's start, and packing the bands is packing the matrix. */
    void (*mat_pack)(struct kctx *, struct kmat *dst, int64_t at, const void *src);
    void (*mat_unpack)(struct kctx *, const struct kmat *src, int64_t at, void *dst);
    void (*pack_end)(struct kctx *); /* gives back what packing held; NULL: it holds nothing */

    /* Which types of weights the products take. takes_uneven: experts may be dealt out (`first`),
     * and a share of a width may be empty. */
    bool (*takes_type)(int type);
    bool takes_uneven;

    /* Steps as graphs; NULL where there is no such thing. graph_begin: true, the graph `key` was
     * replayed, nothing more to do; false, capture has begun (or is not worth it): run the
     * operations, then graph_end. graph_prepare: true, capture has begun: run the operations, then
     * graph_end, which keeps the graph and runs nothing; false, `key` is known or one too many. */
    bool (*graph_begin)(struct kctx *, uint64_t key);
    bool (*graph_prepare)(struct kctx *, uint64_t key);
    void (*graph_end)(struct kctx *, uint64_t key);

    /* What would a step need? Operations between the two are looked at and not run, so their
     * pointers need not be valid. work_reserve then takes the workspace, for good; false: refused.
     * NULL with the graphs. */
    void (*measure_begin)(struct kctx *);
    void (*measure_end)(struct kctx *, struct kneeds *out);
    bool (*work_reserve)(struct kctx *, size_t bytes);

    /* operations */
    void (*feed)(struct kctx *, const struct kop_feed *);
    void (*angles)(struct kctx *, const struct kop_angles *);
    void (*embed)(struct kctx *, const struct kop_embed *);
    void (*norm)(struct kctx *, const struct kop_norm *);
    void (*matmul)(struct kctx *, const struct kop_matmul *jobs, int n_jobs);
    void (*head_matmul)(struct kctx *, const struct kop_head_matmul *);
    void (*attn_prep)(struct kctx *, const struct kop_attn_prep *);
    void (*rope)(struct kctx *, const struct kop_rope *);
    void (*select)(struct kctx *, const struct kop_select *);
    void (*attend)(struct kctx *, const struct kop_attend *);
    void (*swiglu)(struct kctx *, const struct kop_swiglu *);
    void (*experts_up)(struct kctx *, const struct kop_experts_up *);
    void (*experts_down)(struct kctx *, const struct kop_experts_down *);
    void (*gather)(struct kctx *, const struct kop_gather *);
    void (*sample)(struct kctx *, const struct kop_sample *);
};

#define K_OPERATIONS 15 /* slots under "operations"; tests/kernels asserts one check for each */

/* The backend this binary was linked with. */
const struct kernels *kernels_table(void);

#ifdef __cplusplus
}
#endif
#endif
