/* kernels/cuda/experts_few.cu: routed experts of few rows: grouped gemv.
 *
 * Owns: nothing.  Called by: experts.cu.  Fails how: a CUDA error ends the process.
 * Limits: quantised experts; EXPERTS_FEW_ROWS rows.
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * Blocks take contiguous shares of the list of (segment, tiles), whose length only the device
 * knows, so that each expert's bytes are read once and by all multiprocessors.
 */
#include <algorithm>

#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/gemv_run.cuh"

#define WARPS 16 /* of a block, which has a multiprocessor to itself and keeps x there */
#define SMEM  (222 * 1024)

struct few_args {
    struct few_mat mat[2]; /* gate and up, or down alone */
    int rows, cols, wk;    /* of a matrix; warps per tile */
    int ring, stage;       /* bytes of a warp's ring; runs of x in a buffer, by the most rows */
    const int32_t *seg, *list;
    const uint8_t *image; /* x as records; row list[i] / x_div */
    int x_div;
    float *y; /* row list[i] */
    int64_t y_row;
};

/* MATS matrices side by side: with two, the upper half of the warps takes the second. A block's
 * items are (segment, group of tiles); its warps request weights across the borders of items. */
template <int MATS>
static __global__ void __launch_bounds__(32 * WARPS, 1)
    few_kernel(const __grid_constant__ struct few_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr int TEAM = WARPS / MATS;
    struct gv_smem s = gv_carve(smem, WARPS, a.ring);
    struct gv_ring ring;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, member = warp % TEAM;
    int wk = member % a.wk, at_tile = member / a.wk, team_tiles = TEAM / a.wk;
    const struct few_mat &m = a.mat[warp / TEAM];
    int tiles = (a.rows + 15) / 16, blocks = (tiles + team_tiles - 1) / team_tiles;
    int runs = (a.cols + GV_RUN - 1) / GV_RUN, x_row = gv_x_row(a.stage);
    bool resident = a.stage >= runs;
    int64_t tile_bytes = (int64_t)(a.cols / m.mat.cell_cols) * m.mat.cell_bytes;
    gv_ring_init(s, &ring, m.mat.run_stride);
    __syncthreads();
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
    uint32_t x_phase = 0;
    for (; item < last; item++) {
        int segment = item / blocks, tile = item % blocks * team_tiles + at_tile;
        const int32_t *seg = a.seg + 1 + 3 * segment, *list = a.list + seg[1];
        int n = seg[2];
        struct gv_x from = {a.image, runs, 0, 0, list, a.x_div};
        float acc[4] = {0, 0, 0, 0};
        int run = tile < tiles ? wk : runs;
        for (int run0 = 0; run0 < runs; run0 += a.stage) {
            int end = min(runs, run0 + a.stage);
            if (!resident || staged != segment) {
                if (staged >= 0) __syncthreads();
                gv_x_request(s, from, n, run0, end - run0, 0, 0, x_row);
                mbar_wait(s.x_bar, x_phase);
                x_phase ^= 1;
            }
            staged = segment;
            for (; run < end; run += a.wk) {
                const uint8_t *slot = gv_take(s, &ring);
                gv_run<8>(m.mat.type, acc, slot, s.x + (run - run0) * GV_RECORD, x_row, n,
                          min(8, (a.cols - run * GV_RUN) / 32));
                __syncwarp();
                request();
            }
        }
        /* sums of a tile's warps, in their order; then both matrices together */
        s.red[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        __syncthreads();
        if (warp < TEAM && wk == 0 && tile < tiles) {
            float up[4] = {0, 0, 0, 0};
            for (int i = 1; i < a.wk; i++) {
                float4 v = s.red[(warp + i) * 32 + lane];
                acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
            }
            for (int i = 0; MATS == 2 && i < a.wk; i++) {
                float4 v = s.red[(warp + TEAM + i) * 32 + lane];
                up[0] += v.x, up[1] += v.y, up[2] += v.z, up[3] += v.w;
            }
            float gate[4];
            int width = gv_width(n);
            auto keep_gate = [&](int r, int t, float v) { gate[t % 2 * 2 + r / 8] = v; };
            auto write = [&](int r, int t, float v) {
                int row = tile * 16 + r;
                if (MATS == 2) v = silu(gate[t % 2 * 2 + r / 8]) * v;
                if (row < a.rows) a.y[(int64_t)list[t] * a.y_row + row] = v;
            };
            if (MATS == 2) gv_results(acc, width, n, keep_gate);
            if (MATS == 2)
                gv_results(up, width, n, write);
            else
                gv_results(acc, width, n, write);
        }
        __syncthreads();
    }
}

static void few_launch(struct kctx *c, struct few_args *a, int mats, int n_rows, int segs) {
    int team = WARPS / mats, limit = std::min(c->smem_block, SMEM);
    int runs = (int)ceil_div(a->cols, GV_RUN), tiles = (int)ceil_div(a->rows, 16);
    a->wk = 1;
    while (a->wk < team && a->wk * 4 <= runs) a->wk *= 2;
    int run_bytes = std::max(a->mat[0].mat.run_stride, mats == 2 ? a->mat[1].mat.run_stride : 0);
    struct gv_plan p = gv_plan(limit, WARPS, run_bytes, 4, runs, std::min(n_rows, GV_ROWS));
    a->ring = p.ring, a->stage = p.stage;
    int64_t items = segs * ceil_div(tiles, team / a->wk);
    unsigned grid = (unsigned)std::min<int64_t>(items, c->sms);
    launch(c, mats == 2 ? few_kernel<2> : few_kernel<1>, grid, 32 * WARPS, (size_t)p.smem, *a);
}

void cuda_few_up(struct kctx *c, const struct kop_experts_up *o, const struct pairs *p) {
    int T = o->batch->n_rows;
    int64_t F = o->gate->rows, D = o->gate->cols;
    struct few_args a = {};
    a.mat[0] = few_mat(o->gate, 0), a.mat[1] = few_mat(o->up, 0);
    a.rows = (int)F, a.cols = (int)D;
    a.seg = p->seg, a.list = p->list;
    if (!cuda_image_is(c, o->x, D, T, D)) gv_quantize(c, 0, o->x, D, 0, T, 1, D);
    cuda_image_forget(c);
    a.image = (const uint8_t *)c->work;
    a.x_div = o->dims->n_used, a.y = o->act, a.y_row = F;
    few_launch(c, &a, 2, T, p->segs_max);
}

void cuda_few_down(struct kctx *c, const struct kop_experts_down *o, const struct pairs *p,
                   int row0, int n) {
    int T = o->batch->n_rows;
    int64_t F = o->down->cols;
    cuda_image_forget(c);
    if (row0 == 0) gv_quantize(c, 0, o->act, F, 0, T * o->dims->n_used, 1, F);
    struct few_args a = {};
    a.mat[0] = few_mat(o->down, row0);
    a.rows = n, a.cols = (int)F;
    a.seg = p->seg, a.list = p->list;
    a.image = (const uint8_t *)c->work;
    a.x_div = 1, a.y = p->partial, a.y_row = n;
    few_launch(c, &a, 1, T, p->segs_max);
}

void cuda_few_init(struct kctx *c) {
    allow_smem(few_kernel<1>, (size_t)c->smem_block);
    allow_smem(few_kernel<2>, (size_t)c->smem_block);
}
