/* kernels/cuda/gemv.cu: the products of up to 64 rows of x, taken eight at a time.
 *
 * Owns: nothing.  Called by: matmul.cu; gv_quantize also by the experts.
 * Fails how: a CUDA error ends the process.  Limits: GV_JOBS products per launch.
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * One launch for all jobs: a block takes a few tiles of one job and eight rows of x, and goes
 * through several such places if the chip cannot hold all of them at once. With one row of x blocks
 * are of eight warps and small, so that they stand beside the next kernel's, which fetches its
 * weights meanwhile; with more rows, or a long x, one block of sixteen warps has a multiprocessor
 * to itself and keeps x there. Unquantised jobs (the router) run beside the others: a block to a
 * weight row for one row of x, sixteen rows to a tile on the tensor cores for more.
 */
#include <algorithm>

#include "kernels/cuda/dense.cuh"
#include "kernels/cuda/gemv_job.cuh"
#include "kernels/cuda/gemv_run.cuh"

#define DENSE_ROWS   2   /* unquantised rows of a block, most */
#define DENSE_COLS   64  /* of a unit of unquantised tiles */
#define DENSE_LINE   320 /* bytes of a row of it in shared memory: no two rows share banks */
#define SMALL_RUNS   24  /* of one row of x, for blocks of eight warps */
#define SMALL_BLOCKS 3   /* of eight warps on a multiprocessor, those of the next kernel included */
#define OWN_RUNS     16  /* of one row of x that each block makes for itself */

/* ---- unquantised rows, one row of x ---------------------------------------------------------- */

/* Sum over the block's threads, warp by warp; thread 0 has it. red: a float per warp. */
static __device__ __forceinline__ float dense_sum(float v, float *red) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) red[warp] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) v += red[i];
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
        for (int k = (int)threadIdx.x * 4; k < cols; k += (int)blockDim.x * 4) {
            float4 a = dense_load(type, wr, k, cols - k);
            float4 b = dense_load(KT_F32, (const uint8_t *)(x + t * x_row), k, cols - k);
            acc += a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
        }
        acc = dense_sum(acc, red);
        if (threadIdx.x == 0) y[t * y_row] = acc;
    }
}

/* The same for one row of x and up to DENSE_ROWS float32 rows at aligned addresses (the router),
 * which are fetched into the place of the rings before the wait. */
static __device__ __forceinline__ void dense_rows(const struct gv_job &j, const struct gv_args &a,
                                                  int head, int block, uint8_t *smem) {
    struct gv_smem s = gv_carve(smem, (int)blockDim.x / 32, a.ring);
    int row0 = block * j.team, n = min(j.team, j.rows - row0), bytes = j.cols * 4;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (int)blockDim.x / 32;
    const float *x = j.x + head * j.x_head;
    if (threadIdx.x == 0) {
        mbar_init(s.x_bar, 1);
        mbar_init_fence();
        mbar_expect(s.x_bar, (uint32_t)(n * bytes));
        bulk_load(smem_addr(smem), j.w + head * j.w_head + (int64_t)row0 * bytes,
                  (uint32_t)(n * bytes), s.x_bar);
    }
    __syncthreads();
    gdc_trigger();
    float *red = (float *)s.red;
    float acc[DENSE_ROWS] = {0, 0};
    gdc_wait();
    mbar_wait(s.x_bar, 0);
    for (int k = (int)threadIdx.x * 4; k < j.cols; k += (int)blockDim.x * 4) {
        float4 b = *(const float4 *)(x + k);
#pragma unroll
        for (int r = 0; r < DENSE_ROWS; r++) {
            float4 v = make_float4(0, 0, 0, 0);
            if (r < n) v = *(const float4 *)(smem + r * bytes + 4 * k);
            acc[r] += v.x * b.x + v.y * b.y + (v.z * b.z + v.w * b.w);
        }
    }
#pragma unroll
    for (int r = 0; r < DENSE_ROWS; r++) {
        acc[r] = warp_sum(acc[r]);
        if (lane == 0) red[r * warps + warp] = acc[r];
    }
    __syncthreads();
    if ((int)threadIdx.x >= n) return;
    float sum = 0;
    for (int i = 0; i < warps; i++) sum += red[(int)threadIdx.x * warps + i];
    j.y[head * j.y_head + row0 + threadIdx.x] = sum;
}

/* ---- unquantised tiles, several rows of x ---------------------------------------------------- */

/* c[16, 8] += a[16, 8] b[8, 8], the leading eleven bits of float32 */
static __device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], float b0,
                                                float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
static __device__ __forceinline__ float leading_bits(float v) {
    return __uint_as_float(__float_as_uint(v) & 0xffffe000);
}

/* The bytes of w, signed, as floats. */
static __device__ __forceinline__ void bytes_float(uint32_t w, float (&f)[4]) {
    w ^= 0x80808080;
#pragma unroll
    for (int i = 0; i < 4; i++)
        f[i] = __uint_as_float(__byte_perm(w, 0x4b000000, 0x7540 | i)) - (8388608.f + 128.f);
}

/* acc[16 rows, 8 of x] += DENSE_COLS columns of float32 weights (in slot) times x, from column
 * `col` of the record on. Weights are split into their leading bits and the rest, x stands as hi
 * and lo, and three of the four products are taken: what is left out is 2^-19 of it. A lane holds
 * four neighbouring columns of a row where the tensor core thinks of others; w and x agree about
 * it. */
static __device__ __forceinline__ void dense_unit(float (&acc)[4], const uint8_t *slot,
                                                  const uint8_t *x, int x_row, int n, int col) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float hi[4] = {0, 0, 0, 0}, lo[4] = {0, 0, 0, 0};
    const uint8_t *xr = x + min(g, n - 1) * x_row + col + 8 * t,
                  *w = slot + g * DENSE_LINE + 16 * t;
#pragma unroll
    for (int k = 0; k < DENSE_COLS / 16; k++) {
        float4 a0 = *(const float4 *)(w + 64 * k),
               a1 = *(const float4 *)(w + 64 * k + 8 * DENSE_LINE);
        int at = k / 2 * 32 + k % 2 * 4;
        float h[4], l[4];
        bytes_float(*(const uint32_t *)(xr + at), h);
        bytes_float(*(const uint32_t *)(xr + GV_LO + at), l);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float a[4] = {half ? a0.z : a0.x, half ? a1.z : a1.x, half ? a0.w : a0.y,
                          half ? a1.w : a1.y};
            float lead[4], rest[4];
#pragma unroll
            for (int i = 0; i < 4; i++) lead[i] = leading_bits(a[i]), rest[i] = a[i] - lead[i];
            mma_tf32(hi, lead, h[2 * half], h[2 * half + 1]);
            mma_tf32(hi, rest, h[2 * half], h[2 * half + 1]);
            mma_tf32(lo, lead, l[2 * half], l[2 * half + 1]);
        }
    }
    float x0 = *(const float *)(x + min(2 * t, n - 1) * x_row + GV_SCALE);
    float x1 = *(const float *)(x + min(2 * t + 1, n - 1) * x_row + GV_SCALE);
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] += (i % 2 ? x1 : x0) * (hi[i] * 256.f + lo[i]);
}

/* Requests one unit of a tile of `rows` rows. */
static __device__ __forceinline__ void dense_issue(const struct gv_smem &s, struct gv_ring *r,
                                                   const uint8_t *src, int64_t row_bytes,
                                                   int rows) {
    int lane = threadIdx.x & 31;
    uint32_t bar = s.bar + 8 * r->put;
    if (lane == 0) mbar_expect(bar, (uint32_t)(rows * DENSE_COLS * 4));
    __syncwarp();
    if (lane < rows)
        bulk_load(s.ring + r->put * r->bytes + lane * DENSE_LINE, src + lane * row_bytes,
                  DENSE_COLS * 4, bar);
    if (++r->put == r->slots) r->put = 0;
}

/* ---- x as records ---------------------------------------------------------------------------- */

/* A warp per row and run. */
static __global__ void __launch_bounds__(128)
    quantize_kernel(uint8_t *image, const float *x, int64_t x_row, int64_t x_head, int n, int heads,
                    int cols, int runs) {
    gdc_trigger();
    gdc_wait();
    int item = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (item >= n * runs) return;
    int row = item / runs, k = item % runs * GV_RUN + lane / 4 * 32 + lane % 4 * 4;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (k < cols) {
        const float *p = x + row / heads * x_row + row % heads * x_head + k;
        float4 e = load_float4(p), f = load_float4(p + 16);
        v[0] = e.x, v[1] = e.y, v[2] = e.z, v[3] = e.w;
        v[4] = f.x, v[5] = f.y, v[6] = f.z, v[7] = f.w;
    }
    gv_record(image + (int64_t)item * GV_RECORD, v);
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

/* The one row of x, made by this block. spare: shared memory, as many floats as
 * a merged row has. */
static __device__ __forceinline__ void make_x(const struct gv_job &j, const struct gv_args &a,
                                              int head, int warps, uint8_t *to, float *spare) {
    const float *x = j.x + head * j.x_head, *x2 = j.x2;
    float s = 1;
    if (j.from == GV_MERGED) {
        merge_row(a.merge, 0, head, spare);
        __syncthreads();
        x = spare;
    } else if (j.from == GV_NORMED) {
        float sum = 0;
        for (int k = (int)threadIdx.x * 4; k < j.cols; k += warps * 128) {
            float4 v = load_float4(x + k);
            sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
        }
        s = 1.f / sqrtf(block_sum(sum, spare) / (float)j.cols + a.eps);
    }
    gv_make(to, j.cols, warps, [&](int k) {
        float4 v = j.from == GV_MERGED ? *(const float4 *)(x + k) : load_float4(x + k);
        if (j.from == GV_NORMED) {
            float4 g = load_float4(x2 + k);
            v = make_float4(v.x * s * g.x, v.y * s * g.y, v.z * s * g.z, v.w * s * g.w);
        } else if (j.from == GV_SWIGLU) {
            float4 u = load_float4(x2 + k);
            v = make_float4(silu(v.x) * u.x, silu(v.y) * u.y, silu(v.z) * u.z, silu(v.w) * u.w);
        }
        return v;
    });
}

/* ---- the products -----------------------------------------------------------------------------
 */

template <int MOST, int WARPS>
static __device__ __forceinline__ void gv_tiles(const struct gv_job &j, const struct gv_args &a,
                                                int head, int t0, int block, uint8_t *smem) {
    struct gv_smem s = gv_carve(smem, WARPS, a.ring);
    struct gv_ring ring;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wk = warp % j.wk, at_tile = warp / j.wk;
    int tiles = (j.rows + 15) / 16, runs = (j.cols + GV_RUN - 1) / GV_RUN;
    int first = block * j.span, last = min(first + j.span, (tiles + j.team - 1) / j.team);
    int n = MOST == 1 ? 1 : min(GV_ROWS, a.n_rows - t0);
    bool packed = MOST == 1 || j.mat.cell_cols != 0;                /* else float32 */
    int per = packed ? 1 : GV_RUN / DENSE_COLS, units = runs * per; /* of work, for a tile */
    const uint8_t *w = j.w + head * j.w_head, *src = NULL;
    int64_t tile_bytes =
        packed ? (int64_t)(j.cols / j.mat.cell_cols) * j.mat.cell_bytes : (int64_t)j.cols * 64;
    int unit_bytes = packed ? j.mat.run_stride : DENSE_COLS * 4;

    /* the next unit to be requested: of the tile before next_group, at src, or of the tiles after
     */
    int next_group = at_tile < j.team ? first : last, next_unit = units, left = 0;
    gv_ring_init(s, &ring, packed ? j.mat.run_stride : 16 * DENSE_LINE);
    auto request = [&]() {
        while (next_unit >= units) {
            if (next_group >= last) return;
            int tile = next_group++ * j.team + at_tile;
            if (tile >= tiles) continue;
            next_unit = wk;
            src = w + tile * tile_bytes + (int64_t)wk * unit_bytes;
            left = j.rows - tile * 16;
        }
        if (packed)
            gv_issue(s, &ring, src, gv_bytes(j.mat, j.cols, next_unit));
        else
            dense_issue(s, &ring, src, (int64_t)j.cols * 4, min(16, left));
        next_unit += j.wk;
        src += (int64_t)j.wk * unit_bytes;
    };
    for (int i = 0; i < ring.slots; i++) request();
    __syncthreads(); /* the barriers of x stand */
    gdc_trigger();

    /* x: all of it once, or stages of each pass over it in two buffers by turns */
    struct gv_x from = {j.image, runs, t0 * j.heads + head, j.heads, NULL, 1};
    int x_row = gv_x_row(a.stage), buffer = n * x_row, stages = (runs + a.stage - 1) / a.stage;
    int all = stages == 1 ? 1 : stages * (last - first), asked = 0, stage = 0;
    auto ask = [&]() {
        if (asked >= all) return;
        int run0 = asked % stages * a.stage;
        gv_x_request(s, from, n, run0, min(a.stage, runs - run0), asked & 1, buffer, x_row);
        asked++;
    };
    float *y = j.y + head * j.y_head + t0 * j.y_row;
    gdc_wait();
    if (MOST == 1 && j.from != GV_IMAGE) {
        make_x(j, a, head, WARPS, s.x, (float *)s.red);
        __syncthreads();
    } else {
        ask(), ask();
        if (stages == 1) mbar_wait(s.x_bar, 0);
    }
    for (int group = first; group < last; group++) {
        int tile = group * j.team + at_tile;
        bool mine = at_tile < j.team && tile < tiles;
        float acc[4] = {0, 0, 0, 0};
        int unit = mine ? wk : units;
        for (int run0 = 0; run0 < runs; run0 += a.stage) {
            const uint8_t *x = s.x;
            int end = min(runs, run0 + a.stage) * per;
            if (stages > 1) {
                mbar_wait(s.x_bar + 8 * (stage & 1), stage >> 1 & 1);
                x += (stage & 1) * buffer;
            }
            for (; unit < end; unit += j.wk) {
                const uint8_t *slot = gv_take(s, &ring);
                const uint8_t *record = x + (unit / per - run0) * GV_RECORD;
                if (packed)
                    gv_run<MOST>(j.mat.type, acc, slot, record, x_row, n,
                                 min(8, (j.cols - unit * GV_RUN) / 32));
                else
                    dense_unit(acc, slot, record, x_row, n, unit % per * DENSE_COLS);
                __syncwarp();
                request();
            }
            if (stages > 1) {
                __syncthreads();
                stage++;
                ask();
            }
        }
        /* the warps that share a tile are summed in their order */
        if (j.wk > 1) {
            s.red[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
            __syncthreads();
            if (wk == 0 && mine)
                for (int i = 1; i < j.wk; i++) {
                    float4 v = s.red[(warp + i) * 32 + lane];
                    acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
                }
        }
        if (wk == 0 && mine)
            gv_results(acc, packed ? gv_width(n) : 8, n, [&](int r, int t, float v) {
                int row = tile * 16 + r;
                if (row < j.rows) y[t * j.y_row + row] = v;
            });
        if (j.wk > 1 && group + 1 < last) __syncthreads();
    }
}

/* Blocks of one place in the matrix and different rows of x are neighbours: the weights that the
 * first of them fetches are in the cache for the others. */
template <int MOST, int WARPS>
static __global__ void __launch_bounds__(32 * WARPS, WARPS == 8 ? SMALL_BLOCKS : 1)
    gv_kernel(const __grid_constant__ struct gv_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    if (MOST == 1 && (int)blockIdx.x >= (int)gridDim.x - a.prep_blocks) {
        int part = (int)gridDim.x - 1 - (int)blockIdx.x;
        gdc_trigger();
        gdc_wait();
        if (a.prep.f32)
            prep_cache<float>(a.prep, 0, part, (float *)smem, (float *)smem + 64);
        else
            prep_cache<__half>(a.prep, 0, part, (float *)smem, (float *)smem + 64);
        return;
    }
    int i = 0, t0 = blockIdx.x % a.x_groups * GV_ROWS, place = blockIdx.x / a.x_groups;
    while (i + 1 < a.n_jobs && place >= a.job[i + 1].first_block) i++;
    const struct gv_job &j = a.job[i];
    int block = place - j.first_block, head = block / j.head_blocks;
    block -= head * j.head_blocks;
    if (j.tiles) {
        gv_tiles<MOST, WARPS>(j, a, head, t0, block, smem);
    } else if (j.team > 0) {
        dense_rows(j, a, head, block, smem);
    } else {
        gdc_trigger();
        gdc_wait();
        dense_row_any(j.type, j.w + head * j.w_head + (int64_t)block * j.cols * dense_bytes(j.type),
                      j.x + head * j.x_head + t0 * j.x_row, j.x_row,
                      j.y + head * j.y_head + t0 * j.y_row + block, j.y_row, j.cols,
                      min(GV_ROWS, a.n_rows - t0), (float *)smem);
    }
}

/* ---- choice of shape --------------------------------------------------------------------------
 */

struct gv_shape {
    int team, wk, span, blocks;
};

static int groups_of(const struct gv_args *a, int team) {
    int64_t n = 0;
    for (int i = 0; i < a->n_jobs; i++)
        if (a->job[i].tiles) n += ceil_div(ceil_div(a->job[i].rows, 16), team) * a->job[i].heads;
    return (int)n * a->x_groups;
}

/* Tiles of a block at once and how often, so that the busiest multiprocessor has few tiles, then
 * each warp few runs, then there are few blocks. */
static struct gv_shape shape_of(const struct kctx *c, const struct gv_args *a, int warps, int most,
                                int64_t runs) {
    struct gv_shape best = {1, 1, 1, 1};
    int64_t best_cost = INT64_MAX;
    if (groups_of(a, 1) == 0) return best;
    for (int team = 1; team <= warps; team++) {
        int wk = (int)std::min<int64_t>(warps / team, runs), groups = groups_of(a, team);
        int least = (int)ceil_div(groups, most);
        for (int span = least; span <= least + 2 && span <= groups; span++) {
            int blocks = (int)ceil_div(groups, span);
            int64_t tiles = ceil_div(blocks, c->sms) * span * team;
            int64_t cost = (tiles * 4096 + span * ceil_div(runs, wk)) * 65536 + blocks;
            if (cost < best_cost) best_cost = cost, best = {team, wk, span, blocks};
        }
    }
    return best;
}

static int smem_limit(const struct kctx *c, int most, int blocks) {
    int kb = most > 1 ? 222 : blocks <= c->sms ? 116 : blocks <= 2 * c->sms ? 92 : 60;
    return std::min(c->smem_block, kb * 1024);
}

/* A job's x is what attn_prep, swiglu or a split attention was put off for, or small enough for
 * every block to make for itself. */
static void choose_from(struct kctx *c, struct gv_args *a) {
    struct later *l = c->later;
    bool small = a->n_rows == 1, prep, swiglu, merge;
    for (int i = 0; i < a->n_jobs; i++) small = small && a->job[i].cols <= OWN_RUNS * GV_RUN;
    prep = small && l->prep_due, swiglu = small && l->swiglu_due, merge = small && l->merge_due;
    for (int i = 0; i < a->n_jobs; i++) {
        struct gv_job *j = &a->job[i];
        bool one = j->mat.cell_cols != 0, plain = one && j->heads == 1;
        prep = prep && plain && j->x == l->prep.q_a && j->cols == l->prep.r_q;
        swiglu = swiglu && plain && j->x == l->swiglu.act && j->cols == l->swiglu.width;
        merge = merge && one && j->x == l->merge.out && j->cols == l->merge.r &&
                j->heads == l->merge.heads && j->x_head == j->cols && j->cols % GV_RUN == 0;
    }
    if (prep) l->prep_due = false, a->prep = l->prep, a->prep_blocks = a->prep.index_key ? 2 : 1;
    if (swiglu) l->swiglu_due = false;
    if (merge) l->merge_due = false, a->merge = l->merge;
    cuda_settle(c);
    for (int i = 0; i < a->n_jobs; i++) {
        struct gv_job *j = &a->job[i];
        if (prep)
            j->from = GV_NORMED, j->x2 = l->prep.q_norm, a->eps = l->prep.eps;
        else if (swiglu)
            j->from = GV_SWIGLU, j->x = l->swiglu.gate, j->x2 = l->swiglu.up;
        else if (merge)
            j->from = GV_MERGED;
        else if (small && j->mat.cell_cols && !cuda_image_is(c, j->x, j->x_row, 1, j->cols))
            j->from = GV_FLOATS;
    }
}

/* x of every job that wants it as records, once where jobs share it. The workspace may move while
 * it grows, so places are settled before they become addresses. */
static void make_images(struct kctx *c, struct gv_args *a) {
    size_t at[GV_JOBS] = {0}, end = 0;
    auto wants = [&](int i) { return a->job[i].tiles && a->job[i].from == GV_IMAGE; };
    bool made = true; /* by whoever made x */
    for (int i = 0; i < a->n_jobs; i++) {
        const struct gv_job *j = &a->job[i];
        if (!wants(i)) continue;
        made = made && j->heads == 1 && cuda_image_is(c, j->x, j->x_row, a->n_rows, j->cols);
        end += gv_image_bytes((int64_t)a->n_rows * j->heads, j->cols) + 256;
    }
    if (end == 0) return;
    if (!made) {
        cuda_image_forget(c);
        cuda_work(c, end);
        end = 0;
        for (int i = 0; i < a->n_jobs; i++) {
            const struct gv_job *j = &a->job[i];
            if (!wants(i)) continue;
            int k = 0;
            while (k < i && !(wants(k) && a->job[k].x == j->x && a->job[k].x_row == j->x_row &&
                              a->job[k].cols == j->cols && a->job[k].heads == 1 && j->heads == 1))
                k++;
            at[i] = at[k];
            if (k < i) continue;
            at[i] = end;
            end = gv_quantize(c, end, j->x, j->x_row, j->x_head, a->n_rows, j->heads, j->cols);
            if (at[i] == 0 && j->heads == 1)
                cuda_image_remember(c, j->x, j->x_row, a->n_rows, j->cols);
        }
    }
    for (int i = 0; i < a->n_jobs; i++) a->job[i].image = (const uint8_t *)c->work + at[i];
}

/* Blocks of a job. lines: unquantised rows of a block, where they are fetched ahead. */
static int blocks_of(struct gv_job *j, const struct gv_shape &s, int lines, int first) {
    j->first_block = first;
    j->team = s.team, j->wk = s.wk, j->span = s.span;
    if (j->tiles) {
        j->head_blocks = (int)ceil_div(ceil_div(ceil_div(j->rows, 16), s.team), s.span);
    } else {
        j->team = j->aligned ? lines : 0;
        j->head_blocks = (int)ceil_div(j->rows, std::max(j->team, 1));
    }
    return j->head_blocks * j->heads;
}

template <int MOST, int WARPS> static void gv_start(struct kctx *c, struct gv_args *a) {
    bool small = MOST == 1 && WARPS == 8;
    int cols = 0, line = 0, run_bytes = 16;
    for (int i = 0; i < a->n_jobs; i++) {
        const struct gv_job *j = &a->job[i];
        if (j->tiles)
            cols = std::max(cols, j->cols);
        else if (j->aligned)
            line = std::max(line, j->cols * 4);
        if (j->tiles)
            run_bytes = std::max(run_bytes, j->mat.cell_cols ? j->mat.run_stride : 16 * DENSE_LINE);
    }
    int runs = std::max(1, (int)ceil_div(cols, GV_RUN));
    struct gv_shape s = shape_of(c, a, WARPS, small ? 2 * c->sms : c->sms, runs);
    struct gv_plan p;
    int blocks, lines = MOST == 1 ? DENSE_ROWS : 0;
    for (;; lines--) { /* as many unquantised rows to a block as the rings have room for */
        blocks = 0;
        for (int i = 0; i < a->n_jobs; i++) blocks += blocks_of(&a->job[i], s, lines, blocks);
        blocks *= a->x_groups;
        p = gv_plan(smem_limit(c, small ? 1 : 8, blocks), WARPS, run_bytes,
                    (int)ceil_div(runs, s.wk) * s.span, runs, std::min(a->n_rows, GV_ROWS));
        if (lines * line <= WARPS * p.ring) break;
    }
    a->ring = p.ring, a->stage = p.stage;
    for (int i = 0; i < a->n_jobs; i++)
        CU_REQUIRE(a->job[i].from == GV_IMAGE || p.stage * GV_RUN >= a->job[i].cols);
    int smem = a->prep_blocks ? std::max(p.smem, (PREP_WIDTH + 64) * 4) : p.smem;
    launch(c, gv_kernel<MOST, WARPS>, (unsigned)(blocks + a->prep_blocks), 32 * WARPS, (size_t)smem,
           *a);
}

void gv_launch(struct kctx *c, struct gv_args *a) {
    a->x_groups = (int)ceil_div(a->n_rows, GV_ROWS);
    int most = 0;
    for (int i = 0; i < a->n_jobs; i++) {
        struct gv_job *j = &a->job[i];
        j->aligned = j->type == KT_F32 && j->cols % 4 == 0 && j->x_head % 4 == 0 &&
                     j->w_head % 16 == 0 && ((uintptr_t)j->w | (uintptr_t)j->x) % 16 == 0;
        j->tiles = j->mat.cell_cols || (a->n_rows > 1 && j->aligned && j->cols % GV_RUN == 0);
        most = std::max(most, j->cols);
    }
    choose_from(c, a);
    make_images(c, a);
    for (int i = 0; i < a->n_jobs; i++)
        if (c->image.x == a->job[i].y) cuda_image_forget(c);
    if (a->n_rows > 1)
        gv_start<8, 16>(c, a);
    else if (most > SMALL_RUNS * GV_RUN)
        gv_start<1, 16>(c, a);
    else
        gv_start<1, 8>(c, a);
}

void cuda_gemv_init(struct kctx *c) {
    allow_smem(gv_kernel<1, 8>, (size_t)c->smem_block);
    allow_smem(gv_kernel<1, 16>, (size_t)c->smem_block);
    allow_smem(gv_kernel<8, 16>, (size_t)c->smem_block);
}
