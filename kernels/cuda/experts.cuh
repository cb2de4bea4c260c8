/* kernels/cuda/experts.cuh: what the parts of the mixture of experts share.
 *
 * Owns: nothing.  Called by: experts.cu, route.cu, experts_few.cu, experts_many.cu.
 * Tested by: tests/gpu/check_ops.c
 *
 * (row, choice) pairs are sorted by expert on the device into segments of one expert: of at most
 * GV_ROWS pairs for few rows (each expert's bytes are read once), of at most GEMM_COLS for many.
 * Pair t * n_used + j is choice j of row t. Only the device knows how many segments there are.
 */
#ifndef OCTAVO_KERNELS_CUDA_EXPERTS_H
#define OCTAVO_KERNELS_CUDA_EXPERTS_H

#include "kernels/cuda/gemv.cuh"

#define EXPERTS_MAX      1024
#define EXPERTS_FEW_ROWS 64 /* rows of a step that go through gemv.cuh */

/* The scratch of both halves. */
struct pairs {
    int32_t *seg;   /* [1 + 3 * segs_max] count, then {expert, first, count} */
    int32_t *list;  /* [list_max] pair numbers t * U + j, by expert; see gemm.cuh */
    float *partial; /* [T * U, slice] */
    int segs_max, list_max;
    bool aligned; /* experts begin at multiples of eight */
};

/* A stack of matrices as the products of few rows see it. */
struct few_mat {
    const uint8_t *w;
    int64_t w_mat;
    struct gv_mat mat;
};

/* From row row0 (a multiple of sixteen) on. */
static inline struct few_mat few_mat(const struct kmat *m, int row0) {
    struct cell_shape s = cell_shape(m->type);
    struct few_mat f;
    f.w = (const uint8_t *)m->data + (int64_t)(row0 / 16) * (m->cols / s.cols) * s.bytes;
    f.w_mat = (int64_t)cuda_mat_bytes(m->type, 1, m->rows, m->cols);
    f.mat = gv_mat(m->type);
    return f;
}

/* Chooses experts and weights of every row and sorts the pairs (route.cu). */
void cuda_route(struct kctx *, const struct kop_experts_up *, const struct pairs *);

/* act of every pair; then rows [row0, row0 + n) of every pair's down projection to p->partial,
 * slices in ascending order from 0. At most EXPERTS_FEW_ROWS rows and quantised experts, or any. */
void cuda_few_up(struct kctx *, const struct kop_experts_up *, const struct pairs *p);
void cuda_few_down(struct kctx *, const struct kop_experts_down *, const struct pairs *p, int row0,
                   int n);
/* One row: both steps at once, routing and the sums included. False: not of that kind, nothing done. */
bool cuda_one_up(struct kctx *, const struct kop_experts_up *, const struct pairs *p);
bool cuda_one_down(struct kctx *, const struct kop_experts_down *);
void cuda_one_init(struct kctx *);

void cuda_many_up(struct kctx *, const struct kop_experts_up *, const struct pairs *p);
void cuda_many_down(struct kctx *, const struct kop_experts_down *, const struct pairs *p,
                    int row0, int n);
void cuda_few_init(struct kctx *);

#endif
