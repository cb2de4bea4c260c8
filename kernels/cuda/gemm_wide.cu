/* kernels/cuda/gemm_wide.cu: products with many rows of x by Hopper's warpgroup instructions.
 *
 * Owns: nothing.  Called by: gemm.cu, experts_many.cu.  Fails how: a CUDA error ends the process.
 * Limits: the types of unpack.cuh, chips of compute capability 9.0; others go through gemm.cu.
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * A block multiplies 256 weight rows by up to 128 rows of x: two warpgroups of 128 weight rows each
 * unpack quantised weights into the registers of operand A, once for all rows of x, while the
 * tensor cores are busy with what was unpacked before; a third group only fetches: weights as they
 * lie in memory, x as it was converted, both by bulk copies through rings. Blocks stay for the
 * whole product and take tile after tile, so the next tile's bytes arrive while the last one's
 * results are written. The width of a tile is that of its segment, rounded up to sixteen: experts
 * of 64 rows pay for 64.
 *
 * Converted x: for each 64 columns, all rows, 128 bytes each with their 16-byte chunks swizzled by
 * the row as wgmma wants it: eight rows or more from a multiple of eight are one copy. Within
 * sixteen columns the even ones stand first (unpack.cuh).
 */
#include <algorithm>

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/unpack.cuh"
#include "kernels/cuda/wgmma.cuh"

#define WARPS    16 /* that multiply, a tile of sixteen weight rows each: four groups of four */
#define X_STEP   64 /* columns of x per stage */
#define X_STAGE  (GEMM_COLS * X_STEP * 2)
#define W_STAGES 4
#define RUN      256            /* columns of weights per stage */
#define X_STAGES (RUN / X_STEP) /* so that a stage's place is known to the compiler */
#define THREADS  (WARPS * 32 + 128)
/* Registers of a thread: what the block starts with (96 each) goes from those that fetch to those
 * that multiply; not one more is there. */
#define MULTIPLIES 112
#define FETCHES    32
#define BARRIERS   256 /* bytes */
#define TRADE      16  /* sums of a lane that change hands at a time */
#define TRADED     (WARPS / 2 * TRADE * 32 * 4)

struct wide_args {
    struct {
        const uint8_t *w;
        float *y;
        int64_t y_row;
        int n_rows, first; /* rows; number of its first block of rows */
    } mat[GEMM_JOBS];
    int n_mats, row_blocks; /* of all matrices together */
    const uint8_t *w2;      /* half of a block's rows are of w2: y = silu(w x) * (w2 x) */
    int64_t w_mat, y_head;
    int tile0, cols; /* first tile of weight rows */
    const uint8_t *x;
    int64_t x_head;        /* bytes */
    int x_rows;            /* rows there is room for: x's 64-column blocks are x_rows * 128 apart */
    int n_x, width, heads; /* not grouped: rows of x and of a tile */
    int w_stages;
    const int32_t *seg, *list;
    uint32_t magic; /* see unpack.cuh */
};

bool cuda_wide_takes(const struct kctx *c, int type) {
    return c->prop.major == 9 && unpack_takes(type);
}

/* ---- x ----------------------------------------------------------------------------------------
 */

static int64_t steps_of(int64_t cols) {
    return ceil_div(cols, X_STEP);
}
static int64_t rows_room(int64_t rows) {
    return ceil_div(rows, 8) * 8;
}

size_t cuda_wide_x_bytes(int64_t rows, int heads, int64_t cols) {
    return (size_t)(rows_room(rows) * heads * steps_of(cols) * X_STEP * 2);
}

struct wide_convert {
    uint8_t *to;
    const float *x;
    int64_t x_row, x_head;
    int rows, heads, cols, room, parts; /* parts: sixteens of columns, padding included */
    const int32_t *seg, *list; /* row i is row list[i] / x_div, and there are as many as seg says */
    int x_div;
};

/* A thread per sixteen columns of a row: the even ones, then the odd ones. */
static __global__ void __launch_bounds__(256)
    wide_convert_kernel(const __grid_constant__ struct wide_convert a) {
    gdc_trigger();
    gdc_wait();
    int i = threadIdx.x / 4 + blockIdx.x * 64, part = blockIdx.y * 4 + threadIdx.x % 4;
    int head = blockIdx.z, row = i, rows = a.rows;
    if (a.seg) {
        const int32_t *last = a.seg + 1 + 3 * (a.seg[0] - 1);
        rows = a.seg[0] > 0 ? last[1] + (last[2] + 7) / 8 * 8 : 0;
        if (i < rows) row = a.list[i] < 0 ? -1 : a.list[i] / a.x_div;
    }
    if (i >= rows) return;
    uint32_t even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
    if (row >= 0 && part * 16 < a.cols) {
        const float *src = a.x + row * a.x_row + head * a.x_head + part * 16;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float4 v = load_float4(src + 4 * k);
            even[k] = pack_half2(x_clamp(v.x), x_clamp(v.z));
            odd[k] = pack_half2(x_clamp(v.y), x_clamp(v.w));
        }
    }
    uint8_t *to = a.to + (((int64_t)head * a.parts / 4 + part / 4) * a.room + i) * 128;
    int chunk = part % 4 * 2;
    *(uint4 *)(to + ((chunk ^ (i & 7)) * 16)) = make_uint4(even[0], even[1], even[2], even[3]);
    *(uint4 *)(to + (((chunk + 1) ^ (i & 7)) * 16)) = make_uint4(odd[0], odd[1], odd[2], odd[3]);
}

static void convert(struct kctx *c, struct wide_convert *a) {
    a->parts = (int)(steps_of(a->cols) * 4);
    launch(c, wide_convert_kernel,
           dim3((unsigned)ceil_div(a->rows, 64), (unsigned)a->parts / 4, (unsigned)a->heads), 256,
           0, *a);
}

/* ---- the product --------------------------------------------------------------------------------
 */

template <int TYPE> static constexpr __host__ __device__ int run_bytes(void) {
    return RUN / quant<TYPE>::cols * quant<TYPE>::bytes; /* of one tile */
}

#ifdef WG_HERE

/* Where a tile of the product is. */
struct wide_place {
    int job, head, matrix, rows; /* rows: number of its block of rows in the matrix */
    int x0, n;                   /* rows of x */
};

static __device__ __forceinline__ int wide_tiles(const struct wide_args &a) {
    return a.seg ? a.seg[0] * a.row_blocks
                 : a.heads * a.row_blocks * ((a.n_x + a.width - 1) / a.width);
}

static __device__ __forceinline__ struct wide_place wide_place(const struct wide_args &a, int at) {
    struct wide_place p = {0, 0, 0, 0, 0, 0};
    if (a.seg) {
        const int32_t *seg = a.seg + 1 + 3 * (at / a.row_blocks);
        p.rows = at % a.row_blocks, p.matrix = seg[0], p.x0 = seg[1], p.n = seg[2];
        return p;
    }
    int across = (a.n_x + a.width - 1) / a.width;
    p.x0 = at % across * a.width, p.n = min(a.width, a.n_x - p.x0);
    at /= across;
    p.rows = at % a.row_blocks, p.head = p.matrix = at / a.row_blocks;
    while (p.job + 1 < a.n_mats && p.rows >= a.mat[p.job + 1].first) p.job++;
    p.rows -= a.mat[p.job].first;
    return p;
}

/* A ring of stages: the barriers of the full ones, then of the empty ones. */
struct wide_ring {
    uint32_t data, full, stages, at, parity;
    __device__ __forceinline__ uint32_t bar_full(void) const { return full + 8 * at; }
    __device__ __forceinline__ uint32_t bar_empty(void) const { return full + 8 * (stages + at); }
    __device__ __forceinline__ void step(void) {
        if (++at == stages) at = 0, parity ^= 1;
    }
};

/* x's ring, walked through once per run of weights. */
struct x_ring {
    uint32_t data, full, parity;
};

static __device__ __forceinline__ void ring_init(uint32_t full, uint32_t stages) {
    for (uint32_t i = 0; i < stages; i++) {
        mbar_init(full + 8 * i, 1);
        mbar_init(full + 8 * (stages + i), WARPS);
    }
}

/* One warp: weights of all tiles of this block, a lane to a tile of sixteen rows. */
template <int TYPE, bool PAIR>
static __device__ __forceinline__ void fetch_weights(const struct wide_args &a,
                                                     struct wide_ring r) {
    constexpr int RB = run_bytes<TYPE>();
    int lane = threadIdx.x & 31, runs = (a.cols + RUN - 1) / RUN;
    int64_t tile_bytes = (int64_t)(a.cols / quant<TYPE>::cols) * quant<TYPE>::bytes;
    for (int at = blockIdx.x; at < wide_tiles(a); at += gridDim.x) {
        struct wide_place p = wide_place(a, at);
        int tiles = (a.mat[p.job].n_rows + 15) / 16;
        int tile = PAIR ? p.rows * (WARPS / 2) + lane % (WARPS / 2) : p.rows * WARPS + lane;
        const uint8_t *w = PAIR && lane >= WARPS / 2 ? a.w2 : a.mat[p.job].w;
        w += p.matrix * a.w_mat + (a.tile0 + min(tile, tiles - 1)) * tile_bytes;
        for (int run = 0; run < runs; run++) {
            int bytes = min(RUN, a.cols - run * RUN) / quant<TYPE>::cols * quant<TYPE>::bytes;
            mbar_wait(r.bar_empty(), r.parity ^ 1);
            if (lane == 0) mbar_expect(r.bar_full(), WARPS * bytes);
            __syncwarp();
            if (lane < WARPS)
                bulk_load(r.data + (r.at * WARPS + lane) * RB, w + (int64_t)run * RB, bytes,
                          r.bar_full());
            r.step();
        }
    }
}

/* One thread: rows of x, RUN columns at a time; what lies past the last column is an empty stage.
 */
static __device__ __forceinline__ void fetch_x(const struct wide_args &a, const struct x_ring &x) {
    uint32_t parity = 1;
    for (int at = blockIdx.x; at < wide_tiles(a); at += gridDim.x) {
        struct wide_place p = wide_place(a, at);
        const uint8_t *src = a.x + p.head * a.x_head + (int64_t)p.x0 * 128;
        int bytes = (p.n + 7) / 8 * 8 * 128;
        for (int left = a.cols; left > 0; left -= RUN, parity ^= 1)
            for (int s = 0; s < X_STAGES; s++) {
                mbar_wait(x.full + 8 * (X_STAGES + s), parity);
                if (left <= s * X_STEP) {
                    mbar_arrive(x.full + 8 * s);
                    continue;
                }
                mbar_expect(x.full + 8 * s, bytes);
                bulk_load(x.data + s * X_STAGE, src, bytes, x.full + 8 * s);
                src += (int64_t)a.x_rows * 128;
            }
    }
}

/* Sixteen rows of each warp by 64 columns times N rows of x, begun. */
template <int N>
static __device__ __forceinline__ void products(float (&acc)[GEMM_COLS / 2],
                                                const uint32_t (&op)[2][8], uint64_t b) {
    wg_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wg_product<N>::add(acc, &op[k / 2][k % 2 * 4], b + 2 * k);
    wg_commit();
}

/* One stage of x: its columns are columns 64 s .. 64 s + 63 of the weights at `cell`, of which
 * `left` are real. */
template <int TYPE, int N>
static __device__ __forceinline__ void step(const struct wide_args &a, const uint8_t *cell,
                                            const struct cell_scales<TYPE> &sc, int s, int left,
                                            const struct x_ring &x, float (&acc)[GEMM_COLS / 2]) {
    int lane = threadIdx.x & 31;
    uint32_t op[2][8];
    if constexpr (quant<TYPE>::cols == 256) {
        __half2 by[2][4], less[2][4];
        uint32_t bits = 0;
        sc.of(0, s, by[0], less[0]);
        sc.of(1, s, by[1], less[1]);
        if constexpr (TYPE == KT_Q5_K)
            bits = *(const uint32_t *)(cell + 8 * 256 + s * 128 + lane * 4);
#pragma unroll
        for (int h = 0; h < 2; h++)
            unpack_group<TYPE>(cell, s, h, lane, a.magic, bits, by, less, op[h]);
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++)
            unpack_q8(cell + (2 * s + h) * quant<TYPE>::bytes, lane, left > 32 * h, op[h]);
    }
    mbar_wait(x.full + 8 * s, x.parity);
    products<N>(acc, op, wg_tile(x.data + s * X_STAGE));
    wg_wait<0>();
    if (lane == 0) mbar_arrive(x.full + 8 * (X_STAGES + s));
}

/* One warp's sixteen rows times N rows of x. While a group of warps waits for its products of 64
 * columns, the others unpack: four groups keep the tensor cores busy. */
template <int TYPE, int N>
static __device__ __forceinline__ void multiply(const struct wide_args &a, const uint8_t *w_data,
                                                struct wide_ring &w, struct x_ring &x,
                                                float (&acc)[GEMM_COLS / 2]) {
    constexpr int RB = run_bytes<TYPE>();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int left = a.cols; left > 0; left -= RUN) {
        mbar_wait(w.bar_full(), w.parity);
        const uint8_t *cell = w_data + (w.at * WARPS + warp) * RB;
        struct cell_scales<TYPE> sc;
        sc.load(cell, lane);
#pragma unroll
        for (int s = 0; s < X_STAGES; s++) {
            if (quant<TYPE>::cols == 256 || left > s * X_STEP) {
                step<TYPE, N>(a, cell, sc, s, left - s * X_STEP, x, acc);
            } else {
                mbar_wait(x.full + 8 * s, x.parity);
                if (lane == 0) mbar_arrive(x.full + 8 * (X_STAGES + s));
            }
        }
        x.parity ^= 1;
        __syncwarp();
        if (lane == 0) mbar_arrive(w.bar_empty());
        w.step();
    }
}

/* silu(g) * u; exact to some units of the last place of float. */
static __device__ __forceinline__ float gated(float g, float u) {
    return __fdividef(g, 1.f + __expf(-g)) * u;
}

/* Both warps of a pair hold the same places of their two matrices; the upper one's sums go to the
 * lower one through shared memory, TRADE at a time, and are multiplied there. */
static __device__ __forceinline__ void trade(float (&acc)[GEMM_COLS / 2], int n, float *shelf) {
    constexpr float unscale = X_UNSCALE / UNPACK_SCALE;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = warp % (WARPS / 2);
    bool upper = warp >= WARPS / 2;
    float *place = shelf + pair * TRADE * 32 + lane;
#pragma unroll
    for (int k = 0; k < GEMM_COLS / 2; k += TRADE) {
        if (k * 2 >= n) break;
        if (upper) {
#pragma unroll
            for (int i = 0; i < TRADE; i++) place[i * 32] = acc[k + i];
        }
        asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
        if (!upper) {
#pragma unroll
            for (int i = 0; i < TRADE; i++)
                acc[k + i] = gated(acc[k + i] * unscale, place[i * 32] * unscale);
        }
        asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
    }
}

template <bool PAIR>
static __device__ __forceinline__ void write_tile(const struct wide_args &a, int at,
                                                  float (&acc)[GEMM_COLS / 2], float *shelf) {
    constexpr float unscale = PAIR ? 1.f : X_UNSCALE / UNPACK_SCALE;
    struct wide_place p = wide_place(a, at);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    if (PAIR) trade(acc, p.n, shelf);
    if (PAIR && warp >= WARPS / 2) return;
    int row = (p.rows * (PAIR ? WARPS / 2 : WARPS) + warp) * 16 + g;
    int left = a.mat[p.job].n_rows - row; /* of the matrix from this lane's first row on */
    float *out = a.mat[p.job].y + p.head * a.y_head + row;
#pragma unroll
    for (int j = 0; j < GEMM_COLS / 4; j++) {
        int col = j / 2 * 8 + 2 * t + j % 2, k = j / 2 * 4 + j % 2;
        if (col >= p.n) continue;
        float *y = out + (a.seg ? a.list[p.x0 + col] : p.x0 + col) * a.mat[p.job].y_row;
        if (left > 0) y[0] = acc[k] * unscale;
        if (left > 8) y[8] = acc[k + 2] * unscale;
    }
}

#endif /* WG_HERE */

template <int TYPE, bool PAIR>
static __global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ struct wide_args a) {
#ifdef WG_HERE
    extern __shared__ __align__(1024) uint8_t smem[];
    uint8_t *w_data = smem + X_STAGES * X_STAGE;
    struct wide_ring w = {smem_addr(w_data), 0, (uint32_t)a.w_stages, 0, 0};
    struct x_ring x = {smem_addr(smem), w.data + a.w_stages * WARPS * run_bytes<TYPE>(), 0};
    w.full = x.full + 16 * X_STAGES;
    float *shelf = (float *)(w_data + a.w_stages * WARPS * run_bytes<TYPE>() + BARRIERS);
    int warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) {
        ring_init(x.full, X_STAGES);
        ring_init(w.full, w.stages);
        mbar_init_fence();
    }
    __syncthreads();
    gdc_trigger();
    gdc_wait();
    if (warp >= WARPS) {
        wg_fewer_registers<FETCHES>();
        if (warp == WARPS)
            fetch_weights<TYPE, PAIR>(a, w);
        else if (threadIdx.x == (WARPS + 1) * 32)
            fetch_x(a, x);
    } else {
        wg_more_registers<MULTIPLIES>();
        for (int at = blockIdx.x; at < wide_tiles(a); at += gridDim.x) {
            float acc[GEMM_COLS / 2];
#pragma unroll
            for (int k = 0; k < GEMM_COLS / 2; k++) acc[k] = 0;
            switch ((wide_place(a, at).n + 15) / 16) {
            case 1:
            case 2:
                multiply<TYPE, 32>(a, w_data, w, x, acc);
                break;
            case 3:
                multiply<TYPE, 48>(a, w_data, w, x, acc);
                break;
            case 4:
                multiply<TYPE, 64>(a, w_data, w, x, acc);
                break;
            case 5:
                multiply<TYPE, 80>(a, w_data, w, x, acc);
                break;
            case 6:
                multiply<TYPE, 96>(a, w_data, w, x, acc);
                break;
            case 7:
                multiply<TYPE, 112>(a, w_data, w, x, acc);
                break;
            default:
                multiply<TYPE, 128>(a, w_data, w, x, acc);
            }
            write_tile<PAIR>(a, at, acc, shelf);
        }
    }
#else
    __trap(); /* an image for 90 instead of 90a; no other chip comes here */
#endif
}

/* ---- launching ----------------------------------------------------------------------------------
 */

template <int TYPE> static void wide_launch(struct kctx *c, struct wide_args *a, int64_t tiles) {
    int w_stage = WARPS * run_bytes<TYPE>(), room = c->smem_block - BARRIERS - (a->w2 ? TRADED : 0);
    a->w_stages = std::min(W_STAGES, (room - X_STAGES * X_STAGE) / w_stage);
    a->magic = 0x64006400;
    launch(c, a->w2 ? wide_kernel<TYPE, true> : wide_kernel<TYPE, false>,
           (unsigned)std::min<int64_t>(tiles, c->sms), THREADS, (size_t)c->smem_block, *a);
}

static void wide_dispatch(struct kctx *c, struct wide_args *a, int type, int64_t tiles) {
    switch (type) {
    case KT_Q8_0:
        wide_launch<KT_Q8_0>(c, a, tiles);
        break;
    case KT_Q4_K:
        wide_launch<KT_Q4_K>(c, a, tiles);
        break;
    case KT_Q5_K:
        wide_launch<KT_Q5_K>(c, a, tiles);
        break;
    case KT_Q6_K:
        wide_launch<KT_Q6_K>(c, a, tiles);
        break;
    default:
        CU_REQUIRE(!"a type that unpack.cuh knows");
    }
}

/* Rows of x per tile: what makes the least of (turns of the chip) x (time of a tile); below about
 * 48 rows unpacking takes the time. */
static int wide_width(const struct kctx *c, int64_t row_blocks, int n_x) {
    int best = GEMM_COLS;
    int64_t least = INT64_MAX;
    for (int parts = (int)ceil_div(n_x, GEMM_COLS); parts <= (int)ceil_div(n_x, 32); parts++) {
        int width = (int)ceil_div(ceil_div(n_x, parts), 8) * 8;
        int64_t turns = ceil_div(row_blocks * ceil_div(n_x, width), c->sms);
        int64_t cost = turns * (std::max(width, 48) + 16);
        if (cost < least) least = cost, best = width;
    }
    return best;
}

void cuda_wide_gemm(struct kctx *c, const struct gemm_job *j, int n_jobs, bool x_same) {
    struct wide_args a = {};
    CU_REQUIRE(n_jobs <= GEMM_JOBS);
    uint8_t *x = (uint8_t *)cuda_work(c, cuda_wide_x_bytes(j->n_rows, j->heads, j->cols));
    a.x = x, a.x_rows = (int)rows_room(j->n_rows), a.cols = j->cols, a.heads = j->heads;
    a.x_head = steps_of(j->cols) * a.x_rows * 128;
    if (!x_same) {
        struct wide_convert v = {x,       j->x,     j->x_row, j->x_head, j->n_rows, j->heads,
                                 j->cols, a.x_rows, 0,        NULL,      NULL,      1};
        convert(c, &v);
    }
    for (int i = 0; i < n_jobs; i++) {
        a.mat[i] = {j[i].w, j[i].y, j[i].y_row, j[i].rows, a.row_blocks};
        a.row_blocks += (int)ceil_div(j[i].rows, WARPS * 16);
    }
    a.n_mats = n_jobs, a.w_mat = j->w_head, a.y_head = j->y_head, a.n_x = j->n_rows;
    int64_t blocks = (int64_t)a.row_blocks * j->heads;
    a.width = wide_width(c, blocks, a.n_x);
    wide_dispatch(c, &a, j->type, blocks * ceil_div(a.n_x, a.width));
}

void cuda_wide_grouped(struct kctx *c, const struct gemm_groups *g) {
    struct wide_args a = {};
    a.x = (const uint8_t *)g->xh, a.x_rows = (int)rows_room(g->list_max), a.cols = g->cols,
    a.heads = 1;
    a.mat[0] = {g->w, g->y, g->y_row, g->n_rows, 0};
    a.n_mats = 1, a.w2 = g->mode == GEMM_GATE_UP ? g->w2 : NULL, a.w_mat = g->w_mat;
    a.tile0 = g->row0 / 16;
    CU_REQUIRE(g->mode != GEMM_TIMES_GATE);
    a.row_blocks = (int)ceil_div(g->n_rows, a.w2 ? WARPS * 8 : WARPS * 16);
    a.seg = g->seg, a.list = g->list;
    wide_dispatch(c, &a, g->type, (int64_t)g->segs_max * a.row_blocks);
}

void cuda_wide_gather(struct kctx *c, void *to, const float *x, int64_t x_row, int cols,
                      const int32_t *seg, const int32_t *list, int list_max, int x_div) {
    struct wide_convert v = {
        (uint8_t *)to, x,    x_row, 0, list_max, 1, cols, (int)rows_room(list_max), 0,
        seg,           list, x_div};
    convert(c, &v);
}

template <int TYPE> static void allow_typed(struct kctx *c) {
    allow_smem(wide_kernel<TYPE, false>, (size_t)c->smem_block);
    allow_smem(wide_kernel<TYPE, true>, (size_t)c->smem_block);
}

void cuda_wide_init(struct kctx *c) {
    if (c->prop.major != 9) return;
    allow_typed<KT_Q8_0>(c);
    allow_typed<KT_Q4_K>(c);
    allow_typed<KT_Q5_K>(c);
    allow_typed<KT_Q6_K>(c);
}
