/* kernels/cuda/experts.cu: the router and the two halves of the mixture of experts.
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: EXPERTS_MAX experts; experts_down must follow its experts_up with the scratch untouched.
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * (row, choice) pairs are sorted by expert on the device into segments: at most eight pairs of one
 * expert for few rows (gemv.cuh: each expert's bytes are read once), at most 128 for many (gemm.cu).
 * Blocks take contiguous shares of the list of (segment, tiles), whose length only the device knows.
 * Each pair's result stands in a place of its own and is added up in the order of choices by a last
 * kernel, so nothing depends on how the pairs were dealt out. The down projections are done in
 * slices of rows so that these results stay within PARTIAL_BYTES.
 */
#include <algorithm>
#include <cmath>

#include "kernels/cuda/dense.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/topk.cuh"

#define EXPERTS_MAX   1024
#define FEW_ROWS      64 /* rows of a step that go through gemv.cuh */
#define PARTIAL_BYTES ((size_t)256 << 20)
#define SLICE_ROWS    256 /* down rows are sliced at multiples of it */

/* The scratch of both halves. */
struct pairs {
    int32_t *seg;   /* [1 + 3 * segs_max] count, then {expert, first, count} */
    int32_t *list;  /* [T * U] pair numbers t * U + j, by expert */
    float *partial; /* [T * U, slice] */
};

static size_t align256(size_t n) { return (n + 255) / 256 * 256; }

static int segs_max(const struct kdims *d, int rows) {
    int pairs = rows * d->n_used, width = rows <= FEW_ROWS ? GV_ROWS : GEMM_COLS;
    return std::min(pairs, d->n_experts + pairs / width);
}

static int slice_rows(int64_t pairs, int64_t rows) {
    int64_t fit = (int64_t)(PARTIAL_BYTES / sizeof(float)) / pairs / SLICE_ROWS * SLICE_ROWS;
    return (int)std::min(rows, std::max<int64_t>(fit, SLICE_ROWS));
}

static size_t seg_bytes(const struct kdims *d, int rows) {
    size_t most = (size_t)std::max(segs_max(d, rows), segs_max(d, std::min(rows, FEW_ROWS)));
    return align256((1 + 3 * most) * sizeof(int32_t));
}

size_t cuda_experts_scratch(const struct kdims *d, const struct kbounds *b) {
    if (d->n_experts == 0 || b->rows == 0) return 0;
    size_t n = (size_t)b->rows * (size_t)d->n_used;
    size_t partial = n * (size_t)slice_rows((int64_t)n, d->d_model);
    /* fewer rows may take more columns at once */
    partial = std::max(partial, std::min(n * (size_t)d->d_model, PARTIAL_BYTES / sizeof(float)));
    return seg_bytes(d, b->rows) + align256(n * sizeof(int32_t)) + partial * sizeof(float);
}

static struct pairs pairs_at(dptr scratch, const struct kdims *d, int rows) {
    struct pairs p;
    uint8_t *at = (uint8_t *)scratch;
    p.seg = (int32_t *)at;
    at += seg_bytes(d, rows);
    p.list = (int32_t *)at;
    at += align256((size_t)rows * (size_t)d->n_used * sizeof(int32_t));
    p.partial = (float *)at;
    return p;
}

/* ---- choosing ----------------------------------------------------------------------------- */

struct route_args {
    int n_experts, n_used, n_groups, n_groups_used, gating;
    bool norm;
    float scale;
    const float *logits, *bias;
    const int32_t *slot;
    int32_t *ids;
    float *weights;
    int n_rows;
};

/* Largest of (value, index) over the warp, the lower index on ties; NaN is never it. */
static __device__ __forceinline__ int warp_argmax(float v, int i) {
    for (int o = 16; o > 0; o >>= 1) {
        float w = __shfl_xor_sync(~0u, v, o);
        int j = __shfl_xor_sync(~0u, i, o);
        if (w > v || (w == v && j < i)) v = w, i = j;
    }
    return i;
}

/* Index of the largest of n scores in shared memory; taken ones are NaN. */
static __device__ int best_left(const float *score, int n) {
    int lane = threadIdx.x & 31, at = INT32_MAX;
    float best = -INFINITY;
    for (int i = lane; i < n; i += 32)
        if (score[i] > best || (score[i] == best && i < at)) best = score[i], at = i;
    return warp_argmax(best, at);
}

/* Experts outside the best groups fall to -inf; a group is worth the sum of its two best. */
static __device__ void keep_groups(const struct route_args &a, float *score, float *group) {
    int lane = threadIdx.x & 31, size = a.n_experts / a.n_groups;
    for (int g = lane; g < a.n_groups; g += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++) {
            float v = score[i];
            if (v > first) second = first, first = v;
            else if (v > second) second = v;
        }
        group[g] = size > 1 ? first + second : first;
    }
    __syncwarp();
    for (int k = 0; k < a.n_groups_used; k++) {
        int g = best_left(group, a.n_groups);
        __syncwarp();
        if (lane == 0 && g < a.n_groups) group[g] = NAN;
        __syncwarp();
    }
    for (int i = lane; i < a.n_experts; i += 32)
        if (group[i / size] == group[i / size]) score[i] = -INFINITY;
    __syncwarp();
}

/* One warp, one row, at most 256 experts in one group: scores stay in registers. */
static __device__ void route_row_fast(const struct route_args &a, int t) {
    int lane = threadIdx.x & 31, E = a.n_experts, id = -1;
    const float *logits = a.logits + (int64_t)t * E;
    float gate[8], mine = 0, total = 0, top = -INFINITY, sum = 0;
    uint32_t key[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int e = lane + 32 * i;
        gate[i] = e < E ? logits[e] : -INFINITY;
        top = fmaxf(top, gate[i]);
    }
    if (a.gating == 1) {
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += gate[i] = expf(gate[i] - top);
        sum = warp_sum(sum);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int e = lane + 32 * i;
        gate[i] = a.gating == 1 ? gate[i] / sum : 1.f / (1.f + expf(-gate[i]));
        /* 0 is below the key of every score, -inf and NaN included */
        key[i] = e < E ? order_key(a.bias ? gate[i] + a.bias[e] : gate[i]) : 0;
    }
    for (int j = 0; j < a.n_used; j++) {
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) best = max(best, key[i]);
        best = __reduce_max_sync(~0u, best);
        int at = INT32_MAX;
#pragma unroll
        for (int i = 7; i >= 0; i--)
            if (key[i] == best) at = lane + 32 * i;
        at = __reduce_min_sync(~0u, at);
        float g = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (at == lane + 32 * i) g = gate[i], key[i] = 0;
        g = __shfl_sync(~0u, g, at & 31);
        total += g;
        if (lane == j) mine = g, id = at;
    }
    if (lane < a.n_used) {
        if (a.norm) mine = mine / (total + 1e-20f);
        a.ids[t * a.n_used + lane] = id;
        a.weights[t * a.n_used + lane] = mine * a.scale;
    }
}

/* One warp, one row. score: 3 * n_experts floats of shared memory. */
static __device__ void route_row(const struct route_args &a, int t, float *score) {
    int lane = threadIdx.x & 31, E = a.n_experts;
    int32_t *ids = a.ids + t * a.n_used;
    float *weights = a.weights + t * a.n_used, *gate = score + E;
    if (a.slot[t] < 0) {
        for (int j = lane; j < a.n_used; j += 32) ids[j] = -1, weights[j] = 0;
        return;
    }
    if (E <= 256 && a.n_groups <= 1) {
        route_row_fast(a, t);
        return;
    }
    const float *logits = a.logits + (int64_t)t * E;
    float top = -INFINITY, sum = 0;
    if (a.gating == 1) {
        for (int e = lane; e < E; e += 32) top = fmaxf(top, logits[e]);
        top = warp_max(top);
        for (int e = lane; e < E; e += 32) sum += gate[e] = expf(logits[e] - top);
        sum = warp_sum(sum);
    }
    for (int e = lane; e < E; e += 32) {
        gate[e] = a.gating == 1 ? gate[e] / sum : 1.f / (1.f + expf(-logits[e]));
        float s = a.bias ? gate[e] + a.bias[e] : gate[e];
        score[e] = s == s ? s : -INFINITY;
    }
    __syncwarp();
    if (a.n_groups > 1) keep_groups(a, score, gate + E);
    float total = 0;
    for (int j = 0; j < a.n_used; j++) {
        int e = best_left(score, E);
        if (e >= E) e = 0; /* fewer candidates than choices: as many as the groups leave */
        total += gate[e];
        __syncwarp();
        if (lane == 0) {
            ids[j] = e;
            weights[j] = gate[e];
            score[e] = NAN;
        }
        __syncwarp();
    }
    for (int j = lane; j < a.n_used; j += 32) {
        float w = weights[j];
        if (a.norm) w = w / (total + 1e-20f);
        weights[j] = w * a.scale;
    }
}

/* ---- sorting ------------------------------------------------------------------------------- */

/* Pairs to segments of at most `width`. One block; count: 3 * E ints of shared memory. stable: the
 * order within an expert is that of the pairs (few of them). */
static __device__ void sort_pairs(const int32_t *ids, int n, int E, int width, bool stable,
                                  int32_t *seg, int32_t *list, int32_t *count) {
    int32_t *first = count + E, *cursor = count + 2 * E;
    for (int e = threadIdx.x; e < E; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (ids[i] >= 0) atomicAdd(&count[ids[i]], 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        int per = (E + 31) / 32, e0 = threadIdx.x * per, e1 = min(E, e0 + per);
        int pairs = 0, segs = 0;
        for (int e = e0; e < e1; e++) pairs += count[e], segs += (count[e] + width - 1) / width;
        int pairs_before = pairs, segs_before = segs;
        for (int o = 1; o < 32; o <<= 1) {
            int p = __shfl_up_sync(~0u, pairs_before, o), s = __shfl_up_sync(~0u, segs_before, o);
            if ((int)threadIdx.x >= o) pairs_before += p, segs_before += s;
        }
        if (threadIdx.x == 31) seg[0] = segs_before;
        pairs_before -= pairs;
        segs_before -= segs;
        for (int e = e0; e < e1; e++) {
            first[e] = cursor[e] = pairs_before;
            for (int at = 0; at < count[e]; at += width) {
                int32_t *s = seg + 1 + 3 * segs_before++;
                s[0] = e, s[1] = pairs_before + at, s[2] = min(width, count[e] - at);
            }
            pairs_before += count[e];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int e = ids[i];
        if (e < 0) continue;
        int rank = 0;
        if (stable) {
            for (int k = 0; k < i; k++) rank += ids[k] == e;
            rank += first[e];
        } else {
            rank = atomicAdd(&cursor[e], 1);
        }
        list[rank] = i;
    }
}

/* Few rows: everything in one block, a warp per row. */
static __global__ void __launch_bounds__(1024)
    route_few_kernel(const __grid_constant__ struct route_args a, int32_t *seg, int32_t *list) {
    extern __shared__ float few[];
    __shared__ int32_t ids[FEW_ROWS * 32];
    int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, stride = 3 * a.n_experts;
    gdc_trigger();
    gdc_wait();
    for (int t = warp; t < a.n_rows; t += warps) route_row(a, t, few + warp * stride);
    __syncthreads();
    int n = a.n_rows * a.n_used;
    if (a.n_rows == 1) { /* its choices differ: each is a segment */
        int j = threadIdx.x;
        bool routed = a.slot[0] >= 0;
        if (j == 0) seg[0] = routed ? n : 0;
        if (j < n && routed) {
            seg[1 + 3 * j] = a.ids[j], seg[2 + 3 * j] = j, seg[3 + 3 * j] = 1;
            list[j] = j;
        }
        return;
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) ids[i] = a.ids[i];
    __syncthreads();
    sort_pairs(ids, n, a.n_experts, GV_ROWS, true, seg, list, (int32_t *)few);
}

static __global__ void __launch_bounds__(256)
    route_many_kernel(const __grid_constant__ struct route_args a) {
    extern __shared__ float many[];
    int warp = threadIdx.x >> 5, t = blockIdx.x * (blockDim.x >> 5) + warp;
    gdc_wait();
    if (t < a.n_rows) route_row(a, t, many + warp * 3 * a.n_experts);
}

static __global__ void __launch_bounds__(1024)
    sort_kernel(const int32_t *ids, int n, int E, int32_t *seg, int32_t *list) {
    extern __shared__ int32_t sorted[];
    gdc_wait();
    sort_pairs(ids, n, E, GEMM_COLS, false, seg, list, sorted);
}

static void route(struct kctx *c, const struct kop_experts_up *o, const struct pairs *p) {
    const struct kdims *d = o->dims;
    struct route_args a = {};
    a.n_experts = d->n_experts, a.n_used = d->n_used, a.gating = d->gating;
    a.n_groups = d->n_groups, a.n_groups_used = d->n_groups_used;
    a.norm = d->norm_weights, a.scale = d->weights_scale;
    a.logits = o->logits, a.bias = o->bias, a.slot = o->batch->slot;
    a.ids = o->ids, a.weights = o->weights, a.n_rows = o->batch->n_rows;
    CU_REQUIRE(d->n_experts <= EXPERTS_MAX && d->n_used <= 32);
    size_t one = 3 * (size_t)d->n_experts * sizeof(float);
    if (a.n_rows <= FEW_ROWS) {
        int warps = (int)std::min<size_t>(32, (size_t)40960 / one);
        warps = std::max(1, std::min(warps, a.n_rows < 4 ? 4 : a.n_rows));
        launch(c, route_few_kernel, 1, (unsigned)warps * 32, (size_t)warps * one, a, p->seg,
               p->list);
        return;
    }
    int warps = (int)std::min<size_t>(8, 40960 / one);
    launch(c, route_many_kernel, (unsigned)ceil_div(a.n_rows, warps), (unsigned)warps * 32,
           (size_t)warps * one, a);
    launch(c, sort_kernel, 1, 1024, one, o->ids, a.n_rows * a.n_used, a.n_experts, p->seg, p->list);
}

/* ---- few rows: grouped gemv ------------------------------------------------------------------ */

struct few_mat {
    const uint8_t *w;
    int64_t w_mat;
    struct gv_mat mat;
};

struct few_args {
    struct few_mat mat[2]; /* gate and up, or down alone */
    int rows, cols, wk;    /* of a matrix; warps per tile */
    int ring;              /* bytes of a warp's ring */
    int x_bytes;           /* of shared memory for x */
    const int32_t *seg, *list;
    const uint8_t *image;  /* x as bytes; row list[i] / x_div */
    int x_div, n_rows;
    float *y;              /* row list[i] */
    int64_t y_row;
};

/* MATS matrices side by side: with two, the upper four warps take the second. A block's items are
 * (segment, group of tiles); its warps request weights across the borders of items. */
template <int MATS>
static __global__ void __launch_bounds__(GV_THREADS, 2)
    few_kernel(const __grid_constant__ struct few_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr int TEAM = GV_WARPS / MATS;
    struct gv_smem s = gv_carve(smem, a.ring);
    struct gv_ring ring;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, member = warp % TEAM;
    int wk = member % a.wk, at_tile = member / a.wk, team_tiles = TEAM / a.wk;
    const struct few_mat &m = a.mat[warp / TEAM];
    int tiles = (a.rows + 15) / 16, blocks = (tiles + team_tiles - 1) / team_tiles;
    int runs = (a.cols + GV_RUN - 1) / GV_RUN;
    int64_t tile_bytes = (int64_t)(a.cols / m.mat.cell_cols) * m.mat.cell_bytes;
    gv_ring_init(s, &ring, m.mat.run_stride);
    gdc_trigger();
    gdc_wait();
    int64_t items = (int64_t)a.seg[0] * blocks;
    int item = (int)(items * blockIdx.x / gridDim.x);
    int last = (int)(items * (blockIdx.x + 1) / gridDim.x);

    /* the next run to be requested: of the item before next_item, at src, or of the items after */
    int next_item = item, next_run = runs;
    const uint8_t *src = NULL;
    auto request = [&]() {
        while (next_run >= runs) {
            if (next_item >= last) return;
            int segment = next_item / blocks;
            int tile = (next_item - segment * blocks) * team_tiles + at_tile;
            next_item++;
            if (tile >= tiles) continue;
            next_run = wk;
            src = m.w + a.seg[1 + 3 * segment] * m.w_mat + tile * tile_bytes +
                  (int64_t)wk * m.mat.run_stride;
        }
        gv_issue(s, &ring, src, gv_bytes(m.mat, a.cols, next_run));
        next_run += a.wk;
        src += (int64_t)a.wk * m.mat.run_stride;
    };
    for (int i = 0; i < ring.slots; i++) request();

    int staged = -1;
    for (; item < last; item++) {
        int segment = item / blocks, tile = item % blocks * team_tiles + at_tile;
        const int32_t *seg = a.seg + 1 + 3 * segment, *list = a.list + seg[1];
        int n = seg[2], run_x = gv_run_x(n), stage = a.x_bytes / run_x;
        bool keep = stage >= runs && staged >= 0 &&
                    (staged == segment || (a.n_rows == 1 && a.x_div > 1));
        struct gv_x from = {a.image, runs, 0, 0, list, a.x_div};
        float acc[4] = {0, 0, 0, 0};
        int run = tile < tiles ? wk : runs;
        for (int run0 = 0; run0 < runs; run0 += stage) {
            int end = min(runs, run0 + stage);
            if (!keep) {
                if (staged >= 0) __syncthreads();
                gv_stage(s.x, from, n, run0, end - run0);
                __syncthreads();
            }
            staged = segment;
            for (; run < end; run += a.wk) {
                const uint8_t *slot = gv_take(s, &ring);
                gv_run(m.mat.type, acc, slot, s.x + (run - run0) * run_x, n,
                       min(8, (a.cols - run * GV_RUN) / 32));
                __syncwarp();
                request();
            }
        }
        /* sums of a tile's warps, in their order; then both matrices together */
        float4 *red = (float4 *)s.red;
        red[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        __syncthreads();
        if (warp < TEAM && wk == 0 && tile < tiles) {
            float up[4] = {0, 0, 0, 0};
            for (int i = 1; i < a.wk; i++) {
                float4 v = red[(warp + i) * 32 + lane];
                acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
            }
            for (int i = 0; MATS == 2 && i < a.wk; i++) {
                float4 v = red[(warp + TEAM + i) * 32 + lane];
                up[0] += v.x, up[1] += v.y, up[2] += v.z, up[3] += v.w;
            }
            float gate[4];
            auto keep_gate = [&](int r, int t, float v) { gate[t % 2 * 2 + r / 8] = v; };
            auto write = [&](int r, int t, float v) {
                int row = tile * 16 + r;
                if (MATS == 2) v = silu(gate[t % 2 * 2 + r / 8]) * v;
                if (row < a.rows) a.y[(int64_t)list[t] * a.y_row + row] = v;
            };
            if (MATS == 2) gv_results(acc, n, keep_gate);
            gv_results(MATS == 2 ? up : acc, n, write);
        }
        __syncthreads();
    }
}

static struct few_mat few_mat(const struct kmat *m, int row0) {
    struct cell_shape s = cell_shape(m->type);
    struct few_mat f;
    f.w = (const uint8_t *)m->data + (int64_t)(row0 / 16) * (m->cols / s.cols) * s.bytes;
    f.w_mat = (int64_t)cuda_mat_bytes(m->type, 1, m->rows, m->cols);
    f.mat = gv_mat(m->type);
    return f;
}

static void few_launch(struct kctx *c, struct few_args *a, int mats, int segs) {
    int team = GV_WARPS / mats;
    int64_t runs = ceil_div(a->cols, GV_RUN), tiles = ceil_div(a->rows, 16);
    a->wk = 1;
    while (a->wk < team && a->wk * 4 <= runs) a->wk *= 2;
    struct gv_plan p = gv_plan(c, a->cols, std::min(a->n_rows, GV_ROWS));
    a->ring = p.ring;
    a->x_bytes = p.smem - gv_fixed(p.ring);
    int64_t items = segs * ceil_div(tiles, team / a->wk);
    unsigned grid = (unsigned)std::min<int64_t>(items, 2 * c->sms);
    launch(c, mats == 2 ? few_kernel<2> : few_kernel<1>, grid, GV_THREADS,
           (size_t)p.smem, *a);
}

/* ---- unquantised experts: a warp per row and pair ---------------------------------------------- */

static __global__ void __launch_bounds__(256)
    dense_pairs_kernel(int type, const uint8_t *w, int64_t w_mat, int rows, int cols,
                       const int32_t *ids, const float *x, int64_t x_row, int x_div, float *y,
                       int64_t y_row, bool times_gate) {
    gdc_wait();
    int64_t pair = blockIdx.y;
    int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31, id = ids[pair];
    if (id < 0 || row >= rows) return;
    const uint8_t *wr = w + id * w_mat + (int64_t)row * cols * dense_bytes(type);
    const float *xr = x + pair / x_div * x_row;
    float acc = 0;
    for (int k = lane * 4; k < cols; k += 128) {
        float4 a = dense_load(type, wr, k, cols - k);
        float4 b = dense_load(KT_F32, (const uint8_t *)xr, k, cols - k);
        acc += a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
    }
    acc = warp_sum(acc);
    float *out = y + pair * y_row + row;
    if (lane == 0) *out = times_gate ? silu(*out) * acc : acc;
}

/* ---- the two halves -------------------------------------------------------------------------- */

/* Rows [row0, row0 + n) of one expert matrix for all pairs. */
struct pair_product {
    const struct kmat *w;
    int row0, n;
    const float *x;
    int64_t x_row;
    int x_div;
    const int32_t *ids;
    float *y; /* y's column 0 is row0 */
    int64_t y_row;
    int rows_of_step;
};

static void run_product(struct kctx *c, const struct pair_product *h, const struct pairs *p,
                         const struct kdims *d, const void *xh, enum gemm_mode mode) {
    int T = h->rows_of_step;
    int64_t w_mat = (int64_t)cuda_mat_bytes(h->w->type, 1, h->w->rows, h->w->cols);
    const uint8_t *w = (const uint8_t *)h->w->data;
    if (type_is_dense(h->w->type)) {
        launch(c, dense_pairs_kernel, dim3((unsigned)ceil_div(h->n, 8), (unsigned)(T * d->n_used)),
               256, 0, h->w->type,
               w + (int64_t)h->row0 * h->w->cols * (h->w->type == KT_F32 ? 4 : 2), w_mat, h->n,
               (int)h->w->cols, h->ids, h->x, h->x_row, h->x_div, h->y, h->y_row,
               mode == GEMM_TIMES_GATE);
        return;
    }
    struct gemm_groups g = {};
    g.w = w, g.w_mat = w_mat, g.type = h->w->type;
    g.rows = (int)h->w->rows, g.cols = (int)h->w->cols, g.row0 = h->row0, g.n_rows = h->n;
    g.xh = xh, g.y = h->y, g.y_row = h->y_row, g.seg = p->seg, g.list = p->list;
    g.segs_max = segs_max(d, T), g.x_div = h->x_div, g.mode = mode;
    cuda_gemm_grouped(c, &g);
}

void cuda_experts_up(struct kctx *c, const struct kop_experts_up *o) {
    const struct kdims *d = o->dims;
    int T = o->batch->n_rows, U = d->n_used;
    if (T == 0) return;
    struct pairs p = pairs_at(o->scratch, d, T);
    route(c, o, &p);
    bool dense = type_is_dense(o->gate->type) || type_is_dense(o->up->type);
    int64_t F = o->gate->rows, D = o->gate->cols;
    if (T <= FEW_ROWS && !dense) {
        struct few_args a = {};
        a.mat[0] = few_mat(o->gate, 0), a.mat[1] = few_mat(o->up, 0);
        a.rows = (int)F, a.cols = (int)D;
        a.seg = p.seg, a.list = p.list;
        if (!cuda_image_is(c, o->x, D, T, D)) gv_quantize(c, 0, o->x, D, 0, T, 1, D);
        cuda_image_forget(c);
        a.image = (const uint8_t *)c->work;
        a.x_div = U, a.n_rows = T, a.y = o->act, a.y_row = F;
        few_launch(c, &a, 2, segs_max(d, T));
        return;
    }
    struct pair_product h = {};
    h.w = o->gate, h.n = (int)F, h.x = o->x, h.x_row = D, h.x_div = U, h.ids = o->ids;
    h.y = o->act, h.y_row = F, h.rows_of_step = T;
    cuda_image_forget(c);
    void *xh = cuda_work(c, gemm_xh_bytes(T, D));
    if (!dense || !type_is_dense(o->gate->type) || !type_is_dense(o->up->type))
        cuda_gemm_convert(c, xh, o->x, D, 0, T, 1, (int)D);
    if (!dense && o->gate->type == o->up->type) {
        struct gemm_groups g = {};
        g.w = (const uint8_t *)o->gate->data, g.w2 = (const uint8_t *)o->up->data;
        g.w_mat = (int64_t)cuda_mat_bytes(o->gate->type, 1, F, D), g.type = o->gate->type;
        g.rows = g.n_rows = (int)F, g.cols = (int)D, g.xh = xh, g.y = o->act, g.y_row = F;
        g.seg = p.seg, g.list = p.list, g.segs_max = segs_max(d, T), g.x_div = U;
        g.mode = GEMM_GATE_UP;
        cuda_gemm_grouped(c, &g);
        return;
    }
    run_product(c, &h, &p, d, xh, GEMM_STORE);
    h.w = o->up;
    run_product(c, &h, &p, d, xh, GEMM_TIMES_GATE);
}

/* y[t][row0 + r] = sum_j weights[t][j] partial[t * U + j][r]  (+ y, the shared expert's share) */
static __global__ void __launch_bounds__(256)
    combine_kernel(const int32_t *ids, const float *weights, const float *partial, float *y, int U,
                   int D, int row0, int n, bool add) {
    gdc_wait();
    int t = blockIdx.y, r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= n) return;
    float sum = 0;
    for (int j = 0; j < U; j++) {
        int64_t pair = (int64_t)t * U + j;
        if (ids[pair] >= 0) sum = fmaf(weights[pair], partial[pair * n + r], sum);
    }
    float *out = y + (int64_t)t * D + row0 + r;
    *out = add ? sum + *out : sum;
}

void cuda_experts_down(struct kctx *c, const struct kop_experts_down *o) {
    const struct kdims *d = o->dims;
    int T = o->batch->n_rows, U = d->n_used;
    if (T == 0) return;
    int D = (int)o->down->rows, F = (int)o->down->cols;
    struct pairs p = pairs_at(o->scratch, d, T);
    if (o->shared_down) {
        struct kop_matmul m = {};
        m.w = o->shared_down, m.x = o->shared_act, m.y = o->y;
        m.x_stride = o->shared_down->cols, m.y_stride = D, m.n_rows = T;
        cuda_matmul(c, &m, 1);
    }
    bool dense = type_is_dense(o->down->type), few = T <= FEW_ROWS && !dense;
    void *xh = NULL;
    cuda_image_forget(c);
    if (!few && !dense) {
        xh = cuda_work(c, gemm_xh_bytes((int64_t)T * U, F));
        cuda_gemm_convert(c, xh, o->act, F, 0, T * U, 1, F);
    }
    if (few) gv_quantize(c, 0, o->act, F, 0, T * U, 1, F);
    int slice = slice_rows((int64_t)T * U, D);
    for (int row0 = 0; row0 < D; row0 += slice) {
        int n = std::min(slice, D - row0);
        if (few) {
            struct few_args a = {};
            a.mat[0] = few_mat(o->down, row0);
            a.rows = n, a.cols = F;
            a.seg = p.seg, a.list = p.list;
            a.image = (const uint8_t *)c->work;
            a.x_div = 1, a.n_rows = T, a.y = p.partial, a.y_row = n;
            few_launch(c, &a, 1, segs_max(d, T));
        } else {
            struct pair_product h = {};
            h.w = o->down, h.row0 = row0, h.n = n, h.x = o->act, h.x_row = F, h.x_div = 1;
            h.ids = o->ids, h.y = p.partial, h.y_row = n, h.rows_of_step = T;
            run_product(c, &h, &p, d, xh, GEMM_STORE);
        }
        launch(c, combine_kernel, dim3((unsigned)ceil_div(n, 256), (unsigned)T), 256, 0, o->ids,
               o->weights, p.partial, o->y, U, D, row0, n, o->shared_down != NULL);
    }
}

void cuda_experts_init(struct kctx *c) {
    size_t most = (size_t)std::min(c->smem_block, GV_SMEM);
    allow_smem(few_kernel<1>, most);
    allow_smem(few_kernel<2>, most);
}
