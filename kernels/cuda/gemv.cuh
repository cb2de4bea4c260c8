/* kernels/cuda/gemv.cuh: products with at most eight rows of x: every byte of the weights once.
 *
 * Owns: nothing.  Called by: gemv.cu, experts_few.cu, experts_one.cu, and whoever makes x (norm,
 * attn_prep).  Tested by: tests/gpu/check_ops.c
 *
 * A warp owns a tile of sixteen weight rows and every WK-th run of 256 columns of it. The runs are
 * whole stretches of memory (quant.cuh), fetched by bulk copies into a ring of the warp's own, so
 * that a warp waits for nobody but its own data and a whole ring is in flight while it computes, or
 * before the previous kernel has finished. The arithmetic of one run is in gemv_run.cuh.
 *
 * x is made of 16-bit whole numbers, scaled for each run of 256 columns by its largest, as two
 * signed bytes hi * 256 + lo; a product differs from that of float32 activations by 2^-16 of the
 * run's largest at most. One row of x over one run is a record of GV_RECORD bytes:
 *   hi[256], lo[256]      in the order in which lanes hold weights: 32 columns are four pieces of 8
 *                         bytes, piece t has columns 4t..4t+3 and 16+4t..16+4t+3
 *   halves hi[16], lo[16] sums of the bytes over sixteen columns, half precision (exact); sixteens
 *                         2t, 2t+1, 2t+8, 2t+9 lie together
 *   sums[16]              int32: hi * 256 + lo summed over sixteen columns, in order
 *   scale                 float
 * Records stand in global memory ("image": whoever makes x writes them) and in shared memory alike,
 * the runs of a row one after the other.
 */
#ifndef OCTAVO_KERNELS_CUDA_GEMV_H
#define OCTAVO_KERNELS_CUDA_GEMV_H

#include "kernels/cuda/quant.cuh"

#define GV_RUN    256 /* columns of a run */
#define GV_SLOTS  8   /* most runs in flight per warp */
#define GV_ROWS   8   /* of x */
#define GV_RECORD 672 /* so that records of eight rows stand in different banks, see gv_x_row */
#define GV_LO     256
#define GV_HALVES 512
#define GV_SUMS   576
#define GV_SCALE  640

/* Shared memory of a block, in order: rings, barriers, partial sums, then x. */
static __host__ __device__ inline int gv_bar_bytes(int warps) {
    return warps * GV_SLOTS * 8 + 16;
}
static __host__ __device__ inline int gv_fixed(int warps, int ring) {
    return warps * ring + gv_bar_bytes(warps) + warps * 32 * 16;
}
/* Bytes from one row of x to the next, of `runs` records each. */
static __host__ __device__ inline int gv_x_row(int runs) {
    return (runs * GV_RECORD - 32 + 127) / 128 * 128 + 32;
}

struct gv_plan {
    int ring;  /* bytes of a warp's ring */
    int stage; /* runs of x that a buffer holds; all of them when it is not less than their number
                */
    int smem;
};

/* Shared memory of at most `limit` bytes for a block of `warps`: a ring of up to `want` runs of
 * run_bytes, and x of `runs` runs, resident if that fits beside one run, else in two buffers. */
static inline struct gv_plan gv_plan(int limit, int warps, int run_bytes, int want, int runs,
                                     int rows) {
    struct gv_plan p;
    int slots = want < 1 ? 1 : want > GV_SLOTS ? GV_SLOTS : want, all = rows * gv_x_row(runs);
    while (slots > 1 && gv_fixed(warps, slots * run_bytes) + all > limit) slots--;
    p.stage = runs;
    if (gv_fixed(warps, slots * run_bytes) + all > limit) {
        int left = limit - gv_fixed(warps, run_bytes);
        p.stage = 1;
        while (2 * rows * gv_x_row(p.stage + 1) <= left) p.stage++;
        all = 2 * rows * gv_x_row(p.stage);
    }
    p.ring = slots * run_bytes;
    p.smem = gv_fixed(warps, p.ring) + all;
    return p;
}

/* Rows of x as records in the context's workspace at `offset` (bytes, a multiple of 256): row t of
 * head h is record row t * heads + h. Returns the end of what was written. gemv.cu */
size_t gv_quantize(struct kctx *c, size_t offset, const float *x, int64_t x_row, int64_t x_head,
                   int n_rows, int heads, int64_t cols);
static inline size_t gv_image_bytes(int64_t rows, int64_t cols) {
    return (size_t)rows * (size_t)ceil_div(cols, GV_RUN) * GV_RECORD;
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

#if defined(__CUDACC__)

/* ---- shared memory and rings ---------------------------------------------------------------- */

struct gv_smem {
    uint32_t ring, bar; /* this warp's */
    uint32_t x_bar;     /* two, the block's */
    const uint8_t *ring_ptr;
    int ring_bytes;
    float4 *red;
    uint8_t *x;
};

static __device__ __forceinline__ struct gv_smem gv_carve(uint8_t *smem, int warps, int ring) {
    struct gv_smem s;
    int warp = threadIdx.x >> 5;
    s.ring_ptr = smem + warp * ring;
    s.ring = smem_addr(s.ring_ptr);
    s.ring_bytes = ring;
    s.bar = smem_addr(smem + warps * ring) + warp * GV_SLOTS * 8;
    s.x_bar = smem_addr(smem + warps * ring) + warps * GV_SLOTS * 8;
    s.red = (float4 *)(smem + warps * ring + gv_bar_bytes(warps));
    s.x = smem + gv_fixed(warps, ring);
    return s;
}

/* A warp's ring of `slots` slots of `bytes`. */
struct gv_ring {
    int slots, bytes, put, take;
    uint32_t phase; /* of the slot to be taken */
};

/* The caller synchronises the block before anybody waits for x. */
static __device__ __forceinline__ void gv_ring_init(const struct gv_smem &s, struct gv_ring *r,
                                                    int run_bytes) {
    if (threadIdx.x == 0) {
        mbar_init(s.x_bar, 1);
        mbar_init(s.x_bar + 8, 1);
    }
    if ((threadIdx.x & 31) == 0) {
        for (int i = 0; i < GV_SLOTS; i++) mbar_init(s.bar + 8 * i, 1);
        mbar_init_fence();
    }
    __syncwarp();
    r->bytes = run_bytes;
    r->slots = min(GV_SLOTS, s.ring_bytes / run_bytes);
    r->put = r->take = 0;
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

/* Bytes of run `run` of a tile whose rows have `cols` columns. */
static __device__ __forceinline__ int gv_bytes(const struct gv_mat &m, int cols, int run) {
    int left = cols - run * GV_RUN;
    return left >= GV_RUN ? m.run_stride : left / m.cell_cols * m.cell_bytes;
}

/* ---- x --------------------------------------------------------------------------------------- */

/* Rows of x in an image: row r of a product is record row base + r * step, or list[r] / div. */
struct gv_x {
    const uint8_t *image;
    int runs;
    int base, step;
    const int32_t *list;
    int div;
};

/* Requests `n` runs from run0 on of `rows` (at most 32) rows into buffer 0 or 1; by the first warp.
 * Everybody then waits for the barrier of that buffer. */
static __device__ __forceinline__ void gv_x_request(const struct gv_smem &s, struct gv_x from,
                                                    int rows, int run0, int n, int buffer,
                                                    int buffer_bytes, int row_bytes) {
    if (threadIdx.x >= 32) return;
    uint32_t bar = s.x_bar + 8 * buffer;
    int row = threadIdx.x;
    if (row == 0) mbar_expect(bar, (uint32_t)(rows * n * GV_RECORD));
    __syncwarp();
    if (row >= rows) return;
    int64_t at = from.list ? from.list[row] / from.div : from.base + row * from.step;
    bulk_load(smem_addr(s.x) + buffer * buffer_bytes + row * row_bytes,
              from.image + (at * from.runs + run0) * GV_RECORD, n * GV_RECORD, bar);
}

/* Four bytes, each the low byte of one of v. */
static __device__ __forceinline__ uint32_t pack_bytes(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

/* Writes the record r of 256 values, by a warp: v are columns 4t..4t+3 and 16+4t..16+4t+3 of the 32
 * columns b = lane / 4, t = lane % 4. */
static __device__ __forceinline__ void gv_record(uint8_t *r, const float (&v)[8]) {
    int lane = threadIdx.x & 31, b = lane >> 2, t = lane & 3;
    float most = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(v[j]));
    most = warp_max(most);
    float inverse = most > 0 ? 32512.f / most : 0.f;
    int hi[8], lo[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int q = __float2int_rn(v[j] * inverse);
        hi[j] = (q + 128) >> 8;
        lo[j] = q - 256 * hi[j];
    }
    uint2 h =
        make_uint2(pack_bytes(hi[0], hi[1], hi[2], hi[3]), pack_bytes(hi[4], hi[5], hi[6], hi[7]));
    uint2 l =
        make_uint2(pack_bytes(lo[0], lo[1], lo[2], lo[3]), pack_bytes(lo[4], lo[5], lo[6], lo[7]));
    *(uint2 *)(r + b * 32 + t * 8) = h;
    *(uint2 *)(r + GV_LO + b * 32 + t * 8) = l;
    int sum[4] = {__dp4a((int)h.x, 0x01010101, 0), __dp4a((int)h.y, 0x01010101, 0),
                  __dp4a((int)l.x, 0x01010101, 0), __dp4a((int)l.y, 0x01010101, 0)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        sum[j] += __shfl_xor_sync(~0u, sum[j], 1);
        sum[j] += __shfl_xor_sync(~0u, sum[j], 2);
    }
    /* thread t writes one of the group's four sums of bytes, the first two the whole ones too */
    int mine = t == 0 ? sum[0] : t == 1 ? sum[1] : t == 2 ? sum[2] : sum[3];
    int q = 2 * b + t % 2, at = q % 8 / 2 * 4 + q / 8 * 2 + q % 2;
    ((__half *)(r + GV_HALVES + (t < 2 ? 0 : 32)))[at] = __int2half_rn(mine);
    if (t < 2) ((int *)(r + GV_SUMS))[q] = mine * 256 + (t == 0 ? sum[2] : sum[3]);
    if (lane == 0) *(float *)(r + GV_SCALE) = most / 32512.f;
}

/* Records of one row, by the whole block: load(k) gives columns k..k + 3. The caller synchronises.
 */
template <typename F>
static __device__ __forceinline__ void gv_make(uint8_t *x, int cols, int warps, F load) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, at = lane / 4 * 32 + lane % 4 * 4;
    for (int run = warp; run * GV_RUN < cols; run += warps) {
        int k = run * GV_RUN + at;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (k < cols) {
            float4 e = load(k), f = load(k + 16);
            v[0] = e.x, v[1] = e.y, v[2] = e.z, v[3] = e.w;
            v[4] = f.x, v[5] = f.y, v[6] = f.z, v[7] = f.w;
        }
        gv_record(x + run * GV_RECORD, v);
    }
}

#endif /* __CUDACC__ */
#endif
