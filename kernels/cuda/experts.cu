/* kernels/cuda/experts.cu: the two halves of the mixture of experts.
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: EXPERTS_MAX experts; experts_down must follow its experts_up with the scratch untouched.
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * Rows are routed and their (row, choice) pairs sorted by expert (route.cu), then multiplied by
 * experts_few.cu or experts_many.cu, as the number of rows asks. Each pair's result stands in a
 * place of its own and is added up in the order of choices by a last kernel, so nothing depends on
 * how the pairs were dealt out. The down projections are done in slices of rows so that these
 * results stay within PARTIAL_BYTES.
 */
#include <algorithm>

#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemv.cuh"

#define PARTIAL_BYTES ((size_t)256 << 20)
#define SLICE_ROWS    256 /* down rows are sliced at multiples of it */

static size_t align256(size_t n) { return (n + 255) / 256 * 256; }

static int segs_max(const struct kdims *d, int rows) {
    int pairs = rows * d->n_used, width = rows <= EXPERTS_FEW_ROWS ? GV_ROWS : GEMM_COLS;
    return std::min(pairs, d->n_experts + pairs / width);
}

/* Many rows: each expert's pairs begin at a multiple of eight. */
static size_t list_places(const struct kdims *d, int rows) {
    return (size_t)rows * (size_t)d->n_used + 7 * (size_t)d->n_experts;
}

static int slice_rows(int64_t pairs, int64_t rows) {
    int64_t fit = (int64_t)(PARTIAL_BYTES / sizeof(float)) / pairs / SLICE_ROWS * SLICE_ROWS;
    return (int)std::min(rows, std::max<int64_t>(fit, SLICE_ROWS));
}

static size_t seg_bytes(const struct kdims *d, int rows) {
    int most = std::max(segs_max(d, rows), segs_max(d, std::min(rows, EXPERTS_FEW_ROWS)));
    return align256((1 + 3 * (size_t)most) * sizeof(int32_t));
}

size_t cuda_experts_scratch(const struct kdims *d, const struct kbounds *b) {
    if (d->n_experts == 0 || b->rows == 0) return 0;
    size_t n = (size_t)b->rows * (size_t)d->n_used;
    size_t partial = n * (size_t)slice_rows((int64_t)n, d->d_model);
    /* fewer rows may take more columns at once */
    partial = std::max(partial, std::min(n * (size_t)d->d_model, PARTIAL_BYTES / sizeof(float)));
    return seg_bytes(d, b->rows) + align256(list_places(d, b->rows) * sizeof(int32_t)) +
           partial * sizeof(float);
}

static struct pairs pairs_at(dptr scratch, const struct kdims *d, int rows) {
    struct pairs p;
    uint8_t *at = (uint8_t *)scratch;
    p.seg = (int32_t *)at;
    at += seg_bytes(d, rows);
    p.list = (int32_t *)at;
    at += align256(list_places(d, rows) * sizeof(int32_t));
    p.partial = (float *)at;
    p.segs_max = segs_max(d, rows), p.list_max = (int)list_places(d, rows);
    p.aligned = rows > EXPERTS_FEW_ROWS;
    return p;
}

/* All experts are here, and in tiles: what experts_one.cu is written for. */
static bool is_whole(const struct kdims *d, const struct kmat *m) {
    return m->count == d->n_experts && !type_is_plain(m->type);
}

void cuda_experts_up(struct kctx *c, const struct kop_experts_up *o) {
    int T = o->batch->n_rows;
    if (T == 0) return;
    struct pairs p = pairs_at(o->scratch, o->dims, T);
    bool whole = is_whole(o->dims, o->gate) && is_whole(o->dims, o->up);
    if (T == 1 && whole && cuda_one_up(c, o, &p)) return;
    cuda_settle(c);
    cuda_route(c, o, &p);
    bool dense = type_in_file_order(o->gate->type) || type_in_file_order(o->up->type);
    if (T <= EXPERTS_FEW_ROWS && !dense) cuda_few_up(c, o, &p);
    else cuda_many_up(c, o, &p);
}

/* y[t][row0 + r] = sum_j weights[t][j] partial[t * U + j][r]  (+ y, the shared expert's share) */
static __global__ void __launch_bounds__(256)
    combine_kernel(const int32_t *ids, const float *weights, const float *partial, float *y, int U,
                   int D, int row0, int n, bool add, int first, int count) {
    gdc_wait();
    int t = blockIdx.y, r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= n) return;
    float sum = 0;
    for (int j = 0; j < U; j++) {
        int64_t pair = (int64_t)t * U + j;
        if ((unsigned)(ids[pair] - first) >= (unsigned)count) continue;
        sum = fmaf(weights[pair], partial[pair * n + r], sum);
    }
    float *out = y + (int64_t)t * D + row0 + r;
    *out = add ? sum + *out : sum;
}

void cuda_experts_down(struct kctx *c, const struct kop_experts_down *o) {
    int T = o->batch->n_rows, U = o->dims->n_used, D = (int)o->down->rows;
    if (T == 0) return;
    const struct kmat *beside = o->shared_down;
    bool shared = beside && beside->cols > 0; /* else other ranks have all of it */
    bool whole = is_whole(o->dims, o->down) && (!beside || (shared && !type_is_plain(beside->type)));
    if (T == 1 && whole && cuda_one_down(c, o)) return;
    cuda_settle(c);
    struct pairs p = pairs_at(o->scratch, o->dims, T);
    if (shared) {
        struct kop_matmul m = {};
        m.w = o->shared_down, m.x = o->shared_act, m.y = o->y;
        m.x_stride = o->shared_down->cols, m.y_stride = D, m.n_rows = T;
        cuda_matmul(c, &m, 1);
    }
    bool few = T <= EXPERTS_FEW_ROWS && !type_in_file_order(o->down->type);
    int slice = slice_rows((int64_t)T * U, D);
    for (int row0 = 0; row0 < D; row0 += slice) {
        int n = std::min(slice, D - row0);
        if (few) cuda_few_down(c, o, &p, row0, n);
        else cuda_many_down(c, o, &p, row0, n);
        launch(c, combine_kernel, dim3((unsigned)ceil_div(n, 256), (unsigned)T), 256, 0, o->ids,
               o->weights, p.partial, o->y, U, D, row0, n, shared, o->first, (int)o->down->count);
    }
}

void cuda_experts_init(struct kctx *c) {
    cuda_few_init(c);
    cuda_one_init(c);
}
