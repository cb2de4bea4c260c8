/* kernels/cuda/select.cu: the lightning indexer: scores of all cached positions and the K largest.
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: none.  Tested by: tests/gpu/check_ops.c
 *
 * Two kernels: score(u) for a run of positions per warp on the tensor cores (keys in half
 * precision are the A operand straight from the cache, the queries B from shared memory; many rows
 * share the keys they have in common), then one block per row that finds the K-th largest digit by digit (11, 11, 10 bits, as the CPU does) and
 * writes the chosen positions in ascending order. While every context fits into K positions, one
 * small kernel writes them all out instead. Rows are taken in groups so that the scores stay within
 * SCORE_BYTES.
 */
#include <algorithm>
#include <cmath>

#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/topk.cuh"

#define SCORE_BYTES ((size_t)256 << 20)
#define WARP_POSITIONS 32
#define SCORE_WARPS 8
#define MANY_ROWS   16 /* of a step, from which on they share keys */

struct select_args {
    const int32_t *pos, *slot, *page_table;
    int max_pages, row0, n_rows, stride, heads, width, K;
    float factor;
    const void *keys;
    const float *iq, *w;
    float *scores; /* [n_rows, stride] */
    int32_t *selected, *n_selected;
};

static int64_t score_stride(int64_t context) { return ceil_div(context, 256) * 256; }

static int rows_at_once(int64_t context, int rows) {
    int64_t fit = (int64_t)(SCORE_BYTES / sizeof(float)) / score_stride(context);
    return (int)std::max<int64_t>(1, std::min<int64_t>(fit, rows));
}

size_t cuda_select_scratch(const struct kdims *d, const struct kbounds *b) {
    if (d->ix_heads == 0 || b->rows == 0) return 0;
    /* fewer positions leave room for more rows: never more than SCORE_BYTES, or one row */
    return std::max(SCORE_BYTES, (size_t)score_stride(b->context) * sizeof(float)) <
                   (size_t)b->rows * (size_t)score_stride(b->context) * sizeof(float)
               ? std::max(SCORE_BYTES, (size_t)score_stride(b->context) * sizeof(float))
               : (size_t)b->rows * (size_t)score_stride(b->context) * sizeof(float);
}

/* Everything selected. */
static __global__ void fill_kernel(const int32_t *pos, const int32_t *slot, int K,
                                   int32_t *selected, int32_t *n_selected) {
    gdc_trigger();
    gdc_wait();
    int t = blockIdx.x, n = slot[t] < 0 ? 0 : min(pos[t] + 1, K);
    if (threadIdx.x == 0) n_selected[t] = n;
    for (int u = threadIdx.x; u < n; u += blockDim.x) selected[(int64_t)t * K + u] = u;
}

/* Half-precision keys of 128 or another multiple of 32 values. Lane 4g + t reads values 8t..8t+7 of
 * each 32 of positions g and g + 8; the queries are read the same way, so the order of k agrees. */
static __global__ void __launch_bounds__(SCORE_WARPS * 32)
    score_kernel(const __grid_constant__ struct select_args a) {
    extern __shared__ __align__(16) __half qs[]; /* [heads padded to 8, width + 32] */
    __shared__ float ws[256];
    gdc_wait();
    int t = a.row0 + blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int n = a.slot[t] < 0 ? 0 : a.pos[t] + 1, first = blockIdx.x * SCORE_WARPS * WARP_POSITIONS;
    if (n <= a.K || first >= n) return;
    int g = lane >> 2, q = lane & 3, stride = a.width + 32, tiles = (a.heads + 7) / 8;
    for (int i = threadIdx.x; i < tiles * 8 * a.width; i += blockDim.x) {
        int h = i / a.width, k = i % a.width;
        float v = h < a.heads ? a.iq[((int64_t)t * a.heads + h) * a.width + k] : 0;
        qs[h * stride + k] = cache_element<__half>(v);
    }
    for (int h = threadIdx.x; h < tiles * 8; h += blockDim.x)
        ws[h] = h < a.heads ? a.w[(int64_t)t * a.heads + h] * a.factor : 0;
    __syncthreads();
    first += warp * WARP_POSITIONS;
    for (int m = 0; m < WARP_POSITIONS / 16; m++) {
        int u0 = first + 16 * m;
        if (u0 >= n) break;
        const __half *key[2];
        for (int r = 0; r < 2; r++) {
            int u = min(u0 + g + 8 * r, n - 1);
            key[r] = (const __half *)a.keys +
                     cache_row(a.page_table, a.max_pages, a.slot[t], u) * a.width + 8 * q;
        }
        float sum[2] = {0, 0};
        for (int j = 0; j < tiles; j++) {
            float c[4] = {0, 0, 0, 0};
            for (int k = 0; k < a.width; k += 32) {
                uint4 a0 = *(const uint4 *)(key[0] + k), a1 = *(const uint4 *)(key[1] + k);
                uint4 b = *(const uint4 *)(qs + (8 * j + g) * stride + k + 8 * q);
                mma16816(c, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
                mma16816(c, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
            }
            float w0 = ws[8 * j + 2 * q], w1 = ws[8 * j + 2 * q + 1];
            sum[0] += w0 * fmaxf(c[0], 0.f) + w1 * fmaxf(c[1], 0.f);
            sum[1] += w0 * fmaxf(c[2], 0.f) + w1 * fmaxf(c[3], 0.f);
        }
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            int u = u0 + g + 8 * r;
            if (q == r && u < n) a.scores[(int64_t)blockIdx.y * a.stride + u] = sum[r];
        }
    }
}

/* The same for many rows, which read the same keys when they are of one sequence: a warp holds 32
 * positions' keys in registers for ROWS rows. Keys of 128 values. */
#define ROWS      4
#define KEY       128
#define Q_STRIDE  (KEY + 32)
#define POSITIONS 1024 /* of a block, SCORE_WARPS * WARP_POSITIONS at a time */

struct score_rows {
    __half *q; /* [ROWS, heads padded to 8, Q_STRIDE] */
    float *w;  /* [ROWS, heads padded to 8] */
    int tiles, slot[ROWS];
    int n[ROWS], end[ROWS]; /* positions of a row; of the rows here of its sequence */
};

/* scores of positions u0 + 16 m + g and + 8 of row r */
static __device__ __forceinline__ void score_row(const struct select_args &a,
                                                 const struct score_rows &s, int r, int u0,
                                                 const uint4 (&key)[2][2][4]) {
    int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const __half *qs = s.q + r * s.tiles * 8 * Q_STRIDE + g * Q_STRIDE + 8 * q;
    const float *ws = s.w + r * s.tiles * 8 + 2 * q;
    float sum[2][2] = {{0, 0}, {0, 0}};
#pragma unroll 2
    for (int j = 0; j < s.tiles; j++) {
        float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
        for (int k = 0; k < KEY / 32; k++) {
            uint4 b = *(const uint4 *)(qs + 8 * j * Q_STRIDE + 32 * k);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                uint4 x = key[m][0][k], y = key[m][1][k];
                mma16816(c[m], x.x, y.x, x.y, y.y, b.x, b.y);
                mma16816(c[m], x.z, y.z, x.w, y.w, b.z, b.w);
            }
        }
        float w0 = ws[8 * j], w1 = ws[8 * j + 1];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                sum[m][h] += w0 * fmaxf(c[m][2 * h], 0.f) + w1 * fmaxf(c[m][2 * h + 1], 0.f);
    }
    float *out = a.scores + (int64_t)(blockIdx.y * ROWS + r) * a.stride;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float v = sum[m][h];
            v += __shfl_xor_sync(~0u, v, 1);
            v += __shfl_xor_sync(~0u, v, 2);
            int u = u0 + 16 * m + 8 * h + g;
            if (q == h && u < s.n[r]) out[u] = v;
        }
}

static __global__ void __launch_bounds__(SCORE_WARPS * 32, 2)
    score_many_kernel(const __grid_constant__ struct select_args a) {
    extern __shared__ __align__(16) uint8_t many[];
    struct score_rows s;
    gdc_trigger();
    gdc_wait();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, most = 0;
    int row0 = blockIdx.y * ROWS, first = blockIdx.x * POSITIONS;
    s.tiles = (a.heads + 7) / 8;
    s.q = (__half *)many;
    s.w = (float *)(s.q + ROWS * s.tiles * 8 * Q_STRIDE);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int t = a.row0 + row0 + r;
        s.slot[r] = row0 + r < a.n_rows ? a.slot[t] : -1;
        s.n[r] = s.slot[r] < 0 ? 0 : a.pos[t] + 1;
        if (s.n[r] <= a.K) s.n[r] = 0; /* everything is selected */
        most = max(most, s.n[r]);
    }
    if (first >= most) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        s.end[r] = s.n[r];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (s.slot[i] == s.slot[r]) s.end[r] = max(s.end[r], s.n[i]);
    }
    for (int i = threadIdx.x; i < ROWS * s.tiles * 8 * (KEY / 4); i += blockDim.x) {
        int h = i / (KEY / 4), k = i % (KEY / 4) * 4;
        int r = h / (s.tiles * 8), head = h % (s.tiles * 8);
        float4 v = make_float4(0, 0, 0, 0);
        if (row0 + r < a.n_rows && head < a.heads)
            v = *(const float4 *)(a.iq + ((int64_t)(a.row0 + row0 + r) * a.heads + head) * KEY + k);
        __half *to = s.q + h * Q_STRIDE + k;
        to[0] = cache_element<__half>(v.x), to[1] = cache_element<__half>(v.y);
        to[2] = cache_element<__half>(v.z), to[3] = cache_element<__half>(v.w);
    }
    for (int h = threadIdx.x; h < ROWS * s.tiles * 8; h += blockDim.x) {
        int r = h / (s.tiles * 8), head = h % (s.tiles * 8);
        bool have = row0 + r < a.n_rows && head < a.heads;
        s.w[h] = have ? a.w[(int64_t)(a.row0 + row0 + r) * a.heads + head] * a.factor : 0;
    }
    __syncthreads();
    int end = min(most, first + POSITIONS);
    for (int u0 = first + warp * WARP_POSITIONS; u0 < end; u0 += SCORE_WARPS * WARP_POSITIONS) {
        uint4 key[2][2][4];
        int held = -1;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (u0 >= s.n[r]) continue;
            if (held != s.slot[r]) {
                held = s.slot[r];
#pragma unroll
                for (int i = 0; i < 4; i++) { /* past the end: any key that exists */
                    int u = min(u0 + 8 * i + g, s.end[r] - 1);
                    const __half *src = (const __half *)a.keys +
                                        cache_row(a.page_table, a.max_pages, held, u) * KEY + 8 * q;
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        key[i / 2][i % 2][k] = *(const uint4 *)(src + 32 * k);
                }
            }
            score_row(a, s, r, u0, key);
        }
    }
}

/* Any element type and width, a thread per position. */
template <typename E>
static __global__ void __launch_bounds__(256)
    score_plain_kernel(const __grid_constant__ struct select_args a) {
    extern __shared__ __align__(16) float plain[]; /* [heads, width] */
    gdc_wait();
    int t = a.row0 + blockIdx.y, n = a.slot[t] < 0 ? 0 : a.pos[t] + 1;
    int u = blockIdx.x * blockDim.x + threadIdx.x;
    if (n <= a.K || (int)(blockIdx.x * blockDim.x) >= n) return;
    for (int i = threadIdx.x; i < a.heads * a.width; i += blockDim.x)
        plain[i] = a.iq[(int64_t)t * a.heads * a.width + i];
    __syncthreads();
    if (u >= n) return;
    const E *key =
        (const E *)a.keys + cache_row(a.page_table, a.max_pages, a.slot[t], u) * a.width;
    float sum = 0;
    for (int h = 0; h < a.heads; h++) {
        float dot = 0;
        for (int k = 0; k < a.width; k++)
            dot = fmaf(cache_float(key[k]), plain[h * a.width + k], dot);
        sum = fmaf(a.w[(int64_t)t * a.heads + h], fmaxf(dot, 0.f), sum);
    }
    a.scores[(int64_t)blockIdx.y * a.stride + u] = sum * a.factor;
}

/* One row per block. */
static __global__ void __launch_bounds__(TOPK_THREADS)
    top_kernel(const __grid_constant__ struct select_args a) {
    __shared__ struct topk_smem s;
    gdc_wait();
    int t = a.row0 + blockIdx.x, n = a.slot[t] < 0 ? 0 : a.pos[t] + 1, K = a.K;
    int32_t *out = a.selected + (int64_t)t * K;
    if (threadIdx.x == 0) a.n_selected[t] = min(n, K);
    if (n <= K) {
        for (int u = threadIdx.x; u < n; u += TOPK_THREADS) out[u] = u;
        return;
    }
    topk_block(a.scores + (int64_t)blockIdx.x * a.stride, n, K, out, &s);
}

void cuda_select(struct kctx *c, const struct kop_select *o) {
    cuda_settle(c);
    const struct kdims *d = o->dims;
    int T = o->batch->n_rows, context = o->batch->max_context;
    if (T == 0) return;
    if (context <= d->ix_topk) {
        launch(c, fill_kernel, (unsigned)T, 256, 0, o->batch->pos, o->batch->slot, d->ix_topk,
               o->selected, o->n_selected);
        return;
    }
    struct select_args a = {};
    a.pos = o->batch->pos, a.slot = o->batch->slot, a.page_table = o->seqs->page_table;
    a.max_pages = o->seqs->max_pages, a.heads = d->ix_heads, a.width = d->ix_dim, a.K = d->ix_topk;
    a.factor = 1.f / sqrtf((float)(d->ix_dim * d->ix_heads));
    a.keys = o->cache->index, a.iq = o->iq, a.w = o->w, a.scores = (float *)o->scratch;
    a.selected = o->selected, a.n_selected = o->n_selected;
    a.stride = (int)score_stride(context);
    bool fast = !cuda_cache_f32() && d->ix_dim % 32 == 0 && d->ix_heads <= 256;
    size_t fast_smem = (size_t)ceil_div(d->ix_heads, 8) * 8 * (size_t)(d->ix_dim + 32) * 2;
    size_t plain_smem = (size_t)(d->ix_heads * d->ix_dim) * sizeof(float);
    bool many = fast && d->ix_dim == KEY && T >= MANY_ROWS && d->ix_heads <= 64;
    size_t many_smem = (size_t)ROWS * (size_t)ceil_div(d->ix_heads, 8) * 8 * (Q_STRIDE * 2 + 4);
    int step = rows_at_once(context, T);
    for (a.row0 = 0; a.row0 < T; a.row0 += step) {
        a.n_rows = std::min(step, T - a.row0);
        dim3 grid((unsigned)ceil_div(context, 256), (unsigned)a.n_rows);
        if (many)
            launch(c, score_many_kernel,
                   dim3((unsigned)ceil_div(context, POSITIONS), (unsigned)ceil_div(a.n_rows, ROWS)),
                   SCORE_WARPS * 32, many_smem, a);
        else if (fast) launch(c, score_kernel, grid, SCORE_WARPS * 32, fast_smem, a);
        else if (cuda_cache_f32())
            launch(c, score_plain_kernel<float>, grid, 256, plain_smem, a);
        else launch(c, score_plain_kernel<__half>, grid, 256, plain_smem, a);
        launch(c, top_kernel, (unsigned)a.n_rows, TOPK_THREADS, 0, a);
    }
}

void cuda_select_init(struct kctx *c) {
    allow_smem(score_kernel, (size_t)c->smem_block - 2048);
    allow_smem(score_many_kernel, (size_t)c->smem_block);
    allow_smem(score_plain_kernel<float>, (size_t)c->smem_block);
    allow_smem(score_plain_kernel<__half>, (size_t)c->smem_block);
}
