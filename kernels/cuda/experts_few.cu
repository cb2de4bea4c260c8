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
#include "kernels/cuda/gemv.cuh"

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
    a.x_div = o->dims->n_used, a.n_rows = T, a.y = o->act, a.y_row = F;
    few_launch(c, &a, 2, p->segs_max);
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
    a.x_div = 1, a.n_rows = T, a.y = p->partial, a.y_row = n;
    few_launch(c, &a, 1, p->segs_max);
}

void cuda_few_init(struct kctx *c) {
    size_t most = (size_t)std::min(c->smem_block, GV_SMEM);
    allow_smem(few_kernel<1>, most);
    allow_smem(few_kernel<2>, most);
}
