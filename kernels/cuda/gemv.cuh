/* kernels/cuda/gemv.cuh: products with at most eight rows of x: every byte of the weights once.
 *
 * Owns: nothing.  Called by: matmul.cu, experts.cu.
 * Tested by: tests/gpu/check_ops.cu
 *
 * A warp owns a tile of sixteen weight rows and every WK-th run of 256 columns of it. The runs are
 * whole stretches of memory (quant.cuh), fetched by bulk copies into a ring of the warp's own, so
 * that a warp waits for nobody but its own data and a whole ring is in flight while it computes, or
 * before the previous kernel has finished. Tensor-core tiles are used even for one row of x: sixteen
 * rows of weights need no shuffles to be summed.
 *
 * x stands in shared memory as half precision / 16, in the order in which lanes hold weights:
 *   xs[k / 32][column][32], sums[k / 256][column][16] (sums of x over sixteen columns)
 * With at most four rows each row takes two columns, x rounded and what rounding lost, so products
 * are those of float32 activations to 22 bits; with five to eight rows x is rounded (11 bits).
 */
#ifndef OCTAVO_KERNELS_CUDA_GEMV_H
#define OCTAVO_KERNELS_CUDA_GEMV_H

#include "kernels/cuda/quant.cuh"

#define GV_WARPS   8
#define GV_THREADS (GV_WARPS * 32)
#define GV_RUN     256  /* columns of one ring slot */
#define GV_SLOT    4352 /* bytes of the largest: sixteen rows of 256 columns of Q8_0 */
#define GV_SLOTS   2
#define GV_ROWS    8    /* of x */

/* Shared memory of a block, in order: rings, barriers, partial sums, xs and sums. */
#define GV_RING_BYTES (GV_WARPS * GV_SLOTS * GV_SLOT)
#define GV_BAR_BYTES  (GV_WARPS * GV_SLOTS * 8)
#define GV_RED_BYTES  (GV_WARPS * 32 * 16)
#define GV_FIXED      (GV_RING_BYTES + GV_BAR_BYTES + GV_RED_BYTES)

static __host__ __device__ inline int gv_columns(int rows) { return rows <= 4 ? 2 * rows : rows; }
static __host__ __device__ inline int gv_x_bytes(int kc, int rows) {
    return gv_columns(rows) * (kc * 2 + kc / GV_RUN * 32);
}

/* Columns of x staged at a time: whole runs, for every warp of a tile at least one. */
static inline int gv_stage_cols(const struct kctx *c, int64_t cols, int rows) {
    int budget = c->smem_block - GV_FIXED < 40960 ? c->smem_block - GV_FIXED : 40960;
    int kc = (int)(ceil_div(cols, GV_RUN) * GV_RUN);
    while (gv_x_bytes(kc, rows) > budget)
        kc = kc > 2048 ? (kc - 1) / 2048 * 2048 : (kc / 2 + GV_RUN - 1) / GV_RUN * GV_RUN;
    return kc;
}

#if defined(__CUDACC__)

struct gv_smem {
    uint32_t ring, bar; /* this warp's */
    const uint8_t *ring_ptr;
    float *red;
    uint8_t *xs;
    __half *sums;
    int kc;
};

static __device__ __forceinline__ struct gv_smem gv_carve(uint8_t *smem, int kc, int rows) {
    struct gv_smem s;
    int warp = threadIdx.x >> 5;
    s.ring_ptr = smem + warp * GV_SLOTS * GV_SLOT;
    s.ring = smem_addr(s.ring_ptr);
    s.bar = smem_addr(smem + GV_RING_BYTES) + warp * GV_SLOTS * 8;
    s.red = (float *)(smem + GV_RING_BYTES + GV_BAR_BYTES);
    s.xs = smem + GV_FIXED;
    s.sums = (__half *)(s.xs + gv_columns(rows) * kc * 2);
    s.kc = kc;
    return s;
}

/* A warp's ring: `issued` and `taken` count slots since the kernel began. */
struct gv_ring {
    uint32_t issued, taken;
};

static __device__ __forceinline__ void gv_ring_init(const struct gv_smem &s, struct gv_ring *r) {
    if ((threadIdx.x & 31) == 0) {
        for (int i = 0; i < GV_SLOTS; i++) mbar_init(s.bar + 8 * i, 1);
        mbar_init_fence();
    }
    __syncwarp();
    r->issued = r->taken = 0;
}

static __device__ __forceinline__ void gv_issue(const struct gv_smem &s, struct gv_ring *r,
                                                const uint8_t *src, int bytes) {
    if ((threadIdx.x & 31) == 0) {
        uint32_t slot = r->issued % GV_SLOTS;
        mbar_expect(s.bar + 8 * slot, bytes);
        bulk_load(s.ring + slot * GV_SLOT, src, bytes, s.bar + 8 * slot);
    }
    r->issued++;
}

/* Waits for the oldest slot. */
static __device__ __forceinline__ const uint8_t *gv_take(const struct gv_smem &s,
                                                         struct gv_ring *r) {
    uint32_t slot = r->taken % GV_SLOTS;
    mbar_wait(s.bar + 8 * slot, r->taken / GV_SLOTS & 1);
    r->taken++;
    return s.ring_ptr + slot * GV_SLOT;
}

/* Bytes of run `run` of a tile whose rows have `cols` columns. */
template <int TYPE> static __device__ __forceinline__ int gv_run_bytes(int cols, int run) {
    int n = min(GV_RUN, cols - run * GV_RUN);
    return n / quant<TYPE>::cols * quant<TYPE>::bytes;
}
template <int TYPE> static constexpr __device__ __forceinline__ int gv_run_stride(void) {
    return GV_RUN / quant<TYPE>::cols * quant<TYPE>::bytes;
}

/* Stages columns [k0, k0 + n) of `rows` rows of x, row r at x_of(r); columns past `cols` are zero.
 * All threads of the block; the caller synchronises before and after. */
template <bool SPLIT, typename X>
static __device__ __forceinline__ void gv_stage(const struct gv_smem &s, X x_of, int rows, int k0,
                                                int cols) {
    int columns = SPLIT ? 2 * rows : rows;
    int groups = (min(s.kc, cols - k0) + GV_RUN - 1) / GV_RUN * 8; /* of 32 columns */
    for (int i = threadIdx.x; i < groups * rows * 4; i += GV_THREADS) {
        int t = i & 3, row = (i >> 2) % rows, group = (i >> 2) / rows;
        int k = k0 + 32 * group + 4 * t;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (k0 + 32 * group < cols) {
            const float *x = x_of(row) + k;
            float4 a = load_float4(x), b = load_float4(x + 16);
            v[0] = x_clamp(a.x), v[1] = x_clamp(a.y), v[2] = x_clamp(a.z), v[3] = x_clamp(a.w);
            v[4] = x_clamp(b.x), v[5] = x_clamp(b.y), v[6] = x_clamp(b.z), v[7] = x_clamp(b.w);
        }
        float sum[2] = {v[0] + v[1] + (v[2] + v[3]), v[4] + v[5] + (v[6] + v[7])};
        uint32_t four = 15u << (threadIdx.x & 28);
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(four, sum[h], 1);
            sum[h] += __shfl_xor_sync(four, sum[h], 2);
        }
        int column = SPLIT ? 2 * row : row;
        uint32_t hi[4], lo[4];
        for (int j = 0; j < 4; j++) {
            hi[j] = pack_half2(v[2 * j], v[2 * j + 1]);
            lo[j] = pack_half2(v[2 * j] - h_lo(hi[j]), v[2 * j + 1] - h_hi(hi[j]));
        }
        uint8_t *dst = s.xs + ((int64_t)group * columns + column) * 64 + t * 16;
        *(uint4 *)dst = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        if (SPLIT) *(uint4 *)(dst + 64) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        if (t < 2) { /* thread t writes the sum of its sixteen */
            int q = group % 8 * 2 + t, at = q % 8 / 2 * 4 + q / 8 * 2 + q % 2;
            float total = fminf(fmaxf(sum[t], -65504.f), 65504.f);
            __half h = __float2half_rn(total);
            __half *to = s.sums + ((int64_t)(group / 8) * columns + column) * 16 + at;
            to[0] = h;
            if (SPLIT) to[16] = __float2half_rn(total - __half2float(h));
        }
    }
}

/* acc[16 rows, 8 columns] += run `run` of the tile (in slot) times x; `first` is the run at which
 * the staged columns begin. Lane 4g + t: acc[0], acc[1] row g and acc[2], acc[3] row g + 8, columns
 * 2t, 2t + 1. */
template <int TYPE>
static __device__ __forceinline__ void gv_run(float (&acc)[4], const uint8_t *slot,
                                              const struct gv_smem &s, int run, int first,
                                              int cols, int columns) {
    using S = scales<TYPE>;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    bool have = g < columns;
    const uint8_t *xs = s.xs + ((int64_t)(run - first) * 8 * columns + g) * 64 + t * 16;
    uint2 sum = make_uint2(0, 0);
    if (S::has_low && have)
        sum = *(const uint2 *)(s.sums + ((int64_t)(run - first) * columns + g) * 16 + 4 * t);
    S sc;
    if constexpr (quant<TYPE>::cols == 256) sc.load(slot, lane);
    int groups = min(8, (cols - run * GV_RUN) / 32);
#pragma unroll
    for (int b = 0; b < 8; b++) {
        if (quant<TYPE>::cols == 32 && b >= groups) break;
        const uint8_t *cell = quant<TYPE>::cols == 32 ? slot + b * quant<TYPE>::bytes : slot;
        constexpr int in_cell = quant<TYPE>::cols == 32 ? 0 : 1;
        uint32_t p[2][4];
        if constexpr (quant<TYPE>::cols == 32) sc.load(cell, lane);
        codes<TYPE>(cell, in_cell * b, lane, p);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (have) x = *(const uint4 *)(xs + b * columns * 64);
        float c[4] = {0, 0, 0, 0};
        mma16816(c, p[0][0], p[1][0], p[0][1], p[1][1], x.x, x.y);
        if constexpr (S::fine) {
            float s0 = sc.scale(0, b, 0), s1 = sc.scale(1, b, 0);
            acc[0] += s0 * c[0], acc[1] += s0 * c[1], acc[2] += s1 * c[2], acc[3] += s1 * c[3];
            c[0] = c[1] = c[2] = c[3] = 0;
        }
        mma16816(c, p[0][2], p[1][2], p[0][3], p[1][3], x.z, x.w);
        float s0 = sc.scale(0, b, 1), s1 = sc.scale(1, b, 1);
        acc[0] += s0 * c[0], acc[1] += s0 * c[1], acc[2] += s1 * c[2], acc[3] += s1 * c[3];
        if constexpr (S::has_low && quant<TYPE>::cols == 32) {
            bool mine = t == b % 4;
            mma16816(acc, mine && b < 4 ? sc.raw[0][0] : 0, mine && b < 4 ? sc.raw[1][0] : 0,
                     mine && b >= 4 ? sc.raw[0][0] : 0, mine && b >= 4 ? sc.raw[1][0] : 0, sum.x,
                     sum.y);
        }
    }
    if constexpr (S::has_low && quant<TYPE>::cols == 256) {
        uint32_t a[4];
        float c[4] = {0, 0, 0, 0};
        sc.low_operand(t, a);
        mma16816(c, a[0], a[1], a[2], a[3], sum.x, sum.y);
        acc[0] -= sc.m[0] * c[0], acc[1] -= sc.m[0] * c[1];
        acc[2] -= sc.m[1] * c[2], acc[3] -= sc.m[1] * c[3];
    }
}

/* Sums of the WK warps that share a tile, in their order. Thread `lane` of the tile's first warp
 * gets its four sums. Two synchronisations. */
static __device__ __forceinline__ void gv_reduce(const struct gv_smem &s, float (&acc)[4], int wk) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float4 *red = (float4 *)s.red;
    red[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __syncthreads();
    if (warp % wk == 0) {
        for (int i = 1; i < wk; i++) {
            float4 v = red[(warp + i) * 32 + lane];
            acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
        }
    }
}

/* Calls f(row 0..15, row of x, value) for this lane's results. */
template <bool SPLIT, typename F>
static __device__ __forceinline__ void gv_results(const float (&acc)[4], int rows, F f) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    if (SPLIT) {
        if (t < rows) {
            f(g, t, (acc[0] + acc[1]) * X_UNSCALE);
            f(g + 8, t, (acc[2] + acc[3]) * X_UNSCALE);
        }
    } else {
        for (int i = 0; i < 2; i++)
            if (2 * t + i < rows) {
                f(g, 2 * t + i, acc[i] * X_UNSCALE);
                f(g + 8, 2 * t + i, acc[2 + i] * X_UNSCALE);
            }
    }
}

#endif /* __CUDACC__ */
#endif
