/* kernels/cpu/attn.c: what happens between the projections of attention: norms, rotation, caches,
 * and absorbed attention itself.
 *
 * Owns: nothing.  Called by: the table.  Fails how: cannot.  Limits: none.
 * Tested by: tests/kernels/test_ops.c
 *
 * Attention is two passes over the positions, one row of the batch at a time: all scores of all
 * heads first, then the softmax, then the weighted sum, each position taken in ascending order. It
 * costs scratch of heads x positions floats but makes the result a function of the list of
 * positions alone, so dense attention and a selection of everything agree bit by bit, and pages may
 * lie anywhere.
 */
#include <assert.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/dot.h"

#define ATTEND_POSITIONS 16 /* latents per pass of the weighted sum: 36 KB, about L1 */

/* Row of position pos of a slot in a cache with `width` floats per position. */
static float *cache_row(const struct kseqs *q, dptr cache, int32_t slot, int32_t pos, int width) {
    assert(slot < q->max_slots && pos >= 0 && pos / K_PAGE < q->max_pages);
    int64_t page = q->page_table[(int64_t)slot * q->max_pages + pos / K_PAGE];
    return (float *)cache + (page * K_PAGE + pos % K_PAGE) * width;
}

/* (a, b) rotated by the angle (cos, sin). */
static void rotate(float *ya, float *yb, float a, float b, const float *angle) {
    float ca = a * angle[0], sb = b * angle[1], sa = a * angle[1], cb = b * angle[0];
    *ya = ca - sb;
    *yb = sa + cb;
}

/* Pairs (2i, 2i + 1) of x, or (i, i + width / 2) when half-split; y may be x. */
static void rotate_row(float *y, const float *x, int width, const float *angles, bool half_split) {
    for (int i = 0; i < width / 2; i++) {
        int a = half_split ? i : 2 * i, b = half_split ? i + width / 2 : 2 * i + 1;
        rotate(&y[a], &y[b], x[a], x[b], angles + 2 * i);
    }
}

static void rms(struct kctx *c, float *y, const float *x, const float *gain, int width, float eps) {
    float mean = c->isa->dot(x, x, width) / (float)width;
    c->isa->gain(y, x, 1.0f / sqrtf(mean + eps), gain, width);
}

/* y = (x - mean) / sqrt(variance + eps) * gain + bias. The mean is a lane sum like any other: a dot
 * product with the gain of one. */
static void layer_norm(struct kctx *c, float *y, const float *x, const float *gain,
                       const float *bias, int width, float eps) {
    float lanes[K_LANES] = {0};
    for (int i = 0; i < width; i++) lanes[i % K_LANES] += x[i];
    float mean = dot_combine(lanes) / (float)width;
    for (int i = 0; i < width; i++) y[i] = x[i] - mean;
    float inverse = 1.0f / sqrtf(c->isa->dot(y, y, width) / (float)width + eps);
    for (int i = 0; i < width; i++) {
        float v = y[i] * inverse * gain[i];
        y[i] = v + bias[i];
    }
}

void cpu_attn_prep(struct kctx *c, const struct kop_attn_prep *o) {
    const struct kdims *d = o->dims;
    int R = d->r_kv, P = d->d_rope, J = d->ix_dim;
    for (int t = 0; t < o->batch->n_rows; t++) {
        int32_t slot = o->batch->slot[t], pos = o->batch->pos[t];
        if (slot < 0) continue;
        const float *angles = o->angles + (int64_t)t * P, *kv = o->kv + (int64_t)t * (R + P);
        if (o->q_a) {
            float *a = o->q_a + (int64_t)t * d->r_q;
            rms(c, a, a, o->q_norm, d->r_q, d->rms_eps);
        }
        float *latent = cache_row(o->seqs, o->cache->latent, slot, pos, R + P);
        rms(c, latent, kv, o->kv_norm, R, d->rms_eps);
        rotate_row(latent + R, kv + R, P, angles, false);
        if (o->index_key) {
            float *key = cache_row(o->seqs, o->cache->index, slot, pos, J);
            layer_norm(c, key, o->index_key + (int64_t)t * J, o->ik_gain, o->ik_bias, J, d->ix_eps);
            rotate_row(key, key, P, angles, !d->ix_rope_interleaved);
        }
    }
}

void cpu_rope(struct kctx *c, const struct kop_rope *o) {
    (void)c;
    const struct kdims *d = o->dims;
    int N = d->d_nope, P = d->d_rope, R = d->r_kv;
    for (int t = 0; t < o->batch->n_rows; t++) {
        const float *angles = o->angles + (int64_t)t * P;
        for (int h = 0; h < d->n_heads; h++) {
            int64_t head = (int64_t)t * d->n_heads + h;
            rotate_row(o->qk + head * (R + P) + R, o->q + head * (N + P) + N, P, angles, false);
        }
        for (int h = 0; o->iq && h < d->ix_heads; h++) {
            float *iq = o->iq + ((int64_t)t * d->ix_heads + h) * d->ix_dim;
            rotate_row(iq, iq, P, angles, !d->ix_rope_interleaved);
        }
    }
}

/* One row's scratch: where each of its positions' latents lies, and its scores [H, n]. */
struct attend_row {
    const float **latent;
    float *score;
    int n;
};

static int attend_positions_max(const struct kdims *d, int context) {
    return d->ix_topk > context ? d->ix_topk : context;
}

size_t cpu_attend_scratch(const struct kdims *d, const struct kbounds *b) {
    size_t n = (size_t)attend_positions_max(d, b->context);
    return n * sizeof(float *) + n * (size_t)d->n_heads * sizeof(float);
}

/* score[h][u] = qk[h] . latent_u, unscaled. Four positions share a tile with all heads. */
static void attend_scores(struct kctx *c, const struct attend_row *r, const float *qk, int heads,
                          int width) {
    for (int h = 0; h < heads; h += CPU_TILE_X) {
        int n_h = heads - h < CPU_TILE_X ? heads - h : CPU_TILE_X;
        const float *x[CPU_TILE_X];
        for (int j = 0; j < n_h; j++) x[j] = qk + (int64_t)(h + j) * width;
        for (int u = 0; u < r->n; u += CPU_TILE_W) {
            int n_u = r->n - u < CPU_TILE_W ? r->n - u : CPU_TILE_W;
            float *y[CPU_TILE_X];
            for (int j = 0; j < n_h; j++) y[j] = r->score + (int64_t)(h + j) * r->n + u;
            memset(c->lanes, 0, (size_t)n_h * sizeof c->lanes[0]);
            c->isa->tile(r->latent + u, n_u, x, n_h, width, c->lanes);
            c->isa->tile_sum(c->lanes, n_u, n_h, y);
        }
    }
}

static void attend_row(struct kctx *c, const struct attend_row *r, const struct kdims *d,
                       const float *qk, float *out) {
    int H = d->n_heads, R = d->r_kv;
    attend_scores(c, r, qk, H, R + d->d_rope);
    memset(out, 0, (size_t)H * (size_t)R * sizeof *out);
    for (int h = 0; h < H; h++) {
        float *s = r->score + (int64_t)h * r->n;
        float sum = c->isa->exp(s, s, c->isa->max(s, r->n), d->attn_scale, r->n);
        c->isa->scale(s, s, 1.0f / sum, r->n);
    }
    for (int u = 0; u < r->n; u += ATTEND_POSITIONS) {
        int n = r->n - u < ATTEND_POSITIONS ? r->n - u : ATTEND_POSITIONS;
        for (int h = 0; h < H; h++)
            c->isa->accumulate(out + (int64_t)h * R, R, r->latent + u,
                               r->score + (int64_t)h * r->n + u, n);
    }
}

void cpu_attend(struct kctx *c, const struct kop_attend *o) {
    const struct kdims *d = o->dims;
    int width = d->r_kv + d->d_rope;
    assert(d->attn_scale > 0); /* the largest score is found before scaling */
    for (int t = 0; t < o->batch->n_rows; t++) {
        int32_t slot = o->batch->slot[t], pos = o->batch->pos[t];
        float *out = o->out + (int64_t)t * d->n_heads * d->r_kv;
        if (slot < 0) {
            memset(out, 0, (size_t)d->n_heads * (size_t)d->r_kv * sizeof *out);
            continue;
        }
        const int32_t *selected = o->selected ? o->selected + (int64_t)t * d->ix_topk : NULL;
        struct attend_row r = {.latent = o->scratch, .n = selected ? o->n_selected[t] : pos + 1};
        assert(r.n > 0 && r.n <= attend_positions_max(d, o->batch->max_context));
        r.score = (float *)(r.latent + r.n);
        for (int u = 0; u < r.n; u++)
            r.latent[u] =
                cache_row(o->seqs, o->cache->latent, slot, selected ? selected[u] : u, width);
        attend_row(c, &r, d, o->qk + (int64_t)t * d->n_heads * width, out);
    }
}

/* One row's scratch: keys of all positions, heads' dot products and the sum. */
size_t cpu_select_scratch(const struct kdims *d, const struct kbounds *b) {
    size_t n = (size_t)b->context;
    return n * (sizeof(float *) + sizeof(float) + sizeof(uint32_t) +
                (size_t)d->ix_heads * sizeof(float));
}

/* order[u] = order-preserving integer of score(u), n positions. */
static void select_scores(struct kctx *c, const struct kop_select *o, int t, int n,
                          uint32_t *order) {
    const struct kdims *d = o->dims;
    int heads = d->ix_heads;
    struct attend_row r = {.latent = o->scratch, .n = n};
    r.score = (float *)(r.latent + n);
    float *sum = r.score + (int64_t)heads * n;
    for (int u = 0; u < n; u++)
        r.latent[u] = cache_row(o->seqs, o->cache->index, o->batch->slot[t], u, d->ix_dim);
    attend_scores(c, &r, o->iq + (int64_t)t * heads * d->ix_dim, heads, d->ix_dim);
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int h = 0; h < heads; h++)
        c->isa->add_relu(sum, r.score + (int64_t)h * n, o->w[(int64_t)t * heads + h], n);
    c->isa->scale(sum, sum, 1.0f / sqrtf((float)(d->ix_dim * heads)), n);
    for (int u = 0; u < n; u++) order[u] = cpu_order_key(sum[u]);
}

void cpu_select(struct kctx *c, const struct kop_select *o) {
    const struct kdims *d = o->dims;
    int K = d->ix_topk;
    for (int t = 0; t < o->batch->n_rows; t++) {
        int32_t *selected = o->selected + (int64_t)t * K;
        int n = o->batch->slot[t] < 0 ? 0 : o->batch->pos[t] + 1;
        o->n_selected[t] = n < K ? n : K;
        if (n <= K) {
            for (int u = 0; u < n; u++) selected[u] = u;
            continue;
        }
        assert(n <= o->batch->max_context);
        uint32_t *order = (uint32_t *)((float **)o->scratch + n) + (int64_t)(d->ix_heads + 1) * n;
        select_scores(c, o, t, n, order);
        int64_t ties;
        uint32_t kth = cpu_kth_key(order, n, K, &ties);
        for (int u = 0, at = 0; u < n; u++)
            if (order[u] > kth || (order[u] == kth && ties-- > 0)) selected[at++] = u;
    }
}
