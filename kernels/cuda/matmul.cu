/* kernels/cuda/matmul.cu: matmul and head_matmul: y[t][r] = sum_c W[r][c] x[t][c].
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: JOBS_MAX products per launch (more are launched in turns).
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * At most FEW_ROWS rows of x: one launch for all jobs, gemv.cuh's kernel, in which a block takes a few
 * tiles of one job and eight rows of x; unquantised jobs (the router) run beside the others, a block
 * to a weight row in float32. More rows: the tensor-core products of gemm.cu and, for unquantised
 * matrices, of gemm_dense.cu.
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
    const uint8_t *image; /* x as bytes */
    float *y;
    int64_t w_head, x_head, y_head, x_row, y_row;
    int heads;
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

/* Sum over the block's threads, warp by warp; thread 0 has it. red: GV_WARPS floats. */
static __device__ __forceinline__ float dense_sum(float v, float *red) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) red[warp] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < GV_WARPS; i++) v += red[i];
    return v;
}

/* One weight row times n rows of x, by the whole block. Any type, any alignment. */
static __device__ __noinline__ void dense_row_any(int type, const uint8_t *wr, const float *x,
                                                  int64_t x_row, float *y, int64_t y_row, int cols,
                                                  int n, float *red) {
#pragma unroll 1
    for (int t = 0; t < n; t++) {
        float acc = 0;
#pragma unroll 1
        for (int k = (int)threadIdx.x * 4; k < cols; k += GV_THREADS * 4) {
            float4 a = dense_load(type, wr, k, cols - k);
            float4 b = dense_load(KT_F32, (const uint8_t *)(x + t * x_row), k, cols - k);
            acc += a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
        }
        acc = dense_sum(acc, red);
        if (threadIdx.x == 0) y[t * y_row] = acc;
    }
}

/* The same for float32 at aligned addresses and up to DENSE_AHEAD * 1024 columns (the router). The
 * weights do not depend on earlier kernels, so they are requested before the wait. Little code, on
 * purpose: it runs beside the quantised jobs, and what they run must stay in the caches. */
static __device__ __forceinline__ void dense_row(const struct gv_job &j, const uint8_t *w,
                                                 const float *x, float *y, int row, int n,
                                                 float *red) {
    const uint8_t *wr = w + (int64_t)row * j.cols * dense_bytes(j.type);
    bool fast = j.type == KT_F32 && j.cols % 4 == 0 && j.cols <= DENSE_AHEAD * GV_THREADS * 4 &&
                j.x_row % 4 == 0 && ((uintptr_t)wr | (uintptr_t)x) % 16 == 0;
    y += row;
    if (!fast) {
        gdc_wait();
        dense_row_any(j.type, wr, x, j.x_row, y, j.y_row, j.cols, n, red);
        return;
    }
    float4 a[DENSE_AHEAD];
#pragma unroll
    for (int i = 0; i < DENSE_AHEAD; i++) {
        int k = (i * GV_THREADS + (int)threadIdx.x) * 4;
        a[i] = make_float4(0, 0, 0, 0);
        if (k < j.cols) a[i] = *(const float4 *)((const float *)wr + k);
    }
    gdc_wait();
#pragma unroll 1
    for (int t = 0; t < n; t++, x += j.x_row) {
        float4 b[DENSE_AHEAD];
        float acc = 0;
#pragma unroll
        for (int i = 0; i < DENSE_AHEAD; i++) {
            int k = (i * GV_THREADS + (int)threadIdx.x) * 4;
            b[i] = make_float4(0, 0, 0, 0);
            if (k < j.cols) b[i] = *(const float4 *)(x + k);
        }
#pragma unroll
        for (int i = 0; i < DENSE_AHEAD; i++)
            acc += a[i].x * b[i].x + a[i].y * b[i].y + (a[i].z * b[i].z + a[i].w * b[i].w);
        acc = dense_sum(acc, red);
        if (threadIdx.x == 0) y[t * j.y_row] = acc;
    }
}

/* ---- x as bytes ---------------------------------------------------------------------------- */

/* A warp per row and run. See gemv.cuh for the numbers. */
static __global__ void __launch_bounds__(128)
    quantize_kernel(uint8_t *image, const float *x, int64_t x_row, int64_t x_head, int n, int heads,
                    int cols, int runs) {
    gdc_trigger();
    gdc_wait();
    int item = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (item >= n * runs) return;
    int row = item / runs, run = item % runs, b = lane >> 2, t = lane & 3;
    int k = run * GV_RUN + 32 * b;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, most = 0;
    if (k < cols) {
        const float *p = x + row / heads * x_row + row % heads * x_head + k + 4 * t;
        float4 e = load_float4(p), f = load_float4(p + 16);
        v[0] = e.x, v[1] = e.y, v[2] = e.z, v[3] = e.w;
        v[4] = f.x, v[5] = f.y, v[6] = f.z, v[7] = f.w;
    }
    for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(v[j]));
    most = warp_max(most);
    float inverse = most > 0 ? 32512.f / most : 0.f;
    int hi[8], lo[8];
    for (int j = 0; j < 8; j++) {
        int q = __float2int_rn(v[j] * inverse);
        hi[j] = (q + 128) >> 8;
        lo[j] = q - 256 * hi[j];
    }
    uint8_t *r = image + (int64_t)item * GV_RECORD;
    uint2 h = make_uint2(pack_bytes(hi[0], hi[1], hi[2], hi[3]),
                         pack_bytes(hi[4], hi[5], hi[6], hi[7]));
    uint2 l = make_uint2(pack_bytes(lo[0], lo[1], lo[2], lo[3]),
                         pack_bytes(lo[4], lo[5], lo[6], lo[7]));
    *(uint2 *)(r + b * 32 + t * 8) = h;
    *(uint2 *)(r + 256 + b * 32 + t * 8) = l;
    int sum[4] = {__dp4a((int)h.x, 0x01010101, 0), __dp4a((int)h.y, 0x01010101, 0),
                  __dp4a((int)l.x, 0x01010101, 0), __dp4a((int)l.y, 0x01010101, 0)};
    for (int j = 0; j < 4; j++) {
        sum[j] += __shfl_xor_sync(~0u, sum[j], 1);
        sum[j] += __shfl_xor_sync(~0u, sum[j], 2);
    }
    /* thread t writes one of the group's four sums; sixteens 2t, 2t+1, 2t+8, 2t+9 lie together */
    int mine = t == 0 ? sum[0] : t == 1 ? sum[1] : t == 2 ? sum[2] : sum[3];
    int q = 2 * b + t % 2, at = q % 8 / 2 * 4 + q / 8 * 2 + q % 2;
    ((__half *)(r + 512 + (t < 2 ? 0 : 32)))[at] = __int2half_rn(mine);
    if (lane == 0) *(float *)(r + 576) = most / 32512.f;
}

size_t gv_quantize(struct kctx *c, size_t offset, const float *x, int64_t x_row, int64_t x_head,
                   int n_rows, int heads, int64_t cols) {
    int n = n_rows * heads, runs = (int)ceil_div(cols, GV_RUN);
    size_t end = offset + (gv_image_bytes(n, cols) + 255) / 256 * 256;
    uint8_t *work = (uint8_t *)cuda_work(c, end);
    launch(c, quantize_kernel, (unsigned)ceil_div((int64_t)n * runs, 4), 128, 0, work + offset, x,
           x_row, x_head, n, heads, (int)cols, runs);
    return end;
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
    struct gv_x from = {j.image, runs, t0 * j.heads + head, j.heads, NULL, 1};
    float *y = j.y + head * j.y_head + t0 * j.y_row;
    float acc[4] = {0, 0, 0, 0};
    int run = tile < tiles ? wk : runs, run_x = gv_run_x(n);
    for (int run0 = 0; run0 < runs; run0 += a.stage) {
        int end = min(runs, run0 + a.stage);
        if (run0 > 0) __syncthreads();
        gv_stage(s.x, from, n, run0, end - run0);
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

/* ---- dispatch ----------------------------------------------------------------------------- */

/* Warps that share a tile: as many as there is work for while the grid stays near one wave. */
static int split_of(const struct kctx *c, int64_t tiles, int64_t cols) {
    int64_t runs = ceil_div(cols, GV_RUN);
    int wk = 1;
    while (wk < GV_WARPS && 2 * wk <= runs && tiles * 2 * wk / GV_WARPS <= 3 * c->sms) wk *= 2;
    return wk;
}

/* x of every quantised job as bytes, once where jobs share it. The workspace may move while it
 * grows, so places are settled before they become addresses. */
static void make_images(struct kctx *c, struct gv_args *a, const int *heads) {
    size_t at[JOBS_MAX] = {0}, end = 0;
    cuda_image_forget(c);
    for (int i = 0; i < a->n_jobs; i++)
        if (a->job[i].mat.cell_cols)
            end += gv_image_bytes((int64_t)a->n_rows * heads[i], a->job[i].cols) + 256;
    cuda_work(c, end);
    end = 0;
    for (int i = 0; i < a->n_jobs; i++) {
        struct gv_job *j = &a->job[i];
        j->heads = heads[i];
        if (!j->mat.cell_cols) continue;
        int k = 0;
        while (k < i && !(a->job[k].mat.cell_cols && a->job[k].x == j->x &&
                          a->job[k].x_row == j->x_row && a->job[k].cols == j->cols &&
                          heads[k] == 1 && heads[i] == 1))
            k++;
        at[i] = at[k];
        if (k == i) {
            at[i] = end;
            end = gv_quantize(c, end, j->x, j->x_row, j->x_head, a->n_rows, heads[i], j->cols);
            if (at[i] == 0 && heads[i] == 1) cuda_image_remember(c, j->x, j->x_row, a->n_rows, j->cols);
        }
    }
    for (int i = 0; i < a->n_jobs; i++) a->job[i].image = (const uint8_t *)c->work + at[i];
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
    make_images(c, a, heads);
    struct gv_plan p = gv_plan(c, cols, std::min(a->n_rows, GV_ROWS));
    a->ring = p.ring;
    a->stage = std::max(p.runs, 1);
    launch(c, gv_kernel, (unsigned)(blocks * a->x_groups), GV_THREADS, (size_t)p.smem, *a);
}

static struct gemm_job many_job(const struct gv_job *j, int heads, int n_rows) {
    struct gemm_job g = {};
    g.w = j->w, g.x = j->x, g.y = j->y;
    g.w_head = j->w_head, g.x_head = j->x_head, g.y_head = j->y_head;
    g.x_row = j->x_row, g.y_row = j->y_row;
    g.type = j->type, g.rows = j->rows, g.cols = j->cols, g.heads = heads, g.n_rows = n_rows;
    return g;
}

static void products(struct kctx *c, struct gv_args *a, const int *heads) {
    if (a->n_jobs == 0 || a->n_rows == 0) return;
    if (a->n_rows <= FEW_ROWS) {
        gv_launch(c, a, heads);
        return;
    }
    struct gemm_job run[GEMM_JOBS];
    const struct gv_job *before = NULL; /* last quantised one: its x stands converted */
    for (int i = 0; i < a->n_jobs; i++) {
        const struct gv_job *j = &a->job[i];
        if (type_is_dense(j->type)) {
            struct gemm_job d = many_job(j, heads[i], a->n_rows);
            cuda_gemm_dense(c, &d);
            continue;
        }
        bool same = before && before->x == j->x && before->x_row == j->x_row &&
                    before->cols == j->cols && heads[i] == 1;
        int n = 0;
        for (int k = i; k < a->n_jobs && n < GEMM_JOBS; k++) { /* neighbours of one kind go together */
            const struct gv_job *o = &a->job[k];
            if (o->type != j->type || o->x != j->x || o->x_row != j->x_row || o->cols != j->cols ||
                (k > i && heads[k] != 1) || (k > i && heads[i] != 1))
                break;
            run[n++] = many_job(o, heads[k], a->n_rows);
        }
        cuda_gemm(c, run, n, same);
        before = j;
        i += n - 1;
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
