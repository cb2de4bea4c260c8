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
#include "kernels/cuda/quant.cuh"

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
                        int n_used, const void *xh, enum gemm_mode mode) {
    int T = h->rows_of_step;
    int64_t w_mat = (int64_t)cuda_mat_bytes(h->w->type, 1, h->w->rows, h->w->cols);
    const uint8_t *w = (const uint8_t *)h->w->data;
    if (type_is_dense(h->w->type)) {
        launch(c, dense_pairs_kernel, dim3((unsigned)ceil_div(h->n, 8), (unsigned)(T * n_used)),
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
    g.segs_max = p->segs_max, g.x_div = h->x_div, g.mode = mode;
    cuda_gemm_grouped(c, &g);
}

void cuda_many_up(struct kctx *c, const struct kop_experts_up *o, const struct pairs *p) {
    int T = o->batch->n_rows, U = o->dims->n_used;
    int64_t F = o->gate->rows, D = o->gate->cols;
    bool dense = type_is_dense(o->gate->type) || type_is_dense(o->up->type);
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
        g.seg = p->seg, g.list = p->list, g.segs_max = p->segs_max, g.x_div = U;
        g.mode = GEMM_GATE_UP;
        cuda_gemm_grouped(c, &g);
        return;
    }
    run_product(c, &h, p, U, xh, GEMM_STORE);
    h.w = o->up;
    run_product(c, &h, p, U, xh, GEMM_TIMES_GATE);
}

void cuda_many_down(struct kctx *c, const struct kop_experts_down *o, const struct pairs *p,
                    int row0, int n) {
    int T = o->batch->n_rows, U = o->dims->n_used, F = (int)o->down->cols;
    void *xh = NULL;
    cuda_image_forget(c);
    if (!type_is_dense(o->down->type)) {
        xh = cuda_work(c, gemm_xh_bytes((int64_t)T * U, F));
        if (row0 == 0) cuda_gemm_convert(c, xh, o->act, F, 0, T * U, 1, F);
    }
    struct pair_product h = {};
    h.w = o->down, h.row0 = row0, h.n = n, h.x = o->act, h.x_row = F, h.x_div = 1;
    h.ids = o->ids, h.y = p->partial, h.y_row = n, h.rows_of_step = T;
    run_product(c, &h, p, U, xh, GEMM_STORE);
}
