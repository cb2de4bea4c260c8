/* kernels/cuda/gemm.cuh: products with many rows of x on the tensor cores.
 *
 * Owns: nothing.  Called by: matmul.cu, experts_many.cu.  Tested by: tests/gpu/check_ops.c
 */
#ifndef OCTAVO_KERNELS_CUDA_GEMM_H
#define OCTAVO_KERNELS_CUDA_GEMM_H

#include "kernels/cuda/cuda.cuh"

/* y[t][r] = sum_c W[h][r][c] x[t][h][c], quantised W. */
struct gemm_job {
    const uint8_t *w;
    const float *x;
    float *y;
    int64_t w_head, x_head, y_head, x_row, y_row;
    int type, rows, cols, heads, n_rows;
};

/* Up to GEMM_JOBS products of the same x, type and columns (one if there are heads). x_same: x is
 * that of the previous call and still stands converted in the workspace. */
#define GEMM_JOBS 4
void cuda_gemm(struct kctx *c, const struct gemm_job *j, int n_jobs, bool x_same);

/* y of an unquantised W, to 22 bits (gemm_dense.cu). */
void cuda_gemm_dense(struct kctx *c, const struct gemm_job *j);

/* Rows of x grouped by the matrix that multiplies them, as route.cu leaves them on the device:
 * seg[0] = number of segments; then {matrix, first, count} each, in ascending order of first,
 * which is a multiple of 8; count <= GEMM_COLS. list: row numbers, -1 between segments. Row
 * `list[i]` of y is made from row `list[i] / x_div` of x. */
#define GEMM_COLS 128

enum gemm_mode {
    GEMM_STORE,      /* y = W x */
    GEMM_GATE_UP,    /* y = silu(W x) * (W2 x); both of one type */
    GEMM_TIMES_GATE, /* y = silu(y) * (W x) */
};

struct gemm_groups {
    const uint8_t *w, *w2;
    int64_t w_mat; /* bytes of one matrix */
    int type, rows, cols;
    int row0, n_rows; /* weight rows [row0, row0 + n_rows); y's column 0 is row0 */
    const void *xh;   /* converted x */
    float *y;
    int64_t y_row;
    const int32_t *seg, *list;
    int segs_max, list_max, x_div;
    enum gemm_mode mode;
};
void cuda_gemm_grouped(struct kctx *c, const struct gemm_groups *g);

/* x [n, cols] to the workspace's form at xh; gemm_xh_bytes() bytes. Row i of head h: i * heads + h. */
size_t gemm_xh_bytes(int64_t rows, int64_t cols);
void cuda_gemm_convert(struct kctx *c, void *xh, const float *x, int64_t x_row, int64_t x_head,
                       int n_rows, int heads, int cols);

/* The same by warpgroup instructions (gemm_wide.cu), where the chip has them and the type is known.
 * cuda_gemm goes there by itself; grouped rows are gathered first: row i at `to` is row
 * list[i] / x_div of x, for g->xh. */
bool cuda_wide_takes(const struct kctx *c, int type);
void cuda_wide_gemm(struct kctx *c, const struct gemm_job *j, int n_jobs, bool x_same);
size_t cuda_wide_x_bytes(int64_t rows, int heads, int64_t cols);
void cuda_wide_gather(struct kctx *c, void *to, const float *x, int64_t x_row, int cols,
                      const int32_t *seg, const int32_t *list, int list_max, int x_div);
void cuda_wide_grouped(struct kctx *c, const struct gemm_groups *g);
void cuda_wide_init(struct kctx *c);

#endif
