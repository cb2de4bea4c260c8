/* kernels/cuda/plain.cuh: products with the types that have no tiles: codes that name vectors of a
 * codebook (IQ1, IQ2, IQ3) and four-bit floats (MXFP4, NVFP4).
 *
 * Owns: nothing.  Called by: matmul.cu, experts_many.cu, rows.cu.  Tested by: tests/gpu/check_ops.c
 */
#ifndef OCTAVO_KERNELS_CUDA_PLAIN_H
#define OCTAVO_KERNELS_CUDA_PLAIN_H

#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/quant.cuh"

/* y[t][h][r] = sum_c W[h][r][c] x[t][h][c], any number of rows of x. */
void cuda_plain_product(struct kctx *c, const struct kmat *w, const float *x, int64_t x_row,
                        int64_t x_head, float *y, int64_t y_row, int64_t y_head, int n_rows);

/* Rows [row0, row0 + n) of the matrices of p's segments, for their pairs: row `pair` of y from row
 * pair / x_div of x. times_gate: y = silu(y) * (W x). */
struct plain_pairs {
    const struct kmat *w;
    int row0, n;
    const float *x;
    int64_t x_row;
    int x_div;
    float *y;
    int64_t y_row;
    bool times_gate;
};
void cuda_plain_pairs(struct kctx *c, const struct plain_pairs *h, const struct pairs *p);

/* y[t][0 .. n) = 0 */
void cuda_plain_zero(struct kctx *c, float *y, int64_t y_row, int n, int n_rows);

void cuda_plain_embed(struct kctx *c, const struct kop_embed *o);

#endif
