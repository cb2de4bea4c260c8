/* kernels/cuda/sample.cu: one token per sampled row, on the device.
 *
 * Owns: nothing.  Called by: the table.
 * Fails how: a row without a finite logit gets token -1; a CUDA error ends the process.
 * Limits: K_TOP_MAX, K_BIAS_MAX.  Tested by: tests/gpu/check_ops.c
 *
 * The rule is in kernels.h. Sixteen blocks read a row first (largest, sum of exponentials): all that
 * the greedy choice needs. Then a block takes a row. The FIRST largest logits are found and put in order;
 * nearly always the answer stands among them (a prefix of the falling order is all that top_k,
 * top_p, min_p and the draw look at). When it does not (a nearly flat distribution), places in the
 * order are found by bisection over the keys instead, with probabilities summed as whole numbers
 * (w * 2^40) so that no order of summation shows. Only exponentials may differ from the CPU's, in
 * their last bits.
 */
#include <cfloat>

#include "kernels/cuda/topk.cuh"

#define FIRST 1024 /* tokens put in order; TOPK_THREADS of them */
#define COLD  1e-6f
#define PARTS 16   /* blocks that read a row first */
#define PART_THREADS 256
#define FIXED 1099511627776.0 /* 2^40 */

struct sample_part;

struct sample_args {
    const int32_t *out_row, *slot, *pos;
    const struct ksampling *sampling;
    const uint16_t *seen_prompt, *seen_output;
    int32_t *last_token;
    int seen_cols, n_out, parts, part_cols, vocab;
    const float *logits;
    int32_t *token, *top_token;
    float *logprob, *top_logprob;
    float *l;       /* [S, vocab] */
    int32_t *first; /* [S, FIRST] */
    struct sample_part *part; /* [S, PARTS] */
};

/* What a block of the first kernel found in its share of a row: the largest logit, the lowest id that
 * has it, the sum of exp(logit - largest). */
struct sample_part {
    double sum;
    float most;
    int32_t id;
};

struct sample_smem {
    struct topk_smem topk;
    double total[33];
    float w[FIRST], value[FIRST];
    int id[FIRST];
    unsigned long long mass[33];
    int found;
};

size_t cuda_sample_scratch(const struct kdims *d, const struct kbounds *b) {
    (void)d;
    return (size_t)b->outs * ((size_t)b->vocab * sizeof(float) + FIRST * sizeof(int32_t) +
                              PARTS * sizeof(struct sample_part));
}

static __device__ __forceinline__ float clean(float x) {
    if (!(x >= -FLT_MAX)) return -INFINITY;
    return x > FLT_MAX ? FLT_MAX : x;
}

static __device__ __forceinline__ float raw_logit(const struct sample_args &a, int s, int id) {
    int part = id / a.part_cols;
    return clean(a.logits[((int64_t)part * a.n_out + s) * a.part_cols + id - part * a.part_cols]);
}

static __device__ double block_sum_double(double v, double *smem) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    __syncthreads();
    if (lane == 0) smem[warp] = v;
    __syncthreads();
    v = smem[lane];
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

static __device__ unsigned long long block_sum_fixed(unsigned long long v,
                                                     unsigned long long *smem) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    __syncthreads();
    if (lane == 0) smem[warp] = v;
    __syncthreads();
    v = smem[lane];
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

static __device__ float block_max(float v, float *smem) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    v = warp_max(v);
    __syncthreads();
    if (lane == 0) smem[warp] = v;
    __syncthreads();
    return warp_max(smem[lane]);
}

/* l = logits with bias and penalties, in place. */
static __device__ void adjust(const struct sample_args &a, float *l, const struct ksampling *p,
                              int slot) {
    int n = min(p->n_bias, K_BIAS_MAX);
    for (int i = threadIdx.x; i < n; i += TOPK_THREADS) {
        int id = p->bias_token[i];
        bool again = id < 0 || id >= a.vocab;
        for (int k = 0; k < i && !again; k++) again = p->bias_token[k] == id;
        if (again) continue; /* the first entry of a token adds all of them, in order */
        float v = l[id];
        for (int k = i; k < n; k++)
            if (p->bias_token[k] == id) v = clean(v + p->bias_value[k]);
        l[id] = v;
    }
    __syncthreads();
    if (p->repetition == 1 && p->presence == 0 && p->frequency == 0) return;
    const uint16_t *prompt = a.seen_prompt + (int64_t)slot * a.seen_cols;
    const uint16_t *output = a.seen_output + (int64_t)slot * a.seen_cols;
    for (int id = threadIdx.x; id < a.vocab; id += TOPK_THREADS) {
        int count = output[id];
        if (!prompt[id] && !count) continue;
        float v = l[id];
        v = v > 0 ? v / p->repetition : v * p->repetition;
        float penalty = __fadd_rn(__fmul_rn(p->frequency, (float)count), count ? p->presence : 0.f);
        l[id] = clean(__fsub_rn(v, penalty));
    }
    __syncthreads();
}

/* The n largest of l, in falling order, ties to the lower id: s->value, s->id. */
static __device__ void put_in_order(const float *l, int vocab, int n, int32_t *first,
                                    struct sample_smem *s) {
    topk_block(l, vocab, n, first, &s->topk);
    __syncthreads();
    int i = threadIdx.x, id = i < n ? first[i] : 0, rank = 0;
    float v = i < n ? l[id] : 0;
    if (i < n) s->w[i] = v;
    __syncthreads();
    if (i < n)
        for (int k = 0; k < n; k++) rank += s->w[k] > v || (s->w[k] == v && k < i);
    __syncthreads();
    if (i < n) s->value[rank] = v, s->id[rank] = id;
    __syncthreads();
}

static __device__ void write_tops(const struct sample_args &a, int row, const float *l, int n,
                                  double norm, struct sample_smem *s) {
    n = min(min(n, K_TOP_MAX), a.vocab);
    put_in_order(l, a.vocab, n, a.first + (int64_t)row * FIRST, s);
    int i = threadIdx.x;
    if (i < n && s->value[i] >= -FLT_MAX) {
        a.top_token[row * K_TOP_MAX + i] = s->id[i];
        a.top_logprob[row * K_TOP_MAX + i] = (float)((double)s->value[i] - norm);
    }
    __syncthreads();
}

/* ---- the long way ----------------------------------------------------------------------------- */

/* A prefix of the falling order: every key above `key`, and the first `ties` equal to it. */
struct prefix {
    uint32_t key;
    long long ties;
};

struct falling {
    const float *l;
    int vocab;
    float most, factor;
    struct sample_smem *s;
};

static __device__ __forceinline__ unsigned long long fixed_weight(const struct falling &f,
                                                                  float l) {
    return (unsigned long long)((double)expf((l - f.most) * f.factor) * FIXED);
}

/* Count and mass of the keys >= key. */
static __device__ void at_least(const struct falling &f, uint32_t key, unsigned long long *count,
                                unsigned long long *mass) {
    unsigned long long n = 0, m = 0;
    for (int i = threadIdx.x; i < f.vocab; i += TOPK_THREADS)
        if (order_key(f.l[i]) >= key) n++, m += fixed_weight(f, f.l[i]);
    *count = block_sum_fixed(n, f.s->mass);
    *mass = block_sum_fixed(m, f.s->mass);
}

static __device__ __forceinline__ float key_value(uint32_t key) {
    return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

/* The shortest prefix whose count (or mass) is at least `want`; the whole if there is none. */
static __device__ struct prefix shortest(const struct falling &f, bool by_mass,
                                         unsigned long long want) {
    uint32_t key = 0;
    unsigned long long n, m;
    for (int bit = 31; bit >= 0; bit--) {
        at_least(f, key | 1u << bit, &n, &m);
        if ((by_mass ? m : n) >= want) key |= 1u << bit;
    }
    struct prefix p = {key, 0};
    unsigned long long n1 = 0, m1 = 0;
    at_least(f, key, &n, &m);
    if (key != UINT32_MAX) at_least(f, key + 1, &n1, &m1);
    unsigned long long each = by_mass ? fixed_weight(f, key_value(key)) : 1;
    unsigned long long above = by_mass ? m1 : n1;
    unsigned long long rest = want > above ? want - above : 0;
    p.ties = (long long)(each ? (rest + each - 1) / each : n - n1);
    if (p.ties < 1) p.ties = 1;
    if (p.ties > (long long)(n - n1)) p.ties = (long long)(n - n1);
    return p;
}

static __device__ struct prefix shorter(struct prefix a, struct prefix b) {
    if (a.key != b.key) return a.key > b.key ? a : b;
    return a.ties < b.ties ? a : b;
}

static __device__ unsigned long long prefix_mass(const struct falling &f, struct prefix p) {
    unsigned long long n, m = 0;
    if (p.key != UINT32_MAX) at_least(f, p.key + 1, &n, &m);
    return m + (unsigned long long)p.ties * fixed_weight(f, key_value(p.key));
}

/* Id of the last token of a prefix. */
static __device__ int prefix_last(const struct falling &f, struct prefix p) {
    __shared__ int equal[32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    long long seen = 0;
    if (threadIdx.x == 0) f.s->found = -1;
    for (int i0 = 0; i0 < f.vocab; i0 += TOPK_THREADS) {
        int i = i0 + threadIdx.x;
        bool is = i < f.vocab && order_key(f.l[i]) == p.key;
        uint32_t vote = __ballot_sync(~0u, is);
        __syncthreads();
        if (lane == 0) equal[warp] = __popc(vote);
        __syncthreads();
        long long before = seen + __popc(vote & ((1u << lane) - 1));
        for (int k = 0; k < 32; k++) {
            if (k < warp) before += equal[k];
            seen += equal[k];
        }
        if (is && before == p.ties - 1) f.s->found = i;
    }
    __syncthreads();
    return f.s->found;
}

static __device__ int draw_long(const struct falling &f, const struct ksampling *p, double u) {
    struct prefix kept = {0, f.vocab};
    unsigned long long n, total, above;
    at_least(f, 0, &n, &total);
    kept = shortest(f, false, (unsigned long long)f.vocab);
    if (p->top_k > 0 && p->top_k < f.vocab) {
        kept = shortest(f, false, (unsigned long long)p->top_k);
        total = prefix_mass(f, kept);
    }
    if (p->top_p < 1)
        kept = shorter(kept, shortest(f, true, (unsigned long long)((double)p->top_p * total)));
    if (p->min_p > 0) {
        unsigned long long more = 0;
        for (int i = threadIdx.x; i < f.vocab; i += TOPK_THREADS)
            more += expf((f.l[i] - f.most) * f.factor) >= p->min_p;
        more = block_sum_fixed(more, f.s->mass);
        kept = shorter(kept, shortest(f, false, more > 0 ? more : 1));
    }
    total = prefix_mass(f, kept);
    above = (unsigned long long)(u * (double)total) + 1; /* the sum must exceed it */
    return prefix_last(f, shorter(kept, shortest(f, true, above)));
}

/* ---- the short way ---------------------------------------------------------------------------- */

/* Inclusive sums over the block's threads, in their order. */
static __device__ double block_scan(double v, double *smem) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int o = 1; o < 32; o <<= 1) {
        double w = __shfl_up_sync(~0u, v, o);
        if (lane >= o) v += w;
    }
    __syncthreads();
    if (lane == 31) smem[warp] = v;
    __syncthreads();
    double before = lane < warp ? smem[lane] : 0;
    for (int o = 16; o > 0; o >>= 1) before += __shfl_xor_sync(~0u, before, o);
    return before + v;
}

/* Smallest i < n for which the condition holds, n if none. */
static __device__ int block_first(bool holds, int n, struct sample_smem *s) {
    __syncthreads();
    if (threadIdx.x == 0) s->found = n;
    __syncthreads();
    if (holds && (int)threadIdx.x < n) atomicMin(&s->found, (int)threadIdx.x);
    __syncthreads();
    return s->found;
}

/* -1: the answer does not stand among the first n. */
static __device__ int draw_short(const struct sample_args &a, const struct ksampling *p, double u,
                                 float most, float factor, double all, int n,
                                 struct sample_smem *s) {
    int i = threadIdx.x, k = p->top_k > 0 && p->top_k < a.vocab ? p->top_k : a.vocab;
    float w = i < n ? expf((s->value[i] - most) * factor) : 0;
    __syncthreads();
    s->w[i] = w;
    double sum = block_scan((double)w, s->total);
    auto sum_to = [&](int count) { /* of the first `count` >= 1 */
        __syncthreads();
        if (i == count - 1) s->total[32] = sum;
        __syncthreads();
        return s->total[32];
    };
    double total = all;
    int kept = k;
    if (k < a.vocab) {
        if (k > n) return -1;
        total = sum_to(k);
    }
    if (p->top_p < 1 || p->min_p > 0) {
        double enough = p->top_p < 1 ? (double)p->top_p * total : INFINITY;
        float least = p->min_p * s->w[0];
        int end = min(k, n);
        bool stop = i > 0 && (sum - (double)w >= enough || (p->min_p > 0 && w < least));
        kept = block_first(stop, end, s);
        if (kept == end && end < k && n < a.vocab) return -1;
        total = sum_to(max(kept, 1));
    }
    int end = min(kept, n), at = block_first(sum > u * total || w <= 0, end, s);
    if (at == end) {
        if (kept > n && n < a.vocab) return -1;
        at = end - 1;
    } else if (at > 0 && s->w[at] <= 0) {
        at--; /* only rounding brings us here */
    }
    return s->id[at];
}

/* Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011). Word 0 of
 * Philox4x32-10. */
static __device__ uint32_t philox(uint64_t key, uint64_t counter) {
    uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32), x2 = 0, x3 = 0;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)0xD2511F53 * x0, q = (uint64_t)0xCD9E8D57 * x2;
        x0 = (uint32_t)(q >> 32) ^ x1 ^ k0;
        x1 = (uint32_t)q;
        x2 = (uint32_t)(p >> 32) ^ x3 ^ k1;
        x3 = (uint32_t)p;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return x0;
}

static __device__ int choose(const struct sample_args &a, int row, const float *l,
                             const struct ksampling *p, int pos, struct sample_smem *s) {
    float most = -INFINITY;
#pragma unroll 8
    for (int id = threadIdx.x; id < a.vocab; id += TOPK_THREADS) most = fmaxf(most, l[id]);
    most = block_max(most, s->value);
    if (!(most >= -FLT_MAX)) return -1;
    if (p->temperature <= COLD) {
        __syncthreads();
        if (threadIdx.x == 0) s->found = INT32_MAX;
        __syncthreads();
        int mine = INT32_MAX;
#pragma unroll 8
        for (int id = threadIdx.x; id < a.vocab; id += TOPK_THREADS)
            if (l[id] == most) mine = min(mine, id);
        if (mine < INT32_MAX) atomicMin(&s->found, mine);
        __syncthreads();
        return s->found;
    }
    float factor = 1.f / p->temperature;
    double sum = 0, u = (double)philox(p->seed, (uint64_t)pos + 1) * 0x1p-32;
#pragma unroll 8
    for (int id = threadIdx.x; id < a.vocab; id += TOPK_THREADS)
        sum += (double)expf((l[id] - most) * factor);
    sum = block_sum_double(sum, s->total);
    int n = min(FIRST, a.vocab);
    put_in_order(l, a.vocab, n, a.first + (int64_t)row * FIRST, s);
    int id = draw_short(a, p, u, most, factor, sum, n, s);
    if (id >= 0) return id;
    struct falling f = {l, a.vocab, most, factor, s};
    return draw_long(f, p, u);
}

/* Reads a share of a row: cleaned logits to l, and what sample_part says. */
static __global__ void __launch_bounds__(PART_THREADS)
    part_kernel(const __grid_constant__ struct sample_args a) {
    __shared__ float red[PART_THREADS / 32];
    __shared__ double sums[PART_THREADS / 32];
    __shared__ int found;
    gdc_trigger();
    gdc_wait();
    int row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int share = (a.vocab + PARTS - 1) / PARTS, from = blockIdx.x * share;
    int to = min(from + share, a.vocab);
    float *l = a.l + (int64_t)row * a.vocab, most = -INFINITY;
    for (int part = from / a.part_cols; part * a.part_cols < to; part++) { /* no division per logit */
        int base = part * a.part_cols, first = max(from, base), last = min(to, base + a.part_cols);
        const float *x = a.logits + ((int64_t)part * a.n_out + row) * a.part_cols - base;
#pragma unroll 8
        for (int i = first + threadIdx.x; i < last; i += PART_THREADS) {
            float v = clean(x[i]);
            l[i] = v;
            most = fmaxf(most, v);
        }
    }
    most = warp_max(most);
    if (lane == 0) red[warp] = most;
    if (threadIdx.x == 0) found = INT32_MAX;
    __syncthreads();
    for (int i = 0; i < PART_THREADS / 32; i++) most = fmaxf(most, red[i]);
    double sum = 0;
    int id = INT32_MAX;
#pragma unroll 8
    for (int i = from + threadIdx.x; i < to; i += PART_THREADS) {
        float v = l[i];
        if (v == most) id = min(id, i);
        if (most > -INFINITY) sum += (double)expf(v - most);
    }
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (lane == 0) sums[warp] = sum;
    if (id < INT32_MAX) atomicMin(&found, id);
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0;
    for (int i = 0; i < PART_THREADS / 32; i++) sum += sums[i];
    a.part[row * PARTS + blockIdx.x] = {sum, most, found};
}

static __global__ void __launch_bounds__(TOPK_THREADS)
    sample_kernel(const __grid_constant__ struct sample_args a) {
    __shared__ struct sample_smem s;
    gdc_wait();
    int row = blockIdx.x, t = a.out_row[row], slot = t < 0 ? -1 : a.slot[t];
    if (threadIdx.x < K_TOP_MAX) {
        a.top_token[row * K_TOP_MAX + threadIdx.x] = -1;
        a.top_logprob[row * K_TOP_MAX + threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) a.token[row] = -1, a.logprob[row] = 0;
    __syncthreads();
    if (slot < 0) return;
    const struct ksampling *p = a.sampling + slot;
    float *l = a.l + (int64_t)row * a.vocab, most = -INFINITY;
    const struct sample_part *part = a.part + row * PARTS;
    for (int i = 0; i < PARTS; i++) most = fmaxf(most, part[i].most);
    if (!(most >= -FLT_MAX)) return;
    double sum = 0;
    int best = INT32_MAX;
    for (int i = 0; i < PARTS; i++) {
        if (!(part[i].most >= -FLT_MAX)) continue;
        sum += part[i].sum * exp((double)part[i].most - (double)most);
        if (part[i].most == most) best = min(best, part[i].id);
    }
    double norm = (double)most + log(sum);
    if (p->top_logprobs > 0) write_tops(a, row, l, p->top_logprobs, norm, &s);
    bool plain = p->n_bias <= 0 && p->repetition == 1 && p->presence == 0 && p->frequency == 0;
    int token = best;
    if (!plain || p->temperature > COLD) {
        adjust(a, l, p, slot);
        token = choose(a, row, l, p, a.pos[t], &s);
    }
    if (threadIdx.x != 0 || token < 0) return;
    a.token[row] = token;
    a.logprob[row] = (float)((double)raw_logit(a, row, token) - norm);
    /* several rows of one slot: the last one's token is what it sampled last */
    for (int r = row + 1; r < a.n_out; r++)
        if (a.out_row[r] >= 0 && a.slot[a.out_row[r]] == slot) return;
    a.last_token[slot] = token;
}

void cuda_sample(struct kctx *c, const struct kop_sample *o) {
    cuda_settle(c);
    if (o->batch->n_out == 0) return;
    struct sample_args a = {};
    a.out_row = o->batch->out_row, a.slot = o->batch->slot, a.pos = o->batch->pos;
    a.sampling = o->seqs->sampling, a.seen_prompt = o->seqs->seen_prompt;
    a.seen_output = o->seqs->seen_output, a.last_token = o->seqs->last_token;
    a.seen_cols = o->seqs->vocab, a.n_out = o->batch->n_out, a.parts = o->parts;
    a.part_cols = o->part_cols, a.vocab = o->vocab, a.logits = o->logits;
    a.token = o->token, a.top_token = o->top_token, a.logprob = o->logprob;
    a.top_logprob = o->top_logprob;
    a.part = (struct sample_part *)o->scratch;
    a.l = (float *)(a.part + (int64_t)a.n_out * PARTS);
    a.first = (int32_t *)(a.l + (int64_t)a.n_out * a.vocab);
    launch(c, part_kernel, dim3(PARTS, (unsigned)a.n_out), PART_THREADS, 0, a);
    launch(c, sample_kernel, (unsigned)a.n_out, TOPK_THREADS, 0, a);
}
