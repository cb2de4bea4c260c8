/* kernels/cuda/experts_one.cu: the mixture of experts of a single row, in two kernels.
 *
 * Owns: nothing.  Called by: experts.cu.  Fails how: a CUDA error ends the process.
 * Limits: quantised experts; x of at most ONE_RUNS runs in all.
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * A step of one row is as long as its chain of kernels, so each block chooses the experts itself
 * (a microsecond, while x arrives), and the second kernel makes x of what the first left,
 * multiplies the down projections of the shared expert and of all chosen ones and adds them up: a
 * tile of sixteen rows of y is one block's, so the sum needs no memory and has a fixed order. Only
 * the shared expert's weights are known before the first kernel has ended.
 */
#include <algorithm>

#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/gemv_run.cuh"
#include "kernels/cuda/later.cuh"
#include "kernels/cuda/route.cuh"

#define WARPS        16
#define ONE_RUNS     96
#define STATIC_BYTES 4096 /* of shared memory, more than one_up_kernel has beside the dynamic */

/* ---- gate and up ------------------------------------------------------------------------------
 */

struct one_up_args {
    struct few_mat mat[2];
    int rows, cols, wk, groups; /* groups of tiles per expert */
    int ring, stage;
    bool routed; /* ids and weights stand already */
    struct route_args route;
    int32_t *seg, *list; /* for experts_few.cu's second half */
    const uint8_t *image;
    float *act; /* [U, F] */
};

/* Lane j: choice j or -1. By a warp of each block, from the others' gates and keys; the first
 * block's tells others. */
static __device__ __forceinline__ int one_route(const struct one_up_args &a, const float *gate,
                                                const uint32_t *keys) {
    int lane = threadIdx.x & 31, U = a.route.n_used, id = -1;
    float weight = 0;
    if (a.routed) return lane < U ? a.route.ids[lane] : -1;
    if (a.route.slot[0] >= 0) route_pick(a.route, gate, keys, &id, &weight);
    if (blockIdx.x == 0) {
        if (lane == 0) a.seg[0] = id >= 0 ? U : 0;
        if (lane < U) {
            a.route.ids[lane] = id, a.route.weights[lane] = id >= 0 ? weight : 0;
            a.seg[1 + 3 * lane] = id, a.seg[2 + 3 * lane] = lane, a.seg[3 + 3 * lane] = 1;
            a.list[lane] = lane;
        }
    }
    return lane < U ? id : -1;
}

/* The lower eight warps take gate, the others up. Items are (choice, group of tiles). */
static __global__ void __launch_bounds__(32 * WARPS, 2)
    one_up_kernel(const __grid_constant__ struct one_up_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ int32_t ids[32];
    __shared__ float gate_of[ROUTE_FAST];
    __shared__ uint32_t key_of[ROUTE_FAST];
    constexpr int TEAM = WARPS / 2;
    struct gv_smem s = gv_carve(smem, WARPS, a.ring);
    struct gv_ring ring;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, member = warp % TEAM;
    int wk = member % a.wk, at_tile = member / a.wk, team = TEAM / a.wk;
    const struct few_mat &m = a.mat[warp / TEAM];
    int tiles = (a.rows + 15) / 16, runs = (a.cols + GV_RUN - 1) / GV_RUN;
    int64_t tile_bytes = (int64_t)(a.cols / m.mat.cell_cols) * m.mat.cell_bytes;
    gv_ring_init(s, &ring, m.mat.run_stride);
    __syncthreads();
    gdc_trigger();
    gdc_wait();
    struct gv_x from = {a.image, runs, 0, 1, NULL, 1};
    gv_x_request(s, from, 1, 0, runs, 0, 0, 0);
    if (!a.routed) route_keys(a.route, gate_of, key_of);
    __syncthreads();
    if (warp == WARPS - 1) ids[lane] = one_route(a, gate_of, key_of);
    __syncthreads();
    int n_items = ids[0] >= 0 ? a.route.n_used * a.groups : 0;
    int item = (int)blockIdx.x, next_item = at_tile < team ? item : n_items;
    int next_run = runs;
    const uint8_t *src = NULL;
    auto request = [&]() {
        while (next_run >= runs) {
            if (next_item >= n_items) return;
            int choice = next_item / a.groups;
            int tile = (next_item - choice * a.groups) * team + at_tile;
            next_item += (int)gridDim.x;
            if (tile >= tiles) continue;
            next_run = wk;
            src = m.w + ids[choice] * m.w_mat + tile * tile_bytes + (int64_t)wk * m.mat.run_stride;
        }
        gv_issue(s, &ring, src, gv_bytes(m.mat, a.cols, next_run));
        next_run += a.wk;
        src += (int64_t)a.wk * m.mat.run_stride;
    };
    for (int i = 0; i < ring.slots; i++) request();
    mbar_wait(s.x_bar, 0);
    for (; item < n_items; item += (int)gridDim.x) {
        int choice = item / a.groups, tile = item % a.groups * team + at_tile;
        bool mine = at_tile < team && tile < tiles;
        float acc[4] = {0, 0, 0, 0};
        for (int run = mine ? wk : runs; run < runs; run += a.wk) {
            const uint8_t *slot = gv_take(s, &ring);
            gv_run<1>(m.mat.type, acc, slot, s.x + run * GV_RECORD, 0, 1,
                      min(8, (a.cols - run * GV_RUN) / 32));
            __syncwarp();
            request();
        }
        float2 *red = (float2 *)s.red;
        red[warp * 32 + lane] = make_float2(acc[0], acc[1]);
        __syncthreads();
        if (warp < TEAM && wk == 0 && mine) {
            float gate[4] = {0, 0, 0, 0}, up[4] = {0, 0, 0, 0};
            for (int i = 0; i < a.wk; i++) {
                float2 v = red[(warp + i) * 32 + lane], u = red[(warp + TEAM + i) * 32 + lane];
                gate[0] += v.x, gate[1] += v.y, up[0] += u.x, up[1] += u.y;
            }
            float g[2] = {0, 0};
            gv_results(gate, 1, 1, [&](int r, int, float v) { g[r / 8] = v; });
            gv_results(up, 1, 1, [&](int r, int, float v) {
                int row = tile * 16 + r;
                if (row < a.rows) a.act[(int64_t)choice * a.rows + row] = silu(g[r / 8]) * v;
            });
        }
        __syncthreads();
    }
}

bool cuda_one_up(struct kctx *c, const struct kop_experts_up *o, const struct pairs *p) {
    int64_t F = o->gate->rows, D = o->gate->cols, runs = ceil_div(D, GV_RUN);
    struct later *l = c->later;
    bool swiglu = l->swiglu_due; /* the other half will want it */
    l->swiglu_due = false;
    cuda_settle(c);
    l->swiglu_due = swiglu;
    if (type_is_dense(o->gate->type) || type_is_dense(o->up->type) || runs > ONE_RUNS) return false;
    struct one_up_args a = {};
    a.route = cuda_route_args(o);
    a.routed = !route_is_fast(a.route);
    if (a.route.n_used > 32) return false;
    a.mat[0] = few_mat(o->gate, 0), a.mat[1] = few_mat(o->up, 0);
    int run_bytes = std::max(a.mat[0].mat.run_stride, a.mat[1].mat.run_stride);
    int64_t tiles = ceil_div(F, 16);
    a.wk = (int)std::min<int64_t>(WARPS / 2, runs);
    a.groups = (int)ceil_div(tiles, WARPS / 2 / a.wk);
    int items = a.groups * a.route.n_used;
    int per = items > c->sms ? 2 : 1, limit = std::min(c->smem_block - STATIC_BYTES, 110 * 1024);
    int want = (int)(ceil_div(runs, a.wk) * ceil_div(items, per * c->sms));
    struct gv_plan plan = gv_plan(limit, WARPS, run_bytes, want, (int)runs, 1);
    if (plan.stage < runs) return false;
    if (a.routed) cuda_route(c, o, p);
    if (!cuda_image_is(c, o->x, D, 1, D)) gv_quantize(c, 0, o->x, D, 0, 1, 1, D);
    cuda_image_forget(c);
    a.rows = (int)F, a.cols = (int)D, a.ring = plan.ring, a.stage = plan.stage;
    a.seg = p->seg, a.list = p->list, a.image = (const uint8_t *)c->work, a.act = o->act;
    launch(c, one_up_kernel, (unsigned)std::min(items, per * c->sms), 32 * WARPS, (size_t)plan.smem,
           a);
    return true;
}

/* ---- down --------------------------------------------------------------------------------------
 */

struct one_down_args {
    struct few_mat down, shared; /* shared.w NULL: there is none */
    int rows, cols, shared_cols, U;
    int wk, team, ring;
    const int32_t *ids;
    const float *weights, *act; /* [U], [U, F] */
    const float *gate, *up;     /* the shared expert's; up NULL: gate is its activation already */
    float *y;
};

/* Units of work for a tile are (matrix, run): the shared expert's runs, then those of the chosen.
 */
static __global__ void __launch_bounds__(32 * WARPS, 2)
    one_down_kernel(const __grid_constant__ struct one_down_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    struct gv_smem s = gv_carve(smem, WARPS, a.ring);
    struct gv_ring ring;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wk = warp % a.wk, at_tile = warp / a.wk;
    int runs = (a.cols + GV_RUN - 1) / GV_RUN;
    int own = a.shared.w ? (a.shared_cols + GV_RUN - 1) / GV_RUN : 0, units = own;
    int tiles = (a.rows + 15) / 16, tile = (int)blockIdx.x * a.team + at_tile;
    bool mine = at_tile < a.team && tile < tiles;
    int64_t tile_bytes = (int64_t)(a.cols / a.down.mat.cell_cols) * a.down.mat.cell_bytes;
    gv_ring_init(s, &ring, max(a.down.mat.run_stride, own ? a.shared.mat.run_stride : 0));
    int id = -1, next = mine ? wk : INT32_MAX;
    auto request = [&]() {
        if (next >= units) return;
        if (next < own) {
            gv_issue(s, &ring,
                     a.shared.w +
                         (int64_t)tile * (a.shared_cols / a.shared.mat.cell_cols) *
                             a.shared.mat.cell_bytes +
                         (int64_t)next * a.shared.mat.run_stride,
                     gv_bytes(a.shared.mat, a.shared_cols, next));
        } else {
            int choice = (next - own) / runs, run = (next - own) - choice * runs;
            int expert = __shfl_sync(~0u, id, choice);
            gv_issue(s, &ring,
                     a.down.w + expert * a.down.w_mat + tile * tile_bytes +
                         (int64_t)run * a.down.mat.run_stride,
                     gv_bytes(a.down.mat, a.cols, run));
        }
        next += a.wk;
    };
    int asked = 0;
    for (; asked < ring.slots && next < units; asked++) request();
    gdc_trigger();
    /* a warp makes one run of the shared expert's x and some of the others' */
    int at = lane / 4 * 32 + lane % 4 * 4;
    auto load8 = [&](const float *p, int k, int cols, float(&v)[8]) {
        float4 e = make_float4(0, 0, 0, 0), f = e;
        if (k < cols) e = load_float4(p + k), f = load_float4(p + k + 16);
        v[0] = e.x, v[1] = e.y, v[2] = e.z, v[3] = e.w, v[4] = f.x, v[5] = f.y, v[6] = f.z,
        v[7] = f.w;
    };
    gdc_wait();
    float weight = 0;
    if (lane < a.U) id = a.ids[lane], weight = a.weights[lane];
#pragma unroll 1
    for (int unit = warp; unit < own + a.U * runs; unit += WARPS) {
        float v[8], u[8];
        if (unit < own) {
            load8(a.gate, unit * GV_RUN + at, a.shared_cols, v);
            if (a.up) load8(a.up, unit * GV_RUN + at, a.shared_cols, u);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (a.up) v[i] = silu(v[i]) * u[i];
        } else {
            int choice = (unit - own) / runs, run = (unit - own) - choice * runs;
            load8(a.act + (int64_t)choice * a.cols, run * GV_RUN + at, a.cols, v);
        }
        if (unit == warp) { /* while that is on its way */
            units += __shfl_sync(~0u, id, 0) >= 0 ? a.U * runs : 0;
            for (; asked < ring.slots && next < units; asked++) request();
        }
        gv_record(s.x + unit * GV_RECORD, v);
    }
    if (warp >= own + a.U * runs) { /* nothing of x was this warp's */
        units += __shfl_sync(~0u, id, 0) >= 0 ? a.U * runs : 0;
        for (; asked < ring.slots && next < units; asked++) request();
    }
    __syncthreads();
    float acc[4] = {0, 0, 0, 0};
    for (int unit = mine ? wk : units; unit < units; unit += a.wk) {
        const uint8_t *slot = gv_take(s, &ring);
        const uint8_t *x = s.x + unit * GV_RECORD;
        bool shared = unit < own;
        int choice = shared ? 0 : (unit - own) / runs;
        int k = (shared ? unit : (unit - own) - choice * runs) * GV_RUN;
        float part[4] = {0, 0, 0, 0}, f = shared ? 1.f : __shfl_sync(~0u, weight, choice);
        gv_run<1>(shared ? a.shared.mat.type : a.down.mat.type, part, slot, x, 0, 1,
                  min(8, ((shared ? a.shared_cols : a.cols) - k) / 32));
        acc[0] += f * part[0], acc[1] += f * part[1];
        __syncwarp();
        request();
    }
    float2 *red = (float2 *)s.red;
    red[warp * 32 + lane] = make_float2(acc[0], acc[1]);
    __syncthreads();
    if (wk != 0 || !mine) return;
    for (int i = 1; i < a.wk; i++) {
        float2 v = red[(warp + i) * 32 + lane];
        acc[0] += v.x, acc[1] += v.y;
    }
    gv_results(acc, 1, 1, [&](int r, int, float v) {
        if (tile * 16 + r < a.rows) a.y[tile * 16 + r] = v;
    });
}

bool cuda_one_down(struct kctx *c, const struct kop_experts_down *o) {
    const struct kmat *shared = o->shared_down;
    struct later *l = c->later;
    int64_t F = o->down->cols, D = o->down->rows, Fs = shared ? shared->cols : 0;
    int U = o->dims->n_used, runs = (int)(ceil_div(F, GV_RUN) * U + ceil_div(Fs, GV_RUN));
    if (type_is_dense(o->down->type) || (shared && type_is_dense(shared->type)) ||
        runs > ONE_RUNS || U > 32)
        return false;
    struct one_down_args a = {};
    a.down = few_mat(o->down, 0);
    if (shared) a.shared = few_mat(shared, 0);
    int run_bytes = std::max(a.down.mat.run_stride, shared ? a.shared.mat.run_stride : 0);
    int tiles = (int)ceil_div(D, 16);
    a.team = std::min(WARPS, (int)ceil_div(tiles, c->sms));
    a.wk = std::min(WARPS / a.team, runs);
    int limit = std::min(c->smem_block, runs <= 16 ? 110 * 1024 : 222 * 1024);
    struct gv_plan p = gv_plan(limit, WARPS, run_bytes, (int)ceil_div(runs, a.wk), runs, 1);
    if (p.stage < runs) return false;
    bool put_off = l->swiglu_due && shared && l->swiglu.act == o->shared_act &&
                   l->swiglu.width == Fs && l->swiglu.n_rows == 1;
    if (put_off) l->swiglu_due = false;
    cuda_settle(c);
    a.rows = (int)D, a.cols = (int)F, a.shared_cols = (int)Fs, a.U = U, a.ring = p.ring;
    a.ids = o->ids, a.weights = o->weights, a.act = o->act, a.y = o->y;
    a.gate = put_off ? l->swiglu.gate : o->shared_act;
    a.up = put_off ? l->swiglu.up : NULL;
    if (c->image.x == o->y) cuda_image_forget(c);
    launch(c, one_down_kernel, (unsigned)ceil_div(tiles, a.team), 32 * WARPS, (size_t)p.smem, a);
    return true;
}

void cuda_one_init(struct kctx *c) {
    allow_smem(one_up_kernel, (size_t)c->smem_block);
    allow_smem(one_down_kernel, (size_t)c->smem_block);
}
