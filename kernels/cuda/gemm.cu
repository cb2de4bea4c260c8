/* kernels/cuda/gemm.cu: products with many rows of x on the tensor cores.
 *
 * Owns: nothing.  Called by: matmul.cu, experts_many.cu.  Fails how: a CUDA error ends the process.
 * Limits: GEMM_COLS rows of x per block.  Tested by: tests/gpu/check_ops.c; measured by
 * worker/bench.c
 *
 * Weights go from their quantised bytes straight into the registers of the lanes that multiply them
 * (quant.cuh's order), once for up to 128 rows of x: no dequantised copy exists anywhere, not even in
 * shared memory. Each warp owns two tiles of sixteen rows and streams them through a ring of its own;
 * the rows of x are converted to half precision once, by a kernel of their own, and staged for the
 * whole block. mma.sync: this runs on every chip and with every type; what Hopper does faster goes to
 * gemm_wide.cu.
 *
 * Numbers: x / 16 and 64 w in half precision (11 bits each), sums in float32. The error of a product
 * relative to its length is about 3e-4.
 */
#include <algorithm>

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/quant.cuh"

#define W_SCALE   64.f
#define STEP      64 /* columns of x staged at a time */
#define RING      2
#define STAGES_MAX 6
#define N_TILES   (GEMM_COLS / 8)
#define STAGE_BYTES (GEMM_COLS * STEP * 2)

struct gemm_matrix {
    const uint8_t *w;
    float *y;
    int64_t y_row;
    int n_rows, first_block;
};

struct gemm_args {
    struct gemm_matrix mat[GEMM_JOBS]; /* several share x; one when grouped */
    int n_mats;
    const uint8_t *w2;
    int64_t w_mat, y_head;
    const __half *xh;
    int cols, xh_cols; /* xh_cols: padded to STEP */
    int row0;          /* first weight row */
    int n_x, heads;
    int stages;        /* of GEMM_COLS rows of x; twice as many for half as many rows */
    const int32_t *seg, *list; /* grouped when seg is given */
    int x_div;
    enum gemm_mode mode;
};

static int64_t xh_cols(int64_t cols) { return ceil_div(cols, STEP) * STEP; }

size_t gemm_xh_bytes(int64_t rows, int64_t cols) {
    return (size_t)rows * (size_t)xh_cols(cols) * sizeof(__half);
}

/* One thread per lane share of 32 columns: sixteen bytes out. */
static __global__ void convert_kernel(__half *xh, const float *x, int64_t x_row, int64_t x_head,
                                      int n_rows, int heads, int cols, int padded) {
    gdc_wait();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int parts = padded / 8;
    if (i >= (int64_t)n_rows * heads * parts) return;
    int part = (int)(i % parts), k = part / 4 * 32 + part % 4 * 4;
    int64_t row = i / parts;
    const float *src = x + row / heads * x_row + row % heads * x_head + k;
    uint32_t h[4] = {0, 0, 0, 0};
    if (k < cols) {
        float4 a = load_float4(src), b = load_float4(src + 16);
        h[0] = pack_half2(x_clamp(a.x), x_clamp(a.y));
        h[1] = pack_half2(x_clamp(a.z), x_clamp(a.w));
        h[2] = pack_half2(x_clamp(b.x), x_clamp(b.y));
        h[3] = pack_half2(x_clamp(b.z), x_clamp(b.w));
    }
    *(uint4 *)(xh + row * padded + part * 8) = make_uint4(h[0], h[1], h[2], h[3]);
}

void cuda_gemm_convert(struct kctx *c, void *xh, const float *x, int64_t x_row, int64_t x_head,
                       int n_rows, int heads, int cols) {
    int padded = (int)xh_cols(cols);
    int64_t n = (int64_t)n_rows * heads * (padded / 8);
    launch(c, convert_kernel, (unsigned)ceil_div(n, 256), 256, 0, (__half *)xh, x, x_row, x_head,
           n_rows, heads, cols, padded);
}

/* Columns of weights per ring slot. */
template <int TYPE> static constexpr __host__ __device__ int run_cols(void) {
    return quant<TYPE>::cols == 256 ? 256 : 128;
}
template <int TYPE> static constexpr __host__ __device__ int run_bytes(void) {
    return run_cols<TYPE>() / quant<TYPE>::cols * quant<TYPE>::bytes;
}

template <int TYPE, int WARPS> static constexpr __host__ __device__ int ring_bytes(void) {
    return WARPS * RING * 2 * run_bytes<TYPE>() + WARPS * RING * 8;
}
template <int TYPE, int WARPS> static int smem_bytes(int stages) {
    return ring_bytes<TYPE, WARPS>() + stages * STAGE_BYTES + GEMM_COLS * 4;
}
/* As many stages of x as fit: one block per multiprocessor of eight warps, two of four. */
template <int TYPE, int WARPS> static int stages_of(const struct kctx *c) {
    int limit = WARPS == 8 ? c->smem_block : std::min(c->smem_block, 113 * 1024), n = STAGES_MAX;
    while (n > 2 && smem_bytes<TYPE, WARPS>(n) > limit) n--;
    return n;
}

/* All but the newest `n` groups have arrived. */
static __device__ __forceinline__ void wait_groups(int n) {
    switch (n) {
    case 0: cp_async_wait<0>(); break;
    case 1: cp_async_wait<1>(); break;
    case 2: cp_async_wait<2>(); break;
    case 3: cp_async_wait<3>(); break;
    case 4: cp_async_wait<4>(); break;
    case 5: cp_async_wait<5>(); break;
    case 6: cp_async_wait<6>(); break;
    case 8: cp_async_wait<8>(); break;
    default: cp_async_wait<10>(); break;
    }
}

/* Scaled weights of 32 columns as the operand of two products: a[0..3] and a[4..7]. */
template <int TYPE>
static __device__ __forceinline__ void weights(const uint8_t *cell, const scales<TYPE> &sc, int b,
                                               int lane, uint32_t (&a)[8]) {
    uint32_t q[4];
    code_bytes<TYPE>(cell, b, lane, q);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float s = sc.scale(r, b, half) * W_SCALE;
            __half2 s2 = __float2half2_rn(s), low;
            if constexpr (scales<TYPE>::has_low)
                low = __float2half2_rn(-W_SCALE * sc.low(r, b, half));
            uint32_t h[2];
            codes_half<TYPE>(q[2 * half + r], h);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                __half2 v = *reinterpret_cast<__half2 *>(&h[i]);
                __half2 w = scales<TYPE>::has_low ? __hfma2(v, s2, low) : __hmul2(v, s2);
                a[4 * half + 2 * i + r] = *reinterpret_cast<uint32_t *>(&w);
            }
        }
}

template <int TYPE, int WARPS>
static __global__ void __launch_bounds__(WARPS * 32, WARPS == 4 ? 2 : 1)
    gemm_kernel(const __grid_constant__ struct gemm_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr int RB = run_bytes<TYPE>(), RC = run_cols<TYPE>();
    constexpr int PIECES = GEMM_COLS * 8 / (WARPS * 32);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint8_t *ring_ptr = smem + warp * RING * 2 * RB;
    uint32_t ring = smem_addr(ring_ptr);
    uint32_t bar = smem_addr(smem + WARPS * RING * 2 * RB) + warp * RING * 8;
    uint8_t *xs = smem + WARPS * RING * 2 * RB + WARPS * RING * 8;
    int *row_of = (int *)(xs + a.stages * STAGE_BYTES);

    if (lane == 0) {
        for (int i = 0; i < RING; i++) mbar_init(bar + 8 * i, 1);
        mbar_init_fence();
    }
    __syncwarp();
    gdc_trigger();
    gdc_wait();
    int block, n, head = 0, matrix = 0, job = 0;
    const bool grouped = a.seg != NULL, pair = a.mode == GEMM_GATE_UP;
    if (grouped) {
        if ((int)blockIdx.y >= a.seg[0]) return;
        const int32_t *seg = a.seg + 1 + 3 * blockIdx.y;
        matrix = seg[0];
        n = seg[2];
        block = blockIdx.x;
        for (int i = threadIdx.x; i < n; i += WARPS * 32) row_of[i] = a.list[seg[1] + i];
    } else {
        n = min(GEMM_COLS, a.n_x - (int)blockIdx.x * GEMM_COLS);
        block = blockIdx.y;
        while (job + 1 < a.n_mats && block >= a.mat[job + 1].first_block) job++;
        block -= a.mat[job].first_block;
        head = matrix = blockIdx.z;
        for (int i = threadIdx.x; i < n; i += WARPS * 32)
            row_of[i] = (blockIdx.x * GEMM_COLS + i) * a.heads + head;
    }
    __syncthreads();
    const struct gemm_matrix &mat = a.mat[job];
    int n_tiles = (n + 7) / 8, half_full = n <= GEMM_COLS / 2;
    int stages = half_full ? 2 * a.stages : a.stages;
    int stage_rows = half_full ? GEMM_COLS / 2 : GEMM_COLS, stage_bytes = stage_rows * STEP * 2;

    /* weights: two tiles of this warp */
    int64_t tile_bytes = (int64_t)(a.cols / quant<TYPE>::cols) * quant<TYPE>::bytes;
    int tiles = (mat.n_rows + 15) / 16, tile[2];
    const uint8_t *src[2];
    for (int i = 0; i < 2; i++) {
        tile[i] = pair ? block * WARPS + warp : (block * WARPS + warp) * 2 + i;
        const uint8_t *w = pair && i == 1 ? a.w2 : mat.w;
        src[i] = w + matrix * a.w_mat + (a.row0 / 16 + min(tile[i], tiles - 1)) * tile_bytes;
    }
    int runs = (a.cols + RC - 1) / RC;
    auto request = [&](int run) {
        if (lane != 0 || run >= runs) return;
        int cols = min(RC, a.cols - run * RC), bytes = cols / quant<TYPE>::cols * quant<TYPE>::bytes;
        uint32_t slot = run % RING;
        mbar_expect(bar + 8 * slot, 2 * bytes);
        for (int i = 0; i < 2; i++)
            bulk_load(ring + (slot * 2 + i) * RB, src[i] + (int64_t)run * RB, bytes,
                      bar + 8 * slot);
    };
    for (int i = 0; i < RING; i++) request(i);

    /* rows of x: piece p is sixteen bytes of row p / 8 */
    int64_t from[PIECES];
    bool have[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int p = threadIdx.x + i * WARPS * 32, row = p / 8;
        have[i] = row < n;
        int r = have[i] ? row_of[row] : 0;
        if (grouped) r /= a.x_div;
        from[i] = (int64_t)r * a.xh_cols + p % 8 * 8;
    }
    uint32_t xs_addr = smem_addr(xs);
    int steps = a.xh_cols / STEP;
    int put = 0, take = 0; /* stages */
    auto stage = [&](int step) {
        if (step < steps) {
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                int p = threadIdx.x + i * WARPS * 32, row = p / 8, q = p % 8;
                if (row < n_tiles * 8)
                    cp_async16(xs_addr + put * stage_bytes + (q / 4 * stage_rows + row) * 64 +
                                   q % 4 * 16,
                               a.xh + from[i] + step * STEP, have[i]);
            }
        }
        if (++put == stages) put = 0;
        cp_async_commit();
    };
    for (int i = 0; i < stages - 1; i++) stage(i);

    float acc[2][N_TILES][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < N_TILES; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) acc[i][j][k] = 0;

    for (int run = 0; run < runs; run++) {
        mbar_wait(bar + 8 * (run % RING), run / RING & 1);
        const uint8_t *slot = ring_ptr + run % RING * 2 * RB;
        scales<TYPE> sc[2];
        if constexpr (quant<TYPE>::cols == 256) {
            sc[0].load(slot, lane);
            sc[1].load(slot + RB, lane);
        }
#pragma unroll 1
        for (int s = 0; s < RC / STEP; s++) {
            int step = run * (RC / STEP) + s;
            if (step >= steps) break;
            wait_groups(stages - 2);
            __syncthreads();
            stage(step + stages - 1);
            const uint8_t *xb = xs + take * stage_bytes + lane * 16;
            if (++take == stages) take = 0;
#pragma unroll 1
            for (int b = 0; b < 2; b++) { /* rolled: the loop must stay in the instruction cache */
                if (quant<TYPE>::cols == 32 && step * STEP + 32 * b >= a.cols) break;
                uint32_t w[2][8];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if constexpr (quant<TYPE>::cols == 32) {
                        const uint8_t *cell = slot + i * RB + (2 * s + b) * quant<TYPE>::bytes;
                        sc[i].load(cell, lane);
                        weights<TYPE>(cell, sc[i], 0, lane, w[i]);
                    } else {
                        weights<TYPE>(slot + i * RB, sc[i], 2 * s + b, lane, w[i]);
                    }
                }
#pragma unroll
                for (int j = 0; j < N_TILES; j++) {
                    if (j < n_tiles) {
                        uint4 x = *(const uint4 *)(xb + (b * stage_rows + 8 * j) * 64);
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            mma16816(acc[i][j], w[i][0], w[i][1], w[i][2], w[i][3], x.x, x.y);
                            mma16816(acc[i][j], w[i][4], w[i][5], w[i][6], w[i][7], x.z, x.w);
                        }
                    }
                }
            }
        }
        __syncwarp();
        request(run + RING);
    }

    int g = lane >> 2, t = lane & 3;
    constexpr float unscale = X_UNSCALE / W_SCALE;
#pragma unroll
    for (int j = 0; j < N_TILES; j++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int col = 8 * j + 2 * t + k % 2;
            if (col >= n) continue;
            int64_t y_row = grouped ? row_of[col] : (int)blockIdx.x * GEMM_COLS + col;
            float *y = mat.y + y_row * mat.y_row + head * a.y_head;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = tile[i] * 16 + g + k / 2 * 8;
                float v = acc[i][j][k] * unscale;
                if (pair) v = silu(v) * (acc[1][j][k] * unscale);
                if (r >= mat.n_rows || (pair && i == 1)) continue;
                if (a.mode == GEMM_TIMES_GATE) v *= silu(y[r]);
                y[r] = v;
            }
        }
    }
}

/* Types that files of this family are made of get a second kernel with eight warps. */
template <int TYPE> static constexpr bool common(void) {
    return TYPE == KT_Q8_0 || TYPE == KT_Q4_K || TYPE == KT_Q5_K || TYPE == KT_Q6_K;
}

template <int TYPE, int WARPS>
static void gemm_launch(struct kctx *c, struct gemm_args *a, int segs, int tile_rows) {
    unsigned blocks = 0;
    for (int i = 0; i < a->n_mats; i++) {
        a->mat[i].first_block = (int)blocks;
        blocks += (unsigned)ceil_div(a->mat[i].n_rows, WARPS * tile_rows);
    }
    a->stages = stages_of<TYPE, WARPS>(c);
    dim3 grid(blocks, (unsigned)segs);
    if (!a->seg)
        grid = dim3((unsigned)ceil_div(a->n_x, GEMM_COLS), blocks, (unsigned)a->heads);
    launch(c, gemm_kernel<TYPE, WARPS>, grid, WARPS * 32,
           (size_t)smem_bytes<TYPE, WARPS>(a->stages), *a);
}

template <int TYPE> static void gemm_typed(struct kctx *c, struct gemm_args *a, int segs) {
    int tile_rows = a->mode == GEMM_GATE_UP ? 16 : 32;
    int64_t columns = a->seg ? segs : ceil_div(a->n_x, GEMM_COLS) * a->heads, blocks = 0;
    for (int i = 0; i < a->n_mats; i++) blocks += ceil_div(a->mat[i].n_rows, 8 * tile_rows);
    /* eight warps where their blocks still leave every multiprocessor work */
    bool wide = common<TYPE>() && c->smem_block > 180 * 1024 && blocks * columns >= c->sms;
    if constexpr (common<TYPE>()) {
        if (wide) {
            gemm_launch<TYPE, 8>(c, a, segs, tile_rows);
            return;
        }
    }
    gemm_launch<TYPE, 4>(c, a, segs, tile_rows);
}

static void gemm_dispatch(struct kctx *c, struct gemm_args *a, int type, int segs) {
    switch (type) {
#define X(t)                                                                                       \
    case t: gemm_typed<t>(c, a, segs); break;
        QUANT_TYPES(X)
#undef X
    default: CU_REQUIRE(!"a quantised type");
    }
}

void cuda_gemm(struct kctx *c, const struct gemm_job *j, int n_jobs, bool x_same) {
    struct gemm_args a = {};
    int64_t x_rows = (int64_t)j->n_rows * j->heads;
    CU_REQUIRE(n_jobs <= GEMM_JOBS);
    cuda_image_forget(c);
    enum x_form form = cuda_wide_takes(c, j->type) ? X_WIDE : X_NARROW;
    bool same = x_same && c->x_form == form;
    c->x_form = form;
    if (form == X_WIDE) {
        cuda_wide_gemm(c, j, n_jobs, same);
        return;
    }
    void *xh = cuda_work(c, gemm_xh_bytes(x_rows, j->cols));
    if (!same)
        cuda_gemm_convert(c, xh, j->x, j->x_row, j->x_head, j->n_rows, j->heads, j->cols);
    for (int i = 0; i < n_jobs; i++)
        a.mat[i] = {j[i].w, j[i].y, j[i].y_row, j[i].rows, 0};
    a.n_mats = n_jobs;
    a.w_mat = j->w_head, a.y_head = j->y_head;
    a.xh = (const __half *)xh, a.cols = j->cols, a.xh_cols = (int)xh_cols(j->cols);
    a.n_x = j->n_rows, a.heads = j->heads, a.x_div = 1;
    gemm_dispatch(c, &a, j->type, 0);
}

void cuda_gemm_grouped(struct kctx *c, const struct gemm_groups *g) {
    struct gemm_args a = {};
    a.mat[0] = {g->w, g->y, g->y_row, g->n_rows, 0};
    a.n_mats = 1;
    a.w2 = g->w2, a.w_mat = g->w_mat;
    a.xh = (const __half *)g->xh, a.cols = g->cols, a.xh_cols = (int)xh_cols(g->cols);
    a.row0 = g->row0, a.heads = 1;
    a.seg = g->seg, a.list = g->list, a.x_div = g->x_div, a.mode = g->mode;
    gemm_dispatch(c, &a, g->type, g->segs_max);
}

template <int TYPE> static void allow_typed(struct kctx *c) {
    allow_smem(gemm_kernel<TYPE, 4>, smem_bytes<TYPE, 4>(stages_of<TYPE, 4>(c)));
    if constexpr (common<TYPE>())
        if (c->smem_block > 180 * 1024)
            allow_smem(gemm_kernel<TYPE, 8>, smem_bytes<TYPE, 8>(stages_of<TYPE, 8>(c)));
}

void cuda_gemm_init(struct kctx *c) {
    cuda_wide_init(c);
#define X(t) allow_typed<t>(c);
    QUANT_TYPES(X)
#undef X
}
