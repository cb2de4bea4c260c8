/* kernels/cpu/matmul.c: products of quantised matrices with rows of float32.
 *
 * Owns: nothing.  Called by: the table; cpu_product also by attention and the experts.
 * Fails how: cannot; shapes are asserted.  Limits: none.
 * Tested by: tests/kernels/test_matmul.c; measured by tests/bench/bench_cpu.c
 *
 * Activations stay float32 (no quantisation of x), because this backend is what the others are
 * measured by. Four rows of weights are decoded, CPU_RUN columns at a time, into a buffer that
 * stays in L1, and every row of x is multiplied with it before it is overwritten: so for one row of
 * x the bytes of the weights are read once, and for many the decoding is paid once per CPU_TILE_X
 * of them. A sum is kept in sixteen lanes per (weight row, row of x) between runs (dot.h), so its
 * bits know nothing of tiles, runs or neighbours.
 */
#include <assert.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/dot.h"

const uint8_t *cpu_mat_row(const struct kmat *m, int64_t at, int64_t row) {
    assert(at >= 0 && at < m->count && row >= 0 && row < m->rows);
    return (const uint8_t *)m->data + (at * m->rows + row) * ktype_row_bytes(m->type, m->cols);
}

/* CPU_TILE_W (or fewer) rows of w with at most CPU_TILE_X rows of x. */
static void product_tile(struct kctx *c, int type, const uint8_t *const *w, int n_w, int64_t cols,
                         const float *const *x, float *const *y, int n_x) {
    int64_t elems = ktype_block_elems(type), bytes = ktype_block_bytes(type);
    int64_t run = type == KT_F32 ? cols : CPU_RUN;
    memset(c->lanes, 0, (size_t)n_x * sizeof c->lanes[0]);
    for (int64_t at = 0; at < cols; at += run) {
        int64_t n = cols - at < run ? cols - at : run;
        const float *wp[CPU_TILE_W], *xp[CPU_TILE_X];
        for (int i = 0; i < n_w; i++) {
            const uint8_t *src = w[i] + at / elems * bytes;
            if (type == KT_F32) {
                wp[i] = (const float *)src;
            } else {
                c->isa->decode[type](src, c->run[i], n);
                wp[i] = c->run[i];
            }
        }
        for (int j = 0; j < n_x; j++) xp[j] = x[j] + at;
        c->isa->tile(wp, n_w, xp, n_x, n, c->lanes);
    }
    c->isa->tile_sum(c->lanes, n_w, n_x, y);
}

void cpu_product(struct kctx *c, int type, const uint8_t *w, int64_t rows, int64_t cols,
                 const float *const *x, float *const *y, int n) {
    int64_t row_bytes = ktype_row_bytes(type, cols);
    if (n == 1 && cols % K_LANES == 0 && rows >= CPU_TILE_W) {
        int64_t fours = rows - rows % CPU_TILE_W;
        c->isa->product_one(type, w, fours, cols, x[0], y[0], c->run[0]);
        if (fours < rows)
            cpu_product(c, type, w + fours * row_bytes, rows - fours, cols, x,
                        (float *[1]){y[0] + fours}, 1);
        return;
    }
    for (int j = 0; j < n; j += CPU_TILE_X) {
        int n_x = n - j < CPU_TILE_X ? n - j : CPU_TILE_X;
        for (int64_t r = 0; r < rows; r += CPU_TILE_W) {
            int n_w = rows - r < CPU_TILE_W ? (int)(rows - r) : CPU_TILE_W;
            const uint8_t *wp[CPU_TILE_W];
            float *yp[CPU_TILE_X];
            for (int i = 0; i < n_w; i++) wp[i] = w + (r + i) * row_bytes;
            for (int i = 0; i < n_x; i++) yp[i] = y[j + i] + r;
            product_tile(c, type, wp, n_w, cols, x + j, yp, n_x);
        }
    }
}

void cpu_mat_product(struct kctx *c, const struct kmat *m, int64_t at, int64_t row, int64_t rows,
                     const float *const *x, float *const *y, int n) {
    cpu_product(c, m->type, cpu_mat_row(m, at, row), rows, m->cols, x, y, n);
    if (m->scales == 0) return;
    float scale = m->scale[kmat_scale_at(m, at)];
    for (int j = 0; j < n; j++) c->isa->scale(y[j], y[j], scale, rows);
}

/* y[t][r] = sum_c W[r][c] x[t][c] for strided rows. */
static void product_rows(struct kctx *c, const struct kmat *w, int64_t at, const float *x,
                         int64_t x_stride, float *y, int64_t y_stride, int n_rows) {
    if (w->rows == 0) return; /* a width of which other ranks have all */
    for (int t = 0; t < n_rows; t += CPU_TILE_X) {
        const float *xp[CPU_TILE_X];
        float *yp[CPU_TILE_X];
        int n = n_rows - t < CPU_TILE_X ? n_rows - t : CPU_TILE_X;
        for (int j = 0; j < n; j++) xp[j] = x + (t + j) * x_stride, yp[j] = y + (t + j) * y_stride;
        cpu_mat_product(c, w, at, 0, w->rows, xp, yp, n);
    }
}

/* token path 9/9: every weight that a token meets passes through product_tile. */
void cpu_matmul(struct kctx *c, const struct kop_matmul *jobs, int n_jobs) {
    for (const struct kop_matmul *m = jobs; m < jobs + n_jobs; m++) {
        assert(m->w->count == 1 && m->x_stride >= m->w->cols && m->y_stride >= m->w->rows);
        product_rows(c, m->w, 0, m->x, m->x_stride, m->y, m->y_stride, m->n_rows);
    }
}

void cpu_head_matmul(struct kctx *c, const struct kop_head_matmul *m) {
    for (int64_t h = 0; h < m->w->count; h++)
        product_rows(c, m->w, h, m->x + h * m->x_head, m->x_row, m->y + h * m->y_head, m->y_row,
                     m->n_rows);
}
