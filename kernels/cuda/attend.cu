/* kernels/cuda/attend.cu: absorbed attention over cached latents.
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: the tensor-core kernel takes r_kv 512 and d_rope 64 in half precision; other shapes and
 * float32 caches go through the plain one, many rows of many heads on Hopper through
 * attend_many.cu. Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * One row's heads share its latents, so heads are the rows of the product: a block takes 16, 32 or
 * 64 heads of one row of the batch and a share ("split") of its positions, 32 at a time: scores
 * (heads x 576 x 32), softmax with a running maximum, values (heads x 32 x 512), each latent read
 * once from shared memory for both products. Only selected positions are read. With few rows the
 * positions are split over blocks and merged by a second kernel in the order of the splits.
 * Queries and probabilities are rounded to half precision, sums are float32.
 */
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attend_many.cuh"
#include "kernels/cuda/later.cuh"

#define R                   512
#define WIDTH               576 /* R + rope */
#define ROW                 584 /* of shared memory: 16 bytes off, so that no two rows share banks */
#define TILE                32  /* positions at a time */
#define P_ROW               40
#define S_ROW               36
#define THREADS             256
#define SPLITS_MAX          64
#define MULTIPROCESSORS_MAX 256

struct attend_args {
    const int32_t *pos, *slot, *page_table;
    int max_pages, heads, K, splits, width, r;
    float scale;
    const void *latent;
    const float *qk;
    const int32_t *selected, *n_selected;
    float *out;     /* [T, H, R] when splits is 1 */
    float *partial; /* as merge_args says */
    int n_rows;
    bool rotate; /* the last P of each query come from rope.q, rotated on the way */
    struct rope_args rope;
};

static __device__ __forceinline__ int positions_of(const struct attend_args &a, int t) {
    if (a.slot[t] < 0) return 0;
    return a.selected ? a.n_selected[t] : a.pos[t] + 1;
}

static __device__ __forceinline__ float half_range(float v) {
    return fminf(fmaxf(v, -65504.f), 65504.f);
}

static __host__ __device__ __forceinline__ struct merge_args to_merge(const struct attend_args &a) {
    struct merge_args m = {a.partial, a.out, a.n_rows, a.splits, a.heads, a.r};
    return m;
}

/* Elements k..k + 3 of the rotated part of query row `at`. */
static __device__ __forceinline__ float4 rotated4(const struct rope_args &a, int t, int64_t at,
                                                  int k) {
    const float *x = a.q + at * (a.N + a.P) + a.N, *angles = a.angles + (int64_t)t * a.P;
    return make_float4(rotated(x, k, a.P, angles, true), rotated(x, k + 1, a.P, angles, true),
                       rotated(x, k + 2, a.P, angles, true), rotated(x, k + 3, a.P, angles, true));
}

template <int MT> static constexpr __host__ __device__ int attend_smem(void) {
    return 16 * MT * ROW * 2 + 2 * TILE * ROW * 2 + 16 * MT * P_ROW * 2 +
           (MT == 1 ? 2 : 1) * 16 * MT * S_ROW * 4 + 16 * MT * 3 * 4;
}

/* MT: tiles of sixteen heads. */
template <int MT>
static __global__ void __launch_bounds__(THREADS, MT == 1 ? 2 : 1)
    attend_kernel(const __grid_constant__ struct attend_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr int HEADS = 16 * MT, S_COPIES = MT == 1 ? 2 : 1;
    __half *qs = (__half *)smem, *kv = qs + HEADS * ROW, *ps = kv + 2 * TILE * ROW;
    float *ss = (float *)(ps + HEADS * P_ROW), *stat_m = ss + S_COPIES * HEADS * S_ROW;
    float *stat_l = stat_m + HEADS, *corr = stat_l + HEADS;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q4 = lane & 3;
    int t = blockIdx.z, h0 = blockIdx.y * HEADS, split = blockIdx.x;
    gdc_trigger();
    /* One row: positions, pages and the latents of earlier steps stand before this step's first
     * kernel; only the row's own position is being written. */
    bool early = MT == 1 && a.n_rows == 1 && !a.selected;
    if (!early) gdc_wait();
    int n = positions_of(a, t), share = (n + a.splits - 1) / a.splits;
    share = (share + TILE - 1) / TILE * TILE;
    int first = split * share, last = min(n, first + share);
    int tiles = last > first ? (last - first + TILE - 1) / TILE : 0;

    /* eight threads fetch the latent of one position */
    uint32_t kv_addr = smem_addr(kv), qs_addr = smem_addr(qs), ps_addr = smem_addr(ps);
    auto fetch = [&](int tile) {
        int u = first + tile * TILE + tid / 8;
        bool have = tile < tiles && u < last;
        int64_t row = 0;
        if (early && tile == 0 && u == n - 1) have = false; /* fetched after the wait */
        if (have) {
            int pos = a.selected ? a.selected[(int64_t)t * a.K + u] : u;
            row = cache_row(a.page_table, a.max_pages, a.slot[t], pos);
        }
        const __half *src = (const __half *)a.latent + row * WIDTH + tid % 8 * 8;
        uint32_t dst = kv_addr + ((tile & 1) * TILE + tid / 8) * ROW * 2 + tid % 8 * 16;
        if (tile < tiles)
#pragma unroll
            for (int i = 0; i < 9; i++) cp_async16(dst + i * 128, src + i * 64, have);
        cp_async_commit();
    };
    fetch(0);
    if (early) {
        gdc_wait();
        int own = n - 1 - first; /* in tile 0? */
        if (own >= 0 && own < TILE && own < last - first && tid / 8 == own) {
            const __half *src = (const __half *)a.latent +
                                cache_row(a.page_table, a.max_pages, a.slot[t], n - 1) * WIDTH +
                                tid % 8 * 8;
            uint32_t dst = kv_addr + own * ROW * 2 + tid % 8 * 16;
            cp_async_wait<0>(); /* zeros were written there */
#pragma unroll
            for (int i = 0; i < 9; i++) cp_async16(dst + i * 128, src + i * 64, true);
        }
        cp_async_commit();
    }

    /* queries, a few loads in flight at a time */
#pragma unroll 9
    for (int i = tid; i < HEADS * WIDTH / 4; i += THREADS) {
        int h = i / (WIDTH / 4), k = i % (WIDTH / 4) * 4;
        float4 v = make_float4(0, 0, 0, 0);
        if (h0 + h < a.heads) {
            int64_t at = (int64_t)t * a.heads + h0 + h;
            if (a.rotate && k >= R)
                v = rotated4(a.rope, t, at, k - R);
            else
                v = *(const float4 *)(a.qk + at * WIDTH + k);
        }
        *(uint2 *)(qs + h * ROW + k) = make_uint2(pack_half2(half_range(v.x), half_range(v.y)),
                                                  pack_half2(half_range(v.z), half_range(v.w)));
    }
    for (int h = tid; h < HEADS; h += THREADS) stat_m[h] = -INFINITY, stat_l[h] = 0;

    float acc[MT][8][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) acc[m][j][k] = 0;
    const float factor = a.scale * 1.44269504089f;

    for (int tile = 0; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        fetch(tile + 1);
        uint32_t kvt = kv_addr + (tile & 1) * TILE * ROW * 2;

        /* scores: MT x 4 tiles of 16 heads x 8 positions */
        {
            constexpr int NT = MT == 4 ? 2 : 1, KS = MT == 1 ? 18 : 36;
            int m = MT == 1 ? 0 : warp % MT, n0 = MT == 1 ? warp % 4 : warp / MT * NT;
            int k0 = MT == 1 ? warp / 4 * 18 * 16 : 0;
            float c[NT][4] = {};
            uint32_t a_row = qs_addr + ((m * 16 + lane % 16) * ROW + k0 + lane / 16 * 8) * 2;
            uint32_t b_row = kvt + ((n0 * 8 + lane % 8) * ROW + k0 + lane / 8 * 8) * 2;
#pragma unroll 6
            for (int k = 0; k < KS; k += 2) {
                uint32_t a0[4], a1[4];
                ldsm4(a0, a_row + k * 32);
                ldsm4(a1, a_row + k * 32 + 32);
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    uint32_t b[4];
                    ldsm4(b, b_row + j * 8 * ROW * 2 + k * 32);
                    mma16816(c[j], a0[0], a0[1], a0[2], a0[3], b[0], b[1]);
                    mma16816(c[j], a1[0], a1[1], a1[2], a1[3], b[2], b[3]);
                }
            }
            float *s = ss + (MT == 1 ? warp / 4 * HEADS * S_ROW : 0);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                int col = (n0 + j) * 8 + 2 * q4;
                *(float2 *)(s + (m * 16 + g) * S_ROW + col) = make_float2(c[j][0], c[j][1]);
                *(float2 *)(s + (m * 16 + g + 8) * S_ROW + col) = make_float2(c[j][2], c[j][3]);
            }
        }
        __syncthreads();

        /* softmax with a running maximum; TPR threads per head */
        bool moved;
        {
            constexpr int TPR = THREADS / HEADS, PER = TILE / TPR;
            int h = tid / TPR, col = tid % TPR * PER, u = first + tile * TILE + col;
            float v[PER], top = -INFINITY, sum = 0;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                float x = ss[h * S_ROW + col + i];
                if (MT == 1) x += ss[HEADS * S_ROW + h * S_ROW + col + i];
                v[i] = u + i < last ? x * factor : -INFINITY;
                top = fmaxf(top, v[i]);
            }
            for (int o = 1; o < TPR; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
            float old = stat_m[h], m = fmaxf(old, top), shift = m == -INFINITY ? 0.f : m;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                v[i] = exp2f(v[i] - shift);
                ps[h * P_ROW + col + i] = __float2half_rn(v[i]);
                sum += v[i];
            }
            for (int o = 1; o < TPR; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
            float fade = exp2f(old - shift);
            __syncwarp();
            if (tid % TPR == 0) {
                corr[h] = fade;
                stat_m[h] = m;
                stat_l[h] = stat_l[h] * fade + sum;
            }
            moved = fade != 1.f;
        }
        if (__syncthreads_or(moved)) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
                float c0 = corr[m * 16 + g], c1 = corr[m * 16 + g + 8];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    acc[m][j][0] *= c0, acc[m][j][1] *= c0;
                    acc[m][j][2] *= c1, acc[m][j][3] *= c1;
                }
            }
        }

        /* values: this warp's 64 columns for all heads */
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t p[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
                ldsm4(p[m], ps_addr + ((m * 16 + lane % 16) * P_ROW + k * 16 + lane / 16 * 8) * 2);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t v[4];
                ldsm4_t(v, kvt + ((k * 16 + lane % 16) * ROW + warp * 64 + j * 16 + lane / 16 * 8) *
                                     2);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma16816(acc[m][2 * j], p[m][0], p[m][1], p[m][2], p[m][3], v[0], v[1]);
                    mma16816(acc[m][2 * j + 1], p[m][0], p[m][1], p[m][2], p[m][3], v[2], v[3]);
                }
            }
        }
    }
    __syncthreads();

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int h = m * 16 + g + 8 * r;
            if (h0 + h >= a.heads) continue;
            float l = stat_l[h], scale = 1.f;
            float *to;
            if (a.splits == 1) {
                scale = l > 0 ? 1.f / l : 0.f;
                to = a.out + ((int64_t)t * a.heads + h0 + h) * R;
            } else {
                to = a.partial + (((int64_t)t * a.splits + split) * a.heads + h0 + h) * R;
                if (warp == 0 && q4 == 0) {
                    float *stat = merge_stat(to_merge(a), t, split, h0 + h);
                    stat[0] = stat_m[h], stat[1] = l;
                }
            }
#pragma unroll
            for (int j = 0; j < 8; j++)
                *(float2 *)(to + warp * 64 + 8 * j + 2 * q4) =
                    make_float2(acc[m][j][2 * r] * scale, acc[m][j][2 * r + 1] * scale);
        }
}

/* The splits of one row and head. */
static __global__ void __launch_bounds__(MERGE_THREADS)
    merge_kernel(const __grid_constant__ struct merge_args a) {
    gdc_trigger();
    gdc_wait();
    merge_row(a, blockIdx.y, blockIdx.x, a.out + ((int64_t)blockIdx.y * a.heads + blockIdx.x) * R);
}

void cuda_merge_launch(struct kctx *c, const struct merge_args *a) {
    launch(c, merge_kernel, dim3((unsigned)a->heads, (unsigned)a->n_rows), MERGE_THREADS, 0, *a);
}

/* ---- any shape, any cache -------------------------------------------------------------------- */

#define PLAIN_VALUES 8 /* of the latent per thread: r_kv up to 2048 */

template <typename E>
static __global__ void __launch_bounds__(THREADS)
    attend_plain_kernel(const __grid_constant__ struct attend_args a) {
    extern __shared__ __align__(16) float plain[]; /* query [width], scores [THREADS] */
    __shared__ float red[33];
    __shared__ int64_t rows[THREADS];
    gdc_wait();
    int h = blockIdx.x, t = blockIdx.y, n = positions_of(a, t), tid = threadIdx.x;
    float *score = plain + a.width, acc[PLAIN_VALUES] = {}, top = -INFINITY, weight = 0;
    for (int i = tid; i < a.width; i += THREADS)
        plain[i] = a.qk[((int64_t)t * a.heads + h) * a.width + i];
    for (int u0 = 0; u0 < n; u0 += THREADS) {
        int u = u0 + tid, here = min(THREADS, n - u0);
        float s = -INFINITY;
        __syncthreads();
        if (u < n) {
            int pos = a.selected ? a.selected[(int64_t)t * a.K + u] : u;
            rows[tid] = cache_row(a.page_table, a.max_pages, a.slot[t], pos) * a.width;
            const E *x = (const E *)a.latent + rows[tid];
            s = 0;
            for (int k = 0; k < a.width; k++) s = fmaf(cache_float(x[k]), plain[k], s);
            s *= a.scale;
        }
        float most = warp_max(s);
        if (tid % 32 == 0) red[tid / 32] = most;
        __syncthreads();
        for (int i = 0; i < THREADS / 32; i++) most = fmaxf(most, red[i]);
        float now = fmaxf(top, most), fade = expf(top - now);
        score[tid] = u < n ? expf(s - now) : 0;
        weight = weight * fade + block_sum(score[tid], red);
        top = now;
        for (int i = 0; i < PLAIN_VALUES; i++) {
            int k = tid + i * THREADS;
            if (k >= a.r) break;
            acc[i] *= fade;
            for (int j = 0; j < here; j++)
                acc[i] = fmaf(score[j], cache_float(((const E *)a.latent)[rows[j] + k]), acc[i]);
        }
    }
    float w = weight > 0 ? 1.f / weight : 0.f;
    for (int i = 0; i < PLAIN_VALUES && tid + i * THREADS < a.r; i++)
        a.out[((int64_t)t * a.heads + h) * a.r + tid + i * THREADS] = acc[i] * w;
}

/* ---- choice of shape --------------------------------------------------------------------------
 */

/* Tiles of sixteen heads per block: as many as leave every multiprocessor work. */
static int head_tiles(int sms, size_t smem_block, int heads, int rows) {
    if (smem_block > (size_t)attend_smem<4>() && heads % 64 == 0 && rows * (heads / 64) >= sms)
        return 4;
    if (smem_block > (size_t)attend_smem<2>() && heads % 32 == 0 && rows * (heads / 32) >= sms)
        return 2;
    return 1;
}

static int split_count(int sms, int blocks, int positions) {
    sms = std::min(sms, MULTIPROCESSORS_MAX);
    int splits = (int)std::min<int64_t>(ceil_div(positions, TILE), 2 * sms / std::max(blocks, 1));
    return std::max(1, std::min(splits, SPLITS_MAX));
}

size_t cuda_attend_scratch(const struct kdims *d, const struct kbounds *b) {
    (void)b;
    /* rows x splits x groups of sixteen heads: at most two blocks per multiprocessor */
    return (size_t)2 * MULTIPROCESSORS_MAX * 16 * (size_t)(d->r_kv + 2) * sizeof(float);
}

void cuda_attend(struct kctx *c, const struct kop_attend *o) {
    const struct kdims *d = o->dims;
    int T = o->batch->n_rows;
    if (T == 0) return;
    if (c->image.x == o->out || T > LATER_ROWS) cuda_image_forget(c);
    if (T > LATER_ROWS) cuda_settle(c);
    if (cuda_attend_many(c, o)) return;
    struct attend_args a = {};
    a.pos = o->batch->pos, a.slot = o->batch->slot, a.page_table = o->seqs->page_table;
    a.max_pages = o->seqs->max_pages, a.heads = d->n_heads, a.K = d->ix_topk;
    a.width = d->r_kv + d->d_rope, a.r = d->r_kv, a.scale = d->attn_scale, a.n_rows = T;
    a.latent = o->cache->latent, a.qk = o->qk, a.selected = o->selected;
    a.n_selected = o->n_selected, a.out = o->out, a.partial = (float *)o->scratch;
    a.splits = 1;
    bool fast = !cuda_cache_f32() && a.r == R && a.width == WIDTH;
    struct later *l = c->later;
    if (fast && l->rope_due && l->rope.qk == o->qk && l->rope.n_rows == T)
        l->rope_due = false, a.rotate = true, a.rope = l->rope;
    cuda_settle(c);
    if (!fast) {
        CU_REQUIRE(a.r <= PLAIN_VALUES * THREADS);
        size_t smem = (size_t)(a.width + THREADS) * sizeof(float);
        launch(c, cuda_cache_f32() ? attend_plain_kernel<float> : attend_plain_kernel<__half>,
               dim3((unsigned)a.heads, (unsigned)T), THREADS, smem, a);
        return;
    }
    int positions = o->batch->max_context;
    if (o->selected) positions = std::min(positions, d->ix_topk);
    int mt = head_tiles(c->sms, (size_t)c->smem_block, a.heads, T);
    int groups = (int)ceil_div(a.heads, 16 * mt);
    if (mt == 1) a.splits = split_count(c->sms, groups * T, positions);
    dim3 grid((unsigned)a.splits, (unsigned)groups, (unsigned)T);
    if (mt == 4)
        launch(c, attend_kernel<4>, grid, THREADS, attend_smem<4>(), a);
    else if (mt == 2)
        launch(c, attend_kernel<2>, grid, THREADS, attend_smem<2>(), a);
    else
        launch(c, attend_kernel<1>, grid, THREADS, attend_smem<1>(), a);
    if (a.splits == 1) return;
    struct merge_args m = to_merge(a);
    if (T <= LATER_ROWS)
        l->merge = m, l->merge_due = true;
    else
        cuda_merge_launch(c, &m);
}

void cuda_attend_init(struct kctx *c) {
    cuda_attend_many_init(c);
    allow_smem(attend_kernel<1>, attend_smem<1>());
    if (c->smem_block > attend_smem<2>()) allow_smem(attend_kernel<2>, attend_smem<2>());
    if (c->smem_block > attend_smem<4>()) allow_smem(attend_kernel<4>, attend_smem<4>());
}
