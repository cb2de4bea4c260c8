/* kernels/cuda/gemv.cuh: products with at most eight rows of x: every byte of the weights once.
 *
 * Owns: nothing.  Called by: matmul.cu, experts.cu.
 * Tested by: tests/gpu/check_ops.c
 *
 * A warp owns a tile of sixteen weight rows and every WK-th run of 256 columns of it. The runs are
 * whole stretches of memory (quant.cuh), fetched by bulk copies into a ring of the warp's own, so
 * that a warp waits for nobody but its own data and a whole ring is in flight while it computes, or
 * before the previous kernel has finished. Tensor-core tiles are used even for one row of x: sixteen
 * rows of weights need no shuffles to be summed.
 *
 * Arithmetic is in whole numbers: the codes of weights are bytes already, and unpacking them to
 * anything wider costs more instructions than the memory leaves time for. x is made of 16-bit whole
 * numbers, scaled for each run of 256 columns by its largest, as two signed bytes hi * 256 + lo.
 * Sums over 32 (or 16) columns are exact; scales enter in float32. So a product differs from that of
 * float32 activations by 2^-16 of the run's largest at most.
 *
 * x in shared memory, `columns` = 2 * rows:
 *   xs[run][8][column][32] bytes, in the order in which lanes hold weights
 *   sums[run][column][16]  sums of the bytes over sixteen columns, half precision (exact)
 *   scale[run][column]     float
 * With at most four rows ("split") row r has columns 2r (hi) and 2r + 1 (lo), and one product does
 * both; with five to eight the lo bytes stand in columns rows + r and take a second product.
 */
#ifndef OCTAVO_KERNELS_CUDA_GEMV_H
#define OCTAVO_KERNELS_CUDA_GEMV_H

#include "kernels/cuda/quant.cuh"

#define GV_WARPS   8
#define GV_THREADS (GV_WARPS * 32)
#define GV_RUN     256  /* columns of a run */
#define GV_SLOTS   5    /* most runs in flight per warp */
#define GV_RING    11264 /* bytes of a warp's ring: two runs of Q8_0, four of Q4_K or Q5_K */
#define GV_RING_SMALL 8704
#define GV_ROWS    8    /* of x */
#define GV_RECORD  592  /* bytes of one row of x over one run, see gv_stage */

/* Shared memory of a block, in order: rings, barriers, partial sums, then x. */
#define GV_BAR_BYTES (GV_WARPS * GV_SLOTS * 8)
#define GV_RED_BYTES (GV_WARPS * 32 * 16)
#define GV_SMEM      (112 * 1024) /* two blocks per multiprocessor of 228 KB */

static __host__ __device__ inline int gv_fixed(int ring) {
    return GV_WARPS * ring + GV_BAR_BYTES + GV_RED_BYTES;
}
/* x of one run: bytes, sums, scales. */
static __host__ __device__ inline int gv_run_x(int rows) {
    return (2 * rows * (256 + 32 + 4) + 15) / 16 * 16;
}

struct gv_plan {
    int ring; /* bytes of a warp's ring */
    int runs; /* of x staged at a time, by the most rows */
    int smem;
};

/* Shared memory for products of `cols` columns with up to `rows` rows of x. */
static inline struct gv_plan gv_plan(const struct kctx *c, int64_t cols, int rows) {
    struct gv_plan p;
    int limit = c->smem_block < GV_SMEM ? c->smem_block : GV_SMEM;
    int runs = (int)ceil_div(cols, GV_RUN);
    p.ring = gv_fixed(GV_RING) + runs * gv_run_x(rows) <= limit ? GV_RING : GV_RING_SMALL;
    p.runs = (limit - gv_fixed(p.ring)) / gv_run_x(rows);
    if (p.runs > runs) p.runs = runs;
    p.smem = gv_fixed(p.ring) + p.runs * gv_run_x(rows);
    return p;
}

/* Rows of x as bytes in the context's workspace at `offset` (bytes, a multiple of 256): row t of head h
 * is record row t * heads + h. Returns the end of what was written. matmul.cu */
size_t gv_quantize(struct kctx *c, size_t offset, const float *x, int64_t x_row, int64_t x_head,
                   int n_rows, int heads, int64_t cols);
static inline size_t gv_image_bytes(int64_t rows, int64_t cols) {
    return (size_t)rows * (size_t)ceil_div(cols, GV_RUN) * GV_RECORD;
}

#if defined(__CUDACC__)

struct gv_smem {
    uint32_t ring, bar; /* this warp's */
    const uint8_t *ring_ptr;
    int ring_bytes;
    float *red;
    uint8_t *x;         /* of the first staged run */
};

static __device__ __forceinline__ struct gv_smem gv_carve(uint8_t *smem, int ring) {
    struct gv_smem s;
    int warp = threadIdx.x >> 5;
    s.ring_ptr = smem + warp * ring;
    s.ring = smem_addr(s.ring_ptr);
    s.ring_bytes = ring;
    s.bar = smem_addr(smem + GV_WARPS * ring) + warp * GV_SLOTS * 8;
    s.red = (float *)(smem + GV_WARPS * ring + GV_BAR_BYTES);
    s.x = smem + gv_fixed(ring);
    return s;
}

/* A warp's ring of `slots` slots of `bytes`. */
struct gv_ring {
    int slots, bytes, put, take, in_flight;
    uint32_t phase; /* of the slot to be taken */
};

static __device__ __forceinline__ void gv_ring_init(const struct gv_smem &s, struct gv_ring *r,
                                                    int run_bytes) {
    if ((threadIdx.x & 31) == 0) {
        for (int i = 0; i < GV_SLOTS; i++) mbar_init(s.bar + 8 * i, 1);
        mbar_init_fence();
    }
    __syncwarp();
    r->bytes = run_bytes;
    r->slots = min(GV_SLOTS, s.ring_bytes / run_bytes);
    r->put = r->take = r->in_flight = 0;
    r->phase = 0;
}

static __device__ __forceinline__ void gv_issue(const struct gv_smem &s, struct gv_ring *r,
                                                const uint8_t *src, int bytes) {
    if ((threadIdx.x & 31) == 0) {
        mbar_expect(s.bar + 8 * r->put, bytes);
        bulk_load(s.ring + r->put * r->bytes, src, bytes, s.bar + 8 * r->put);
    }
    if (++r->put == r->slots) r->put = 0;
}

/* Waits for the oldest slot. */
static __device__ __forceinline__ const uint8_t *gv_take(const struct gv_smem &s,
                                                         struct gv_ring *r) {
    const uint8_t *slot = s.ring_ptr + r->take * r->bytes;
    mbar_wait(s.bar + 8 * r->take, r->phase);
    if (++r->take == r->slots) r->take = 0, r->phase ^= 1;
    return slot;
}

/* Four bytes, each the low byte of one of v. */
static __device__ __forceinline__ uint32_t pack_bytes(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}


/* x in global memory as bytes, made once per product by gv_quantize: a record per row and run of 256
 * hi bytes, 256 lo bytes, their sums over sixteen columns (32 + 32 bytes) and the scale. Row r of a
 * product is record row base + r * step, or list[r] / div. */
struct gv_x {
    const uint8_t *image;
    int runs;
    int base, step;
    const int32_t *list;
    int div;
};

/* Stages `n` runs from run0 on of `rows` rows of x, a warp one run of one row at a time, four of them
 * in flight. The caller synchronises before and after. Not inlined, and loops are rolled on purpose:
 * kernels of a step follow each other within microseconds, and code is fetched too. */
static __device__ __noinline__ void gv_stage(uint8_t *staged, struct gv_x from, int rows, int run0,
                                             int n) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int columns = 2 * rows, run_x = gv_run_x(rows), items = n * rows;
#pragma unroll 1
    for (int i0 = warp; i0 < items; i0 += 4 * GV_WARPS) {
        uint4 v[4], sum[4];
        float scale[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = i0 + j * GV_WARPS, row = i % rows, run = i / rows;
            if (i >= items) break;
            int at = from.list ? from.list[row] / from.div : from.base + row * from.step;
            const uint8_t *r = from.image + ((int64_t)at * from.runs + run0 + run) * GV_RECORD;
            v[j] = *(const uint4 *)(r + 16 * lane);
            if (lane < 4) sum[j] = *(const uint4 *)(r + 512 + 16 * lane);
            if (lane < 2) scale[j] = *(const float *)(r + 576);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = i0 + j * GV_WARPS, row = i % rows, run = i / rows;
            if (i >= items) break;
            int hi_at = rows <= 4 ? 2 * row : row, lo_at = rows <= 4 ? 2 * row + 1 : rows + row;
            uint8_t *x = staged + run * run_x;
            int column = lane < 16 ? hi_at : lo_at, piece = lane % 16;
            *(uint4 *)(x + (piece / 2 * columns + column) * 32 + piece % 2 * 16) = v[j];
            if (lane < 4)
                *(uint4 *)(x + columns * 256 + (lane < 2 ? hi_at : lo_at) * 32 + lane % 2 * 16) =
                    sum[j];
            if (lane < 2)
                ((float *)(x + columns * 288))[lane == 0 ? hi_at : lo_at] =
                    lane == 0 && rows <= 4 ? scale[j] * 256.f : scale[j];
        }
    }
}

/* c[16, 8] += a[16, 32] b[32, 8], signed bytes */
static __device__ __forceinline__ void mma_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* c[16, 8] += a[16, 16] b[16, 8] */
static __device__ __forceinline__ void mma_bytes_half(int (&c)[4], uint32_t a0, uint32_t a1,
                                                      uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
                 "{%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

/* part += (s0, s0, s1, s1) * products of `a` with hi (and lo) of x. HALF: 0, 1 the first or second
 * sixteen columns, 2 all 32. A sum below 2^22 becomes a float by starting from the bits of 1.5 * 2^23
 * and subtracting that number. */
template <bool SPLIT, int HALF>
static __device__ __forceinline__ void gv_products(float (&part)[4], const uint32_t (&a)[4],
                                                   uint2 hi, uint2 lo, float s0, float s1) {
    const int magic = SPLIT ? 0x4b400000 : 0;
    int c[4] = {magic, magic, magic, magic};
    float f[4];
    if constexpr (HALF == 2) mma_bytes(c, a, hi.x, hi.y);
    else mma_bytes_half(c, a[2 * HALF], a[2 * HALF + 1], HALF ? hi.y : hi.x);
    if constexpr (SPLIT) {
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = __int_as_float(c[i]) - 12582912.f;
    } else {
        int l[4] = {0, 0, 0, 0};
        if constexpr (HALF == 2) mma_bytes(l, a, lo.x, lo.y);
        else mma_bytes_half(l, a[2 * HALF], a[2 * HALF + 1], HALF ? lo.y : lo.x);
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = (float)(c[i] * 256 + l[i]);
    }
    part[0] += s0 * f[0], part[1] += s0 * f[1], part[2] += s1 * f[2], part[3] += s1 * f[3];
}

/* acc[16 rows, 8 columns] += one run of the tile (in slot) times x (of that run). Lane 4g + t:
 * acc[0], acc[1] row g and acc[2], acc[3] row g + 8, columns 2t, 2t + 1 (see gv_results). groups: 8,
 * or fewer at the end of a row of a 32-column type; what lies beyond in the slot is multiplied with
 * zeros, by a scale of zero. */
template <int TYPE, bool SPLIT>
static __device__ __forceinline__ void gv_run_of(float (&acc)[4], const uint8_t *slot,
                                                 const uint8_t *x, int rows, int groups) {
    using S = scales<TYPE>;
    constexpr bool wide = quant<TYPE>::cols == 256;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, columns = 2 * rows;
    bool have = SPLIT ? g < columns : g < rows;
    const uint8_t *xs = x + g * 32 + t * 8;
    const __half *sums = (const __half *)(x + columns * 256) + g * 16 + 4 * t;
    uint2 sum_hi = make_uint2(0, 0), sum_lo = make_uint2(0, 0);
    if constexpr (S::corrects) {
        if (have) sum_hi = *(const uint2 *)sums;
        if (!SPLIT && have) sum_lo = *(const uint2 *)(sums + rows * 16);
    }
    S sc;
    if constexpr (wide) sc.load(slot, lane);
    float part[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0}, low_l[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int b0 = 0; b0 < 8; b0 += 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int b = b0 + i;
            const uint8_t *cell = wide ? slot : slot + b * quant<TYPE>::bytes;
            uint32_t a[4];
            if constexpr (!wide) sc.load(cell, lane);
            code_bytes<TYPE>(cell, wide ? b : 0, lane, a);
            uint2 hi = make_uint2(0, 0), lo = hi;
            if (have) hi = *(const uint2 *)(xs + b * columns * 32);
            if (!SPLIT && have) lo = *(const uint2 *)(xs + (b * columns + rows) * 32);
            if constexpr (S::fine) {
                gv_products<SPLIT, 0>(part, a, hi, lo, sc.scale(0, b, 0), sc.scale(1, b, 0));
                gv_products<SPLIT, 1>(part, a, hi, lo, sc.scale(0, b, 1), sc.scale(1, b, 1));
            } else {
                bool valid = wide || b < groups;
                gv_products<SPLIT, 2>(part, a, hi, lo, valid ? sc.scale(0, b, 0) : 0.f,
                                      valid ? sc.scale(1, b, 0) : 0.f);
            }
            if constexpr (S::corrects && !wide) {
                bool mine = t == i && b < groups;
                uint32_t p0 = mine ? sc.low_pair(0) : 0, p1 = mine ? sc.low_pair(1) : 0;
                bool front = b0 == 0;
                mma16816(low, front ? p0 : 0, front ? p1 : 0, front ? 0 : p0, front ? 0 : p1,
                         sum_hi.x, sum_hi.y);
                if (!SPLIT)
                    mma16816(low_l, front ? p0 : 0, front ? p1 : 0, front ? 0 : p0,
                             front ? 0 : p1, sum_lo.x, sum_lo.y);
            }
        }
    }
    if constexpr (S::corrects) {
        float f0 = S::low_pair_factor(), f1 = f0;
        if constexpr (wide) {
            uint32_t a[4];
            sc.low_operand(t, a);
            mma16816(low, a[0], a[1], a[2], a[3], sum_hi.x, sum_hi.y);
            if (!SPLIT) mma16816(low_l, a[0], a[1], a[2], a[3], sum_lo.x, sum_lo.y);
            f0 = sc.low_factor(0), f1 = sc.low_factor(1);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!SPLIT) low[i] = low[i] * 256.f + low_l[i];
            part[i] -= (i < 2 ? f0 : f1) * low[i];
        }
    }
    /* lanes whose columns are beyond the last take some other scale for their zeros */
    const float *scale = (const float *)(x + columns * 288);
    float x0 = scale[min(2 * t, columns - 1)], x1 = scale[min(2 * t + 1, columns - 1)];
    acc[0] += x0 * part[0], acc[1] += x1 * part[1], acc[2] += x0 * part[2], acc[3] += x1 * part[3];
}

static __device__ __forceinline__ void gv_run(int type, float (&acc)[4], const uint8_t *slot,
                                              const uint8_t *x, int rows, int groups) {
    if (rows <= 4) {
        switch (type) {
#define X(t)                                                                                       \
    case t: gv_run_of<t, true>(acc, slot, x, rows, groups); break;
            QUANT_TYPES(X)
#undef X
        }
    } else {
        switch (type) {
#define X(t)                                                                                       \
    case t: gv_run_of<t, false>(acc, slot, x, rows, groups); break;
            QUANT_TYPES(X)
#undef X
        }
    }
}

/* A packed matrix as the products see it. */
struct gv_mat {
    int type, run_stride, cell_cols, cell_bytes;
};

static inline struct gv_mat gv_mat(int type) {
    struct cell_shape s = cell_shape(type);
    struct gv_mat m = {type, 0, s.cols, s.bytes};
    if (s.cols) m.run_stride = GV_RUN / s.cols * s.bytes;
    return m;
}

/* Bytes of run `run` of a tile whose rows have `cols` columns. */
static __device__ __forceinline__ int gv_bytes(const struct gv_mat &m, int cols, int run) {
    int left = cols - run * GV_RUN;
    return left >= GV_RUN ? m.run_stride : left / m.cell_cols * m.cell_bytes;
}

/* Calls f(row 0..15, row of x, value) for this lane's results. */
template <typename F>
static __device__ __forceinline__ void gv_results(const float (&acc)[4], int rows, F f) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    if (rows <= 4) {
        if (t < rows) {
            f(g, t, acc[0] + acc[1]);
            f(g + 8, t, acc[2] + acc[3]);
        }
    } else {
        for (int i = 0; i < 2; i++)
            if (2 * t + i < rows) {
                f(g, 2 * t + i, acc[i]);
                f(g + 8, 2 * t + i, acc[2 + i]);
            }
    }
}

#endif /* __CUDACC__ */
#endif
