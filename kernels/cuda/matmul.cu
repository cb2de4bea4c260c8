/* kernels/cuda/matmul.cu: matmul and head_matmul: y[t][r] = sum_c W[r][c] x[t][c].
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: JOBS_MAX products per launch (more are launched in turns).
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * At most FEW_ROWS rows of x: one launch for all jobs, gemv.cuh's kernel, in which a block takes a few
 * tiles of one job and eight rows of x; unquantised jobs (the router) run beside the others, a block
 * to a weight row in float32. More rows: the tensor-core product of gemm.cu, one launch per job;
 * unquantised matrices are multiplied in float32.
 */
#include <algorithm>

#include "kernels/cuda/dense.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemv.cuh"

#define JOBS_MAX   8
#define FEW_ROWS    64 /* rows of x that are taken eight at a time */
#define DENSE_AHEAD 6  /* four weights per thread each, requested before the wait */

struct gv_job {
    const uint8_t *w;
    const float *x;
    float *y;
    int64_t w_head, x_head, y_head, x_row, y_row;
    struct gv_mat mat;
    int type, rows, cols, wk, first_block, head_blocks;
};

struct gv_args {
    int n_jobs, n_rows;
    int x_groups;    /* of GV_ROWS rows of x */
    int ring, stage; /* bytes of a warp's ring; runs of x staged at a time */
    struct gv_job job[JOBS_MAX];
};

/* ---- unquantised rows --------------------------------------------------------------------- */

/* One weight row times at most GV_ROWS rows of x, by the whole block. The weights do not depend on
 * earlier kernels, so the first of them are requested before the wait. red: 8 * GV_ROWS floats. */
static __device__ void dense_row(const struct gv_job &j, const uint8_t *w, const float *x, float *y,
                                 int row, int n, float *red) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint8_t *wr = w + (int64_t)row * j.cols * dense_bytes(j.type);
    float4 first[DENSE_AHEAD];
    float acc[GV_ROWS];
#pragma unroll
    for (int t = 0; t < GV_ROWS; t++) acc[t] = 0;
#pragma unroll
    for (int i = 0; i < DENSE_AHEAD; i++) {
        int k = (i * GV_THREADS + (int)threadIdx.x) * 4;
        first[i] = make_float4(0, 0, 0, 0);
        if (k < j.cols) first[i] = dense_load(j.type, wr, k, j.cols - k);
    }
    gdc_wait();
#pragma unroll
    for (int i = 0; i < DENSE_AHEAD; i++) {
        int k = (i * GV_THREADS + (int)threadIdx.x) * 4;
#pragma unroll
        for (int t = 0; t < GV_ROWS; t++)
            if (t < n && k < j.cols) {
                float4 a = first[i], b = dense_load(KT_F32, (const uint8_t *)(x + t * j.x_row), k,
                                                    j.cols - k);
                acc[t] += a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
            }
    }
    for (int k = (DENSE_AHEAD * GV_THREADS + (int)threadIdx.x) * 4; k < j.cols; k += GV_THREADS * 4) {
        float4 a = dense_load(j.type, wr, k, j.cols - k);
#pragma unroll
        for (int t = 0; t < GV_ROWS; t++)
            if (t < n) {
                float4 b = dense_load(KT_F32, (const uint8_t *)(x + t * j.x_row), k, j.cols - k);
                acc[t] += a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
            }
    }
#pragma unroll
    for (int t = 0; t < GV_ROWS; t++) {
        float v = t < n ? warp_sum(acc[t]) : 0;
        if (lane == 0) red[warp * GV_ROWS + t] = v;
    }
    __syncthreads();
    if ((int)threadIdx.x < n) {
        float v = 0;
        for (int i = 0; i < GV_WARPS; i++) v += red[i * GV_ROWS + threadIdx.x];
        y[threadIdx.x * j.y_row + row] = v;
    }
}

/* ---- at most eight rows of x -------------------------------------------------------------- */

static __device__ __forceinline__ void gv_tiles(const struct gv_job &j, const struct gv_args &a,
                                                int head, int t0, int block, uint8_t *smem) {
    struct gv_smem s = gv_carve(smem, a.ring);
    struct gv_ring ring;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wk = warp % j.wk;
    int tile = block * (GV_WARPS / j.wk) + warp / j.wk, tiles = (j.rows + 15) / 16;
    int runs = (j.cols + GV_RUN - 1) / GV_RUN, n = min(GV_ROWS, a.n_rows - t0);
    int next = tile < tiles ? wk : runs; /* run to be requested */
    const uint8_t *src = j.w + head * j.w_head +
                         (int64_t)tile * (j.cols / j.mat.cell_cols) * j.mat.cell_bytes +
                         (int64_t)next * j.mat.run_stride;
    gv_ring_init(s, &ring, j.mat.run_stride);
    auto request = [&]() {
        if (next >= runs) return;
        gv_issue(s, &ring, src, gv_bytes(j.mat, j.cols, next));
        next += j.wk;
        src += (int64_t)j.wk * j.mat.run_stride;
    };
    for (int i = 0; i < ring.slots; i++) request();
    gdc_trigger();
    gdc_wait();
    struct gv_x from = {j.x + head * j.x_head + t0 * j.x_row, j.x_row, NULL, 1};
    float *y = j.y + head * j.y_head + t0 * j.y_row;
    float acc[4] = {0, 0, 0, 0};
    int run = tile < tiles ? wk : runs, run_x = gv_run_x(n);
    for (int run0 = 0; run0 < runs; run0 += a.stage) {
        int end = min(runs, run0 + a.stage);
        if (run0 > 0) __syncthreads();
        gv_stage(s.x, from, n, run0, end - run0, j.cols);
        __syncthreads();
        for (; run < end; run += j.wk) {
            const uint8_t *slot = gv_take(s, &ring);
            gv_run(j.mat.type, acc, slot, s.x + (run - run0) * run_x, n,
                   min(8, (j.cols - run * GV_RUN) / 32));
            __syncwarp();
            request();
        }
    }
    /* the warps that share a tile are summed in their order */
    float4 *red = (float4 *)s.red;
    red[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __syncthreads();
    if (wk != 0 || tile >= tiles) return;
    for (int i = 1; i < j.wk; i++) {
        float4 v = red[(warp + i) * 32 + lane];
        acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
    }
    gv_results(acc, n, [&](int r, int t, float v) {
        int row = tile * 16 + r;
        if (row < j.rows) y[t * j.y_row + row] = v;
    });
}

/* Blocks of one place in the matrix and different rows of x are neighbours: the weights that the
 * first of them fetches are in the cache for the others. */
static __global__ void __launch_bounds__(GV_THREADS, 2)
    gv_kernel(const __grid_constant__ struct gv_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    int i = 0, t0 = blockIdx.x % a.x_groups * GV_ROWS, place = blockIdx.x / a.x_groups;
    while (i + 1 < a.n_jobs && place >= a.job[i + 1].first_block) i++;
    const struct gv_job &j = a.job[i];
    int block = place - j.first_block, head = block / j.head_blocks;
    block -= head * j.head_blocks;
    if (j.mat.cell_cols) {
        gv_tiles(j, a, head, t0, block, smem);
    } else {
        gdc_trigger();
        dense_row(j, j.w + head * j.w_head, j.x + head * j.x_head + t0 * j.x_row,
                  j.y + head * j.y_head + t0 * j.y_row, block, min(GV_ROWS, a.n_rows - t0),
                  (float *)smem);
    }
}

/* ---- more rows, unquantised --------------------------------------------------------------- */

/* 64 weight rows by 64 rows of x, sixteen columns at a time, a 4 x 4 patch per thread. */
static __global__ void __launch_bounds__(256)
    dense_many_kernel(const __grid_constant__ struct gv_job j, int n_rows) {
    __shared__ float ws[16][65], xs[16][65];
    gdc_wait();
    int head = blockIdx.z, r0 = blockIdx.x * 64, t0 = blockIdx.y * 64;
    const uint8_t *w = j.w + head * j.w_head;
    const float *x = j.x + head * j.x_head;
    int a = threadIdx.x % 16, b = threadIdx.x / 16, line = threadIdx.x / 4;
    int part = threadIdx.x % 4 * 4;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < j.cols; k0 += 16) {
        int left = j.cols - k0 - part;
        float4 v = make_float4(0, 0, 0, 0), u = v;
        if (r0 + line < j.rows && left > 0)
            v = dense_load(j.type, w + (int64_t)(r0 + line) * j.cols * dense_bytes(j.type),
                           k0 + part, left);
        if (t0 + line < n_rows && left > 0)
            u = dense_load(KT_F32, (const uint8_t *)(x + (t0 + line) * j.x_row), k0 + part, left);
        ws[part][line] = v.x, ws[part + 1][line] = v.y;
        ws[part + 2][line] = v.z, ws[part + 3][line] = v.w;
        xs[part][line] = u.x, xs[part + 1][line] = u.y;
        xs[part + 2][line] = u.z, xs[part + 3][line] = u.w;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 16; k++)
#pragma unroll
            for (int p = 0; p < 4; p++)
#pragma unroll
                for (int q = 0; q < 4; q++) acc[p][q] += ws[k][a + 16 * p] * xs[k][b + 16 * q];
        __syncthreads();
    }
    for (int q = 0; q < 4; q++)
        for (int p = 0; p < 4; p++) {
            int row = r0 + a + 16 * p, t = t0 + b + 16 * q;
            if (row < j.rows && t < n_rows) j.y[head * j.y_head + t * j.y_row + row] = acc[p][q];
        }
}

static void dense_product(struct kctx *c, const struct gv_job *j, int heads, int n_rows) {
    launch(c, dense_many_kernel,
           dim3((unsigned)ceil_div(j->rows, 64), (unsigned)ceil_div(n_rows, 64), (unsigned)heads),
           256, 0, *j, n_rows);
}

/* ---- dispatch ----------------------------------------------------------------------------- */

/* Warps that share a tile: as many as there is work for while the grid stays near one wave. */
static int split_of(const struct kctx *c, int64_t tiles, int64_t cols) {
    int64_t runs = ceil_div(cols, GV_RUN);
    int wk = 1;
    while (wk < GV_WARPS && 2 * wk <= runs && tiles * 2 * wk / GV_WARPS <= 3 * c->sms) wk *= 2;
    return wk;
}

static void gv_launch(struct kctx *c, struct gv_args *a, const int *heads) {
    int64_t tiles = 0, cols = 0;
    int blocks = 0;
    a->x_groups = (int)ceil_div(a->n_rows, GV_ROWS);
    for (int i = 0; i < a->n_jobs; i++) tiles += ceil_div(a->job[i].rows, 16) * heads[i];
    for (int i = 0; i < a->n_jobs; i++) {
        struct gv_job *j = &a->job[i];
        j->first_block = blocks;
        if (type_is_dense(j->type)) {
            j->head_blocks = j->rows;
        } else {
            j->wk = split_of(c, tiles * a->x_groups, j->cols);
            j->head_blocks = (int)ceil_div(ceil_div(j->rows, 16) * j->wk, GV_WARPS);
            cols = std::max<int64_t>(cols, j->cols);
        }
        blocks += j->head_blocks * heads[i];
    }
    struct gv_plan p = gv_plan(c, cols, std::min(a->n_rows, GV_ROWS));
    a->ring = p.ring;
    a->stage = std::max(p.runs, 1);
    launch(c, gv_kernel, (unsigned)(blocks * a->x_groups), GV_THREADS, (size_t)p.smem, *a);
}

static void products(struct kctx *c, struct gv_args *a, const int *heads) {
    if (a->n_jobs == 0 || a->n_rows == 0) return;
    if (a->n_rows <= FEW_ROWS) {
        gv_launch(c, a, heads);
        return;
    }
    for (int i = 0; i < a->n_jobs; i++) {
        const struct gv_job *j = &a->job[i];
        if (type_is_dense(j->type)) {
            dense_product(c, j, heads[i], a->n_rows);
            continue;
        }
        struct gemm_job g = {};
        g.w = j->w, g.x = j->x, g.y = j->y;
        g.w_head = j->w_head, g.x_head = j->x_head, g.y_head = j->y_head;
        g.x_row = j->x_row, g.y_row = j->y_row;
        g.type = j->type, g.rows = j->rows, g.cols = j->cols, g.heads = heads[i];
        g.n_rows = a->n_rows;
        bool same = i > 0 && !type_is_dense(a->job[i - 1].type) && a->job[i - 1].x == j->x &&
                    a->job[i - 1].x_row == j->x_row && a->job[i - 1].cols == j->cols &&
                    heads[i] == 1 && heads[i - 1] == 1;
        cuda_gemm(c, &g, same);
    }
}

void cuda_matmul(struct kctx *c, const struct kop_matmul *jobs, int n_jobs) {
    for (int at = 0; at < n_jobs;) {
        struct gv_args a = {};
        int heads[JOBS_MAX];
        a.n_rows = jobs[at].n_rows;
        for (; at < n_jobs && a.n_jobs < JOBS_MAX && jobs[at].n_rows == a.n_rows; at++) {
            const struct kop_matmul *m = &jobs[at];
            CU_REQUIRE(m->w->count == 1);
            struct gv_job *j = &a.job[a.n_jobs];
            *j = {};
            j->w = (const uint8_t *)m->w->data, j->x = m->x, j->y = m->y;
            j->x_row = m->x_stride, j->y_row = m->y_stride;
            j->mat = gv_mat(m->w->type);
            j->type = m->w->type, j->rows = (int)m->w->rows, j->cols = (int)m->w->cols, j->wk = 1;
            heads[a.n_jobs++] = 1;
        }
        products(c, &a, heads);
    }
}

void cuda_head_matmul(struct kctx *c, const struct kop_head_matmul *m) {
    struct gv_args a = {};
    int heads = (int)m->w->count;
    a.n_jobs = 1;
    a.n_rows = m->n_rows;
    struct gv_job *j = &a.job[0];
    j->w = (const uint8_t *)m->w->data, j->x = m->x, j->y = m->y;
    j->w_head = (int64_t)cuda_mat_bytes(m->w->type, 1, m->w->rows, m->w->cols);
    j->x_head = m->x_head, j->y_head = m->y_head, j->x_row = m->x_row, j->y_row = m->y_row;
    j->mat = gv_mat(m->w->type);
    j->type = m->w->type, j->rows = (int)m->w->rows, j->cols = (int)m->w->cols, j->wk = 1;
    products(c, &a, &heads);
}

void cuda_matmul_init(struct kctx *c) {
    allow_smem(gv_kernel, (size_t)std::min(c->smem_block, GV_SMEM));
}
