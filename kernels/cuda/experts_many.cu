/* kernels/cuda/experts_many.cu: routed experts of many rows, and unquantised ones.
 *
 * Owns: nothing.  Called by: experts.cu.  Fails how: a CUDA error ends the process.
 * Limits: those of gemm.cu.  Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * Quantised experts are grouped products on the tensor cores (gemm.cu), gate and up in one launch
 * where they are of one type. Unquantised ones are an exception of small models: a warp per row of
 * the matrix and pair.
 */
#include "kernels/cuda/dense.cuh"
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/plain.cuh"

static __global__ void __launch_bounds__(256)
    dense_pairs_kernel(int type, const uint8_t *w, int64_t w_mat, int rows, int cols,
                       const int32_t *ids, const float *x, int64_t x_row, int x_div, float *y,
                       int64_t y_row, bool times_gate, int first, int count) {
    gdc_wait();
    int64_t pair = blockIdx.y;
    int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31, id = ids[pair] - first;
    if (id < 0 || id >= count || row >= rows) return;
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

/* Rows [row0, row0 + n) of one or two expert matrices for all pairs. */
struct pair_product {
    const struct kmat *w, *w2;
    enum gemm_mode mode;
    int row0, n;
    const float *x;
    int64_t x_row;
    int x_div;
    bool x_same; /* as that of the call before, which was the product's other rows */
    const int32_t *ids;
    float *y; /* y's column 0 is row0 */
    int64_t y_row;
    int rows_of_step, n_used, first;
};

/* x's rows as the grouped product wants them. */
static void *converted(struct kctx *c, const struct pair_product *h, const struct pairs *p,
                       bool wide) {
    int cols = (int)h->w->cols, rows = h->rows_of_step * (h->x_div == 1 ? h->n_used : 1);
    cuda_image_forget(c);
    c->x_form = wide ? X_WIDE : X_NARROW;
    void *xh = cuda_work(c, wide ? cuda_wide_x_bytes(p->list_max, 1, cols)
                                 : gemm_xh_bytes(rows, cols));
    if (h->x_same) return xh;
    if (wide)
        cuda_wide_gather(c, xh, h->x, h->x_row, cols, p->seg, p->list, p->list_max, h->x_div);
    else cuda_gemm_convert(c, xh, h->x, h->x_row, 0, rows, 1, cols);
    return xh;
}

static void run_product(struct kctx *c, const struct pair_product *h, const struct pairs *p) {
    int64_t w_mat = (int64_t)cuda_mat_bytes(h->w->type, 1, h->w->rows, h->w->cols);
    const uint8_t *w = (const uint8_t *)h->w->data;
    if (type_is_plain(h->w->type)) {
        struct plain_pairs pp = {};
        pp.w = h->w, pp.row0 = h->row0, pp.n = h->n, pp.x = h->x, pp.x_row = h->x_row;
        pp.x_div = h->x_div, pp.y = h->y, pp.y_row = h->y_row;
        pp.times_gate = h->mode == GEMM_TIMES_GATE;
        cuda_plain_pairs(c, &pp, p);
        return;
    }
    if (type_is_dense(h->w->type)) {
        launch(c, dense_pairs_kernel,
               dim3((unsigned)ceil_div(h->n, 8), (unsigned)(h->rows_of_step * h->n_used)), 256, 0,
               h->w->type, w + (int64_t)h->row0 * h->w->cols * (h->w->type == KT_F32 ? 4 : 2),
               w_mat, h->n, (int)h->w->cols, h->ids, h->x, h->x_row, h->x_div, h->y, h->y_row,
               h->mode == GEMM_TIMES_GATE, h->first, (int)h->w->count);
        return;
    }
    struct gemm_groups g = {};
    bool wide = p->aligned && h->mode != GEMM_TIMES_GATE && cuda_wide_takes(c, h->w->type);
    g.xh = converted(c, h, p, wide);
    g.w = w, g.w2 = h->w2 ? (const uint8_t *)h->w2->data : NULL;
    g.w_mat = w_mat, g.type = h->w->type, g.mode = h->mode;
    g.rows = (int)h->w->rows, g.cols = (int)h->w->cols, g.row0 = h->row0, g.n_rows = h->n;
    g.y = h->y, g.y_row = h->y_row, g.x_div = h->x_div;
    g.seg = p->seg, g.list = p->list, g.segs_max = p->segs_max, g.list_max = p->list_max;
    if (wide) cuda_wide_grouped(c, &g);
    else cuda_gemm_grouped(c, &g);
}

void cuda_many_up(struct kctx *c, const struct kop_experts_up *o, const struct pairs *p) {
    struct pair_product h = {};
    h.w = o->gate, h.n = (int)o->gate->rows, h.x = o->x, h.x_row = o->gate->cols;
    h.n_used = h.x_div = o->dims->n_used, h.ids = o->ids, h.y = o->act, h.y_row = o->gate->rows;
    h.rows_of_step = o->batch->n_rows, h.mode = GEMM_STORE, h.first = o->first;
    if (o->gate->type == o->up->type && !type_in_file_order(o->gate->type)) {
        h.w2 = o->up, h.mode = GEMM_GATE_UP;
        run_product(c, &h, p);
        return;
    }
    run_product(c, &h, p);
    h.w = o->up, h.mode = GEMM_TIMES_GATE;
    run_product(c, &h, p);
}

void cuda_many_down(struct kctx *c, const struct kop_experts_down *o, const struct pairs *p,
                    int row0, int n) {
    struct pair_product h = {};
    h.w = o->down, h.mode = GEMM_STORE, h.row0 = row0, h.n = n, h.x_same = row0 > 0;
    h.x = o->act, h.x_row = o->down->cols, h.x_div = 1, h.n_used = o->dims->n_used;
    h.ids = o->ids, h.y = p->partial, h.y_row = n, h.rows_of_step = o->batch->n_rows;
    h.first = o->first;
    run_product(c, &h, p);
}
