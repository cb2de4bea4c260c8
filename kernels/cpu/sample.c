/* kernels/cpu/sample.c: one token per sampled row.
 *
 * Owns: nothing.  Called by: the table.
 * Fails how: a row without a finite logit gets token -1.  Limits: K_TOP_MAX, K_BIAS_MAX.
 * Tested by: tests/kernels/test_sample.c
 *
 * The rule is in kernels.h. Everything after the penalties looks at tokens in falling order, and
 * nearly always at a few of them only, so the order is produced lazily: some 64 of the largest, and
 * eight times as many whenever that was not enough. Logits are counted into bins below the largest
 * once; a bin is sorted, by radix, when the order reaches it. The sort is stable in the token id,
 * so ties fall to the lower id without being looked at. Sums are kept in double: no vocabulary is
 * large enough for their order to show.
 *
 * Randomness is counter-based, keyed by (seed, position): a sequence that is replayed after a crash
 * draws the same numbers, whatever else was in its batch.
 */
#include <assert.h>
#include <float.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/dot.h"

#define SAMPLE_FIRST 64    /* tokens put in order at first */
#define SAMPLE_BINS  2048  /* see falling_init */
#define SAMPLE_BLOCK 1024  /* exponentials summed in float before going to double */
#define SAMPLE_COLD  1e-6f /* at or below this temperature the largest logit is taken */

/* Tokens in falling order of a row of logits, as far as they were asked for. */
struct falling {
    const float *l; /* [vocab] */
    int64_t vocab, sorted;
    int bins; /* the sorted ones are exactly those of bins 0 .. bins - 1 */
    int32_t count[SAMPLE_BINS];
    uint16_t *bin;     /* [vocab] distance from the largest logit, coarsely */
    int32_t *id;       /* [vocab] the sorted ones */
    uint64_t *pair[2]; /* [vocab] key << 32 | id, and the sort's other half */
};

struct row {
    struct kctx *c;
    int64_t vocab;
    float *raw, *adjusted, *weight; /* [vocab] logits; with bias and penalties; exponentials */
    double sum;                     /* of weight */
    const float *l;                 /* raw or adjusted */
    struct falling order;
};

size_t cpu_sample_scratch(int vocab) {
    return (size_t)vocab *
           (3 * sizeof(float) + sizeof(int32_t) + 2 * sizeof(uint64_t) + sizeof(uint16_t));
}

static struct row row_init(struct kctx *c, dptr scratch, int64_t vocab) {
    struct row r = {.c = c, .vocab = vocab, .order.vocab = vocab};
    r.order.pair[0] = scratch;
    r.order.pair[1] = r.order.pair[0] + vocab;
    r.order.id = (int32_t *)(r.order.pair[1] + vocab);
    r.raw = (float *)(r.order.id + vocab);
    r.adjusted = r.raw + vocab;
    r.weight = r.adjusted + vocab;
    r.order.bin = (uint16_t *)(r.weight + vocab);
    return r;
}

/* Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011). */
void cpu_philox(uint64_t key, uint64_t counter, uint32_t out[4]) {
    uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32), x2 = out[2], x3 = out[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53 * x0, b = (uint64_t)0xCD9E8D57 * x2;
        uint32_t y0 = (uint32_t)(b >> 32) ^ x1 ^ k0, y2 = (uint32_t)(a >> 32) ^ x3 ^ k1;
        x0 = y0, x1 = (uint32_t)b, x2 = y2, x3 = (uint32_t)a;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    out[0] = x0, out[1] = x1, out[2] = x2, out[3] = x3;
}

/* Stable radix sort of n pairs by their upper halves, rising; the result is in pair[0]. */
static void falling_sort(struct falling *f, int64_t n) {
    for (int shift = 32; shift < 64; shift += 8) {
        int64_t start[257] = {0};
        const uint64_t *from = f->pair[0];
        uint64_t *to = f->pair[1];
        for (int64_t i = 0; i < n; i++) start[(from[i] >> shift & 255) + 1]++;
        for (int d = 0; d < 256; d++) start[d + 1] += start[d];
        for (int64_t i = 0; i < n; i++) to[start[from[i] >> shift & 255]++] = from[i];
        f->pair[1] = f->pair[0];
        f->pair[0] = to;
    }
}

/* Bin of a logit: 64 to each unit below the largest, the last bin for all the rest. Rounding keeps
 * the order, so a token of a lower bin never stands behind one of a higher. */
static void falling_init(struct falling *f, const float *l, float most) {
    memset(f->count, 0, sizeof f->count);
    f->l = l;
    f->sorted = f->bins = 0;
    for (int64_t i = 0; i < f->vocab; i++) {
        float below = (most - l[i]) * 64.0f;
        f->bin[i] = (uint16_t)(int)(below < SAMPLE_BINS - 1 ? below : SAMPLE_BINS - 1);
    }
    for (int64_t i = 0; i < f->vocab; i++) f->count[f->bin[i]]++;
}

/* Sorts so many further bins that SAMPLE_FIRST tokens, or eight times what was, are in order. */
static void falling_grow(struct falling *f) {
    int64_t want = f->sorted ? f->sorted * 8 : SAMPLE_FIRST, have = f->sorted, n = 0;
    int from = f->bins;
    while (f->bins < SAMPLE_BINS && have < want) have += f->count[f->bins++];
    for (int64_t id = 0; id < f->vocab; id++)
        if (f->bin[id] >= from && f->bin[id] < f->bins)
            f->pair[0][n++] = (uint64_t)~cpu_order_key(f->l[id]) << 32 | (uint64_t)id;
    falling_sort(f, n);
    for (int64_t i = 0; i < n; i++) f->id[f->sorted + i] = (int32_t)(uint32_t)f->pair[0][i];
    f->sorted += n;
    assert(f->sorted == have);
}

/* The token at place i, the lower id first among equals. */
static int32_t falling_at(struct falling *f, int64_t i) {
    assert(i < f->vocab);
    while (i >= f->sorted) falling_grow(f);
    return f->id[i];
}

/* NaN counts as minus infinity, plus infinity as the largest number. */
static float clean(float x) {
    if (!(x >= -FLT_MAX)) return -INFINITY;
    return x > FLT_MAX ? FLT_MAX : x;
}

/* weight[i] = exp((x[i] - shift) * factor), and their sum. */
static double row_exp(struct row *r, const float *x, float shift, float factor) {
    double sum = 0;
    for (int64_t at = 0; at < r->vocab; at += SAMPLE_BLOCK) {
        int64_t n = r->vocab - at < SAMPLE_BLOCK ? r->vocab - at : SAMPLE_BLOCK;
        sum += (double)r->c->isa->exp(r->weight + at, x + at, shift, factor, n);
    }
    return sum;
}

/* l = logits with bias and penalties; points at raw when there are none. */
static void row_adjust(struct row *r, const struct ksampling *p, const uint16_t *prompt,
                       const uint16_t *output) {
    bool penalties = p->repetition != 1 || p->presence != 0 || p->frequency != 0;
    r->l = r->raw;
    if (p->n_bias <= 0 && !penalties) return;
    memcpy(r->adjusted, r->raw, (size_t)r->vocab * sizeof(float));
    r->l = r->adjusted;
    for (int i = 0; i < p->n_bias && i < K_BIAS_MAX; i++) {
        int32_t id = p->bias_token[i];
        if (id >= 0 && id < r->vocab) r->adjusted[id] = clean(r->adjusted[id] + p->bias_value[i]);
    }
    for (int64_t id = 0; penalties && id < r->vocab; id++) {
        if (!prompt[id] && !output[id]) continue;
        float l = r->adjusted[id];
        l = l > 0 ? l / p->repetition : l * p->repetition;
        l = l - (p->frequency * (float)output[id] + (output[id] ? p->presence : 0));
        r->adjusted[id] = clean(l);
    }
}

/* The token whose running sum, in falling order, exceeds u of the whole. */
static int32_t row_draw(struct row *r, const struct ksampling *p, double u) {
    struct falling *f = &r->order;
    int64_t k = p->top_k > 0 && p->top_k < r->vocab ? p->top_k : r->vocab, kept = k;
    double total = r->sum, sum = 0;
    if (k < r->vocab) {
        total = 0;
        for (int64_t i = 0; i < k; i++) total += (double)r->weight[falling_at(f, i)];
    }
    if (p->top_p < 1 || p->min_p > 0) {
        double enough = p->top_p < 1 ? (double)p->top_p * total : INFINITY;
        float least = p->min_p * r->weight[falling_at(f, 0)];
        for (kept = 0; kept < k && (kept == 0 || sum < enough); kept++) {
            float w = r->weight[falling_at(f, kept)];
            if (kept > 0 && w < least) break;
            sum += (double)w;
        }
        total = sum;
    }
    int32_t last = falling_at(f, 0);
    sum = 0;
    for (int64_t i = 0; i < kept; i++) {
        int32_t id = falling_at(f, i);
        if (r->weight[id] <= 0) break; /* only rounding brings us here */
        sum += (double)r->weight[id];
        last = id;
        if (sum > u * total) break;
    }
    return last;
}

static int32_t row_choose(struct row *r, const struct ksampling *p, int32_t pos) {
    float most = r->c->isa->max(r->l, r->vocab);
    if (!(most >= -FLT_MAX)) return -1;
    if (p->temperature <= SAMPLE_COLD) {
        int32_t id = 0;
        while (r->l[id] != most) id++;
        return id;
    }
    uint32_t word[4] = {0};
    if (r->l != r->raw || p->temperature != 1) /* else the weights stand there already */
        r->sum = row_exp(r, r->l, most, 1.0f / p->temperature);
    cpu_philox(p->seed, (uint64_t)pos + 1, word);
    if (r->order.l != r->l) falling_init(&r->order, r->l, most);
    return row_draw(r, p, (double)word[0] * 0x1p-32);
}

/* raw [vocab] = the row of logits, put together from the ranks' parts. */
static void row_load(struct row *r, const struct kop_sample *o, int s) {
    for (int part = 0; part < o->parts; part++) {
        int64_t from = (int64_t)part * o->part_cols, n = r->vocab - from;
        const float *x = o->logits + ((int64_t)part * o->batch->n_out + s) * o->part_cols;
        n = n < o->part_cols ? n : o->part_cols;
        for (int64_t i = 0; i < n; i++) r->raw[from + i] = clean(x[i]);
    }
}

static void sample_row(struct kctx *c, const struct kop_sample *o, int s) {
    struct row r = row_init(c, o->scratch, o->vocab);
    int32_t t = o->batch->out_row[s], slot = t < 0 ? -1 : o->batch->slot[t];
    o->token[s] = -1;
    o->logprob[s] = 0;
    for (int i = 0; i < K_TOP_MAX; i++)
        o->top_token[s * K_TOP_MAX + i] = -1, o->top_logprob[s * K_TOP_MAX + i] = 0;
    if (slot < 0) return;
    const struct ksampling *p = &o->seqs->sampling[slot];
    row_load(&r, o, s);
    float most = c->isa->max(r.raw, r.vocab);
    if (!(most >= -FLT_MAX)) return;
    r.sum = row_exp(&r, r.raw, most, 1.0f);
    double norm = (double)most + log(r.sum);
    if (p->top_logprobs > 0) falling_init(&r.order, r.raw, most);
    for (int i = 0; i < p->top_logprobs && i < K_TOP_MAX && i < r.vocab; i++) {
        int32_t id = falling_at(&r.order, i);
        if (!(r.raw[id] >= -FLT_MAX)) break;
        o->top_token[s * K_TOP_MAX + i] = id;
        o->top_logprob[s * K_TOP_MAX + i] = (float)((double)r.raw[id] - norm);
    }
    int64_t counts = (int64_t)slot * o->seqs->vocab;
    row_adjust(&r, p, o->seqs->seen_prompt + counts, o->seqs->seen_output + counts);
    int32_t token = row_choose(&r, p, o->batch->pos[t]);
    if (token < 0) return;
    o->token[s] = token;
    o->logprob[s] = (float)((double)r.raw[token] - norm);
    o->seqs->last_token[slot] = token;
}

void cpu_sample(struct kctx *c, const struct kop_sample *o) {
    assert(o->vocab > 0 && (int64_t)o->parts * o->part_cols >= o->vocab);
    assert(o->vocab <= o->seqs->vocab);
    for (int s = 0; s < o->batch->n_out; s++) sample_row(c, o, s);
}
