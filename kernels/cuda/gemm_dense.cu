/* kernels/cuda/gemm_dense.cu: products of unquantised matrices with many rows of x.
 *
 * Owns: nothing.  Called by: matmul.cu.  Fails how: a CUDA error ends the process.
 * Limits: none.  Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * Routers and the indexer's head weights are kept in float32 because near ties decide; so both
 * operands are split into two half-precision numbers, and three of the four products taken: 22
 * bits. Such matrices are low (32 or 256 rows), so their columns are shared out over blocks until
 * every multiprocessor has several; the parts are added in their order by a second kernel.
 */
#include <algorithm>

#include "kernels/cuda/dense.cuh"
#include "kernels/cuda/gemm.cuh"

#define MANY      64 /* weight rows and rows of x of a block */
#define MANY_STEP 32 /* columns at a time */
#define MANY_ROW  40 /* halves of a row in shared memory: no two rows share banks */
#define W_SCALE   64.f

/* Four numbers as half precision and what that lost. */
static __device__ __forceinline__ void split4(float4 v, float scale, __half *hi, __half *lo) {
    float f[4] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
    uint32_t h[2], l[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float a = fminf(fmaxf(f[2 * i], -65504.f), 65504.f);
        float b = fminf(fmaxf(f[2 * i + 1], -65504.f), 65504.f);
        h[i] = pack_half2(a, b);
        __half2 p = *reinterpret_cast<__half2 *>(&h[i]);
        l[i] = pack_half2(a - __low2float(p), b - __high2float(p));
    }
    *(uint2 *)hi = make_uint2(h[0], h[1]);
    *(uint2 *)lo = make_uint2(l[0], l[1]);
}

struct dense_args {
    struct gemm_job j;
    int parts, part_cols; /* of the columns */
    float *partial;       /* [parts, heads, n_rows, rows] when there are several */
};

/* 64 weight rows by 64 rows of x and a share of the columns. A warp has sixteen weight rows. */
static __global__ void __launch_bounds__(128)
    dense_many_kernel(const __grid_constant__ struct dense_args a) {
    __shared__ __align__(16) __half ws[2][MANY * MANY_ROW], xs[2][MANY * MANY_ROW];
    gdc_trigger();
    gdc_wait();
    const struct gemm_job &j = a.j;
    int head = blockIdx.z % j.heads, part_at = blockIdx.z / j.heads, n_rows = j.n_rows;
    int r0 = blockIdx.x * MANY, t0 = blockIdx.y * MANY;
    int first = part_at * a.part_cols, end = min(j.cols, first + a.part_cols);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = threadIdx.x / 8;
    int part = threadIdx.x % 8 * 4; /* a thread loads lines line, line + 16, ... */
    const uint8_t *w = j.w + head * j.w_head;
    const float *x = j.x + head * j.x_head;
    float4 wv[4], xv[4];
    float acc[8][4] = {};
    auto fetch = [&](int k0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = r0 + line + 16 * i, t = t0 + line + 16 * i, left = end - k0 - part;
            wv[i] = xv[i] = make_float4(0, 0, 0, 0);
            if (row < j.rows && left > 0)
                wv[i] = dense_load(j.type, w + (int64_t)row * j.cols * dense_bytes(j.type),
                                   k0 + part, left);
            if (t < n_rows && left > 0)
                xv[i] = dense_load(KT_F32, (const uint8_t *)(x + t * j.x_row), k0 + part, left);
        }
    };
    fetch(first);
    uint32_t a_row[2], b_row[2];
    for (int i = 0; i < 2; i++) {
        a_row[i] = smem_addr(ws[i]) + ((warp * 16 + lane % 16) * MANY_ROW + lane / 16 * 8) * 2;
        b_row[i] = smem_addr(xs[i]) + (lane % 8 * MANY_ROW + lane / 8 * 8) * 2;
    }
    for (int k0 = first; k0 < end; k0 += MANY_STEP) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = (line + 16 * i) * MANY_ROW + part;
            split4(wv[i], W_SCALE, ws[0] + at, ws[1] + at);
            split4(xv[i], X_SCALE, xs[0] + at, xs[1] + at);
        }
        __syncthreads();
        if (k0 + MANY_STEP < end) fetch(k0 + MANY_STEP);
        uint32_t a[2][2][4]; /* hi or lo, sixteen columns */
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) ldsm4(a[i][k], a_row[i] + k * 32);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint32_t b[2][4];
            ldsm4(b[0], b_row[0] + n * 8 * MANY_ROW * 2);
            ldsm4(b[1], b_row[1] + n * 8 * MANY_ROW * 2);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint32_t(&h)[4] = a[0][k], (&l)[4] = a[1][k];
                mma16816(acc[n], h[0], h[1], h[2], h[3], b[0][2 * k], b[0][2 * k + 1]);
                mma16816(acc[n], h[0], h[1], h[2], h[3], b[1][2 * k], b[1][2 * k + 1]);
                mma16816(acc[n], l[0], l[1], l[2], l[3], b[0][2 * k], b[0][2 * k + 1]);
            }
        }
        __syncthreads();
    }
    int g = lane >> 2, q = lane & 3;
    float *y = j.y + head * j.y_head;
    int64_t y_row = j.y_row;
    if (a.parts > 1) {
        y = a.partial + ((int64_t)part_at * j.heads + head) * n_rows * j.rows;
        y_row = j.rows;
    }
    for (int n = 0; n < 8; n++)
        for (int k = 0; k < 4; k++) {
            int row = r0 + warp * 16 + g + k / 2 * 8, t = t0 + 8 * n + 2 * q + k % 2;
            if (row < j.rows && t < n_rows) y[t * y_row + row] = acc[n][k] * (X_UNSCALE / W_SCALE);
        }
}

/* Adds the parts in their order. */
static __global__ void __launch_bounds__(256)
    dense_sum_kernel(const __grid_constant__ struct dense_args a) {
    gdc_trigger();
    gdc_wait();
    const struct gemm_job &j = a.j;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, all = (int64_t)j.n_rows * j.rows;
    if (i >= all) return;
    int head = blockIdx.y;
    float sum = 0;
    for (int p = 0; p < a.parts; p++) sum += a.partial[((int64_t)p * j.heads + head) * all + i];
    j.y[head * j.y_head + i / j.rows * j.y_row + i % j.rows] = sum;
}

void cuda_gemm_dense(struct kctx *c, const struct gemm_job *j) {
    struct dense_args a = {};
    int across = (int)ceil_div(j->rows, MANY), down = (int)ceil_div(j->n_rows, MANY);
    int steps = (int)ceil_div(j->cols, MANY_STEP);
    int64_t blocks = (int64_t)across * down * j->heads;
    a.j = *j;
    a.parts = (int)std::max<int64_t>(1, std::min<int64_t>(6 * c->sms / blocks, steps / 8));
    a.part_cols = (int)ceil_div(steps, a.parts) * MANY_STEP;
    a.parts = (int)ceil_div(j->cols, a.part_cols);
    if (a.parts > 1) {
        cuda_image_forget(c);
        c->x_form = X_NONE;
        a.partial = (float *)cuda_work(c, (size_t)a.parts * (size_t)j->heads * (size_t)j->n_rows *
                                              (size_t)j->rows * sizeof(float));
    }
    launch(c, dense_many_kernel,
           dim3((unsigned)across, (unsigned)down, (unsigned)(a.parts * j->heads)), 128, 0, a);
    if (a.parts > 1)
        launch(c, dense_sum_kernel,
               dim3((unsigned)ceil_div((int64_t)j->n_rows * j->rows, 256), (unsigned)j->heads), 256,
               0, a);
}
