/* kernels/cuda/matmul.cu: matmul and head_matmul: y[t][r] = sum_c W[r][c] x[t][c].
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: GV_JOBS products per launch (more are launched in turns).
 * Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * At most FEW_ROWS rows of x: one launch for all jobs (gemv.cu), which goes over the weights once
 * for eight rows, from the cache after the first. More rows, if the matrices give gemm.cu's blocks
 * of 128 weight rows to most of the chip, or very many: the tensor-core products of gemm.cu and,
 * for unquantised matrices, of gemm_dense.cu.
 */
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemv_job.cuh"
#include "kernels/cuda/plain.cuh"

#define FEW_ROWS  16 /* rows of x that are taken eight at a time, whatever the matrices */
#define SOME_ROWS 64 /* that are, where the matrices are small */
#define LARGE     ((int64_t)20 << 20) /* weights of one launch: not small */

/* ---- dispatch ----------------------------------------------------------------------------- */

static struct gemm_job many_job(const struct gv_job *j, int n_rows) {
    struct gemm_job g = {};
    g.w = j->w, g.x = j->x, g.y = j->y;
    g.w_head = j->w_head, g.x_head = j->x_head, g.y_head = j->y_head;
    g.x_row = j->x_row, g.y_row = j->y_row;
    g.type = j->type, g.rows = j->rows, g.cols = j->cols, g.heads = j->heads, g.n_rows = n_rows;
    return g;
}

static bool fills_chip(const struct gv_args *a) {
    int64_t weights = 0;
    for (int i = 0; i < a->n_jobs; i++) {
        if (a->job[i].heads > 1) return true;
        weights += (int64_t)a->job[i].rows * a->job[i].cols;
    }
    return weights >= LARGE;
}

static void products(struct kctx *c, struct gv_args *a) {
    if (a->n_jobs == 0 || a->n_rows == 0) return;
    if (a->n_rows <= FEW_ROWS || (a->n_rows <= SOME_ROWS && !fills_chip(a))) {
        gv_launch(c, a);
        return;
    }
    cuda_settle(c);
    struct gemm_job run[GEMM_JOBS];
    const struct gv_job *before = NULL; /* last quantised one: its x stands converted */
    for (int i = 0; i < a->n_jobs; i++) {
        const struct gv_job *j = &a->job[i];
        if (type_is_dense(j->type)) {
            struct gemm_job d = many_job(j, a->n_rows);
            cuda_gemm_dense(c, &d);
            continue;
        }
        bool same = before && before->x == j->x && before->x_row == j->x_row &&
                    before->cols == j->cols && j->heads == 1;
        int n = 0;
        for (int k = i; k < a->n_jobs && n < GEMM_JOBS;
             k++) { /* neighbours of one kind go together */
            const struct gv_job *o = &a->job[k];
            if (o->type != j->type || o->x != j->x || o->x_row != j->x_row || o->cols != j->cols ||
                (k > i && (o->heads != 1 || j->heads != 1)))
                break;
            run[n++] = many_job(o, a->n_rows);
        }
        cuda_gemm(c, run, n, same);
        before = j;
        i += n - 1;
    }
}

/* Types without tiles have a kernel of their own; of a width that other ranks have all of, nothing
 * is left, or zeros. */
static bool is_elsewhere(struct kctx *c, const struct kop_matmul *m) {
    if (m->w->rows > 0 && m->w->cols > 0 && !type_is_plain(m->w->type)) return false;
    if (m->w->rows == 0 || m->n_rows == 0) return true;
    if (m->w->cols == 0)
        cuda_plain_zero(c, m->y, m->y_stride, (int)m->w->rows, m->n_rows);
    else
        cuda_plain_product(c, m->w, m->x, m->x_stride, 0, m->y, m->y_stride, 0, m->n_rows);
    return true;
}

void cuda_matmul(struct kctx *c, const struct kop_matmul *jobs, int n_jobs) {
    for (int at = 0; at < n_jobs;) {
        struct gv_args a = {};
        a.n_rows = jobs[at].n_rows;
        for (; at < n_jobs && a.n_jobs < GV_JOBS && jobs[at].n_rows == a.n_rows; at++) {
            const struct kop_matmul *m = &jobs[at];
            CU_REQUIRE(m->w->count == 1);
            if (is_elsewhere(c, m)) continue;
            struct gv_job *j = &a.job[a.n_jobs++];
            *j = {};
            j->w = (const uint8_t *)m->w->data, j->x = m->x, j->y = m->y;
            j->x_row = m->x_stride, j->y_row = m->y_stride;
            j->mat = gv_mat(m->w->type);
            j->type = m->w->type, j->rows = (int)m->w->rows, j->cols = (int)m->w->cols;
            j->heads = 1;
        }
        products(c, &a);
    }
}

void cuda_head_matmul(struct kctx *c, const struct kop_head_matmul *m) {
    if (type_is_plain(m->w->type)) {
        cuda_plain_product(c, m->w, m->x, m->x_row, m->x_head, m->y, m->y_row, m->y_head,
                           m->n_rows);
        return;
    }
    struct gv_args a = {};
    a.n_jobs = 1;
    a.n_rows = m->n_rows;
    struct gv_job *j = &a.job[0];
    j->w = (const uint8_t *)m->w->data, j->x = m->x, j->y = m->y;
    j->w_head = (int64_t)cuda_mat_bytes(m->w->type, 1, m->w->rows, m->w->cols);
    j->x_head = m->x_head, j->y_head = m->y_head, j->x_row = m->x_row, j->y_row = m->y_row;
    j->mat = gv_mat(m->w->type);
    j->type = m->w->type, j->rows = (int)m->w->rows, j->cols = (int)m->w->cols;
    j->heads = (int)m->w->count;
    products(c, &a);
}
