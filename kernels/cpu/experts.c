/* kernels/cpu/experts.c: the router and the two halves of the mixture of experts.
 *
 * Owns: nothing.  Called by: the table.  Fails how: cannot.
 * Limits: EXPERTS_MAX experts per layer.  Tested by: tests/kernels/test_ops.c
 *
 * (row, choice) pairs are sorted by expert, so that an expert's weights are decoded once for all
 * rows that chose it. Every pair keeps its own place in the result, and the sum over a row's
 * choices is taken in their order afterwards, so company does not change a row's bits.
 */
#include <assert.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/dot.h"

#define EXPERTS_MAX  1024
#define EXPERTS_ROWS 64 /* rows of an expert's matrix that are multiplied at a time */

/* The pairs of a step, sorted by expert; stands in the operation's scratch. */
struct pairs {
    int n;           /* pairs that name an expert */
    int32_t *start;  /* [E + 1] first pair of each expert */
    int32_t *pair;   /* [n] t * U + j */
    const float **x; /* [n] */
    float **y;       /* [n] */
    float *tmp;      /* [T * U, EXPERTS_ROWS] by pair number */
};

size_t cpu_experts_scratch(const struct kdims *d, const struct kbounds *b) {
    size_t pairs = (size_t)b->rows * (size_t)(d->n_used > 0 ? d->n_used : 1);
    return pairs * (2 * sizeof(float *) + EXPERTS_ROWS * sizeof(float) + sizeof(int32_t)) +
           ((size_t)d->n_experts + 1) * sizeof(int32_t);
}

static struct pairs pairs_sorted(dptr scratch, const struct kdims *d, const int32_t *ids,
                                 int rows) {
    int all = rows * d->n_used, E = d->n_experts;
    struct pairs p = {.x = scratch};
    p.y = (float **)(p.x + all);
    p.tmp = (float *)(p.y + all);
    p.pair = (int32_t *)(p.tmp + (size_t)all * EXPERTS_ROWS);
    p.start = p.pair + all;
    int32_t count[EXPERTS_MAX + 1] = {0};
    assert(E > 0 && E <= EXPERTS_MAX);
    for (int i = 0; i < all; i++)
        if (ids[i] >= 0) count[ids[i]]++;
    for (int e = 0; e < E; e++) {
        p.start[e] = p.n;
        p.n += count[e];
        count[e] = p.start[e];
    }
    p.start[E] = p.n;
    for (int i = 0; i < all; i++)
        if (ids[i] >= 0) p.pair[count[ids[i]]++] = i;
    return p;
}

/* Index of the largest score not yet taken, the lower one on ties; a taken score is NaN. */
static int best_left(const float *score, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (score[i] == score[i] && (best < 0 || score[i] > score[best])) best = i;
    return best;
}

/* Sum of the two largest, group by group; experts of the groups not kept fall to -inf. */
static void keep_groups(float *score, const struct kdims *d) {
    int size = d->n_experts / d->n_groups;
    float group[EXPERTS_MAX];
    bool keep[EXPERTS_MAX] = {false};
    for (int g = 0; g < d->n_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++) {
            if (score[i] > first) {
                second = first;
                first = score[i];
            } else if (score[i] > second) {
                second = score[i];
            }
        }
        group[g] = size > 1 ? first + second : first;
        if (group[g] != group[g]) group[g] = -INFINITY;
    }
    for (int k = 0; k < d->n_groups_used; k++) {
        int g = best_left(group, d->n_groups);
        keep[g] = true;
        group[g] = NAN;
    }
    for (int i = 0; i < size * d->n_groups; i++)
        if (!keep[i / size]) score[i] = -INFINITY;
}

/* One row: gate values, choice, weights. */
static void route(struct kctx *c, const struct kdims *d, const float *logits, const float *bias,
                  int32_t *ids, float *weights) {
    int E = d->n_experts;
    float gate[EXPERTS_MAX], score[EXPERTS_MAX], sum = 0;
    assert(E <= EXPERTS_MAX && d->n_used <= E);
    if (d->gating == 1) {
        float total = c->isa->exp(gate, logits, c->isa->max(logits, E), 1.0f, E);
        for (int e = 0; e < E; e++) gate[e] = gate[e] / total;
    } else {
        for (int e = 0; e < E; e++) gate[e] = 1.0f / (1.0f + exp_plain(-logits[e]));
    }
    for (int e = 0; e < E; e++) {
        score[e] = bias ? gate[e] + bias[e] : gate[e];
        if (score[e] != score[e]) score[e] = -INFINITY;
    }
    if (d->n_groups > 1) keep_groups(score, d);
    for (int j = 0; j < d->n_used; j++) {
        ids[j] = best_left(score, E);
        weights[j] = gate[ids[j]];
        sum += weights[j];
        score[ids[j]] = NAN;
    }
    for (int j = 0; j < d->n_used; j++) {
        if (d->norm_weights) weights[j] = weights[j] / (sum + 1e-20f);
        weights[j] *= d->weights_scale;
    }
}

void cpu_experts_up(struct kctx *c, const struct kop_experts_up *o) {
    const struct kdims *d = o->dims;
    int T = o->batch->n_rows, U = d->n_used;
    int64_t F = o->gate->rows, D = o->gate->cols;
    assert(o->first >= 0 && o->first + o->gate->count <= d->n_experts);
    assert(o->up->count == o->gate->count && o->up->rows == F && o->up->cols == D);
    for (int t = 0; t < T; t++) {
        int32_t *ids = o->ids + t * U;
        if (o->batch->slot[t] < 0)
            for (int j = 0; j < U; j++) ids[j] = -1, o->weights[t * U + j] = 0;
        else
            route(c, d, o->logits + (int64_t)t * d->n_experts, o->bias, ids, o->weights + t * U);
    }
    struct pairs p = pairs_sorted(o->scratch, d, o->ids, T);
    for (int i = 0; i < p.n; i++) p.x[i] = o->x + p.pair[i] / U * D;
    for (int e = 0; e < o->gate->count; e++) {
        int at = p.start[o->first + e], n = p.start[o->first + e + 1] - at;
        for (int64_t r = 0; n > 0 && r < F; r += EXPERTS_ROWS) {
            int64_t rows = F - r < EXPERTS_ROWS ? F - r : EXPERTS_ROWS;
            for (int i = at; i < at + n; i++) p.y[i] = o->act + p.pair[i] * F + r;
            cpu_mat_product(c, o->gate, e, r, rows, p.x + at, p.y + at, n);
            for (int i = at; i < at + n; i++) p.y[i] = p.tmp + (int64_t)p.pair[i] * EXPERTS_ROWS;
            cpu_mat_product(c, o->up, e, r, rows, p.x + at, p.y + at, n);
            for (int i = at; i < at + n; i++) {
                float *act = o->act + p.pair[i] * F + r;
                c->isa->swiglu(act, act, p.y[i], rows);
            }
        }
    }
}

/* y[t][r..r + rows) += the shared expert's share; tmp [T, EXPERTS_ROWS]. */
static void add_shared(struct kctx *c, const struct kop_experts_down *o, const struct pairs *p,
                       int64_t r, int64_t rows) {
    const struct kmat *w = o->shared_down;
    for (int t = 0; t < o->batch->n_rows; t += CPU_TILE_X) {
        int n = o->batch->n_rows - t < CPU_TILE_X ? o->batch->n_rows - t : CPU_TILE_X;
        const float *x[CPU_TILE_X];
        float *y[CPU_TILE_X];
        for (int j = 0; j < n; j++) {
            x[j] = o->shared_act + (t + j) * w->cols;
            y[j] = p->tmp + (int64_t)(t + j) * EXPERTS_ROWS;
        }
        cpu_mat_product(c, w, 0, r, rows, x, y, n);
        for (int j = 0; j < n; j++)
            c->isa->add_scaled(o->y + (t + j) * o->down->rows + r, y[j], 1.0f, rows);
    }
}

void cpu_experts_down(struct kctx *c, const struct kop_experts_down *o) {
    const struct kdims *d = o->dims;
    int T = o->batch->n_rows, U = d->n_used;
    int64_t D = o->down->rows, F = o->down->cols;
    int last = o->first + (int)o->down->count;
    assert(o->first >= 0 && last <= d->n_experts);
    assert(!o->shared_down || (o->shared_down->rows == D && o->shared_down->count == 1));
    struct pairs p = pairs_sorted(o->scratch, d, o->ids, T);
    for (int i = 0; i < p.n; i++) {
        p.x[i] = o->act + p.pair[i] * F;
        p.y[i] = p.tmp + (int64_t)p.pair[i] * EXPERTS_ROWS;
    }
    for (int64_t r = 0; r < D; r += EXPERTS_ROWS) {
        int64_t rows = D - r < EXPERTS_ROWS ? D - r : EXPERTS_ROWS;
        for (int e = o->first; e < last; e++) {
            int at = p.start[e], n = p.start[e + 1] - at;
            if (n > 0) cpu_mat_product(c, o->down, e - o->first, r, rows, p.x + at, p.y + at, n);
        }
        for (int t = 0; t < T; t++) {
            float *y = o->y + t * D + r;
            memset(y, 0, (size_t)rows * sizeof *y);
            for (int i = t * U; i < (t + 1) * U; i++)
                if (o->ids[i] >= o->first && o->ids[i] < last)
                    c->isa->add_scaled(y, p.tmp + (int64_t)i * EXPERTS_ROWS, o->weights[i], rows);
        }
        if (o->shared_down) add_shared(c, o, &p, r, rows);
    }
}
