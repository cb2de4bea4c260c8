/* kernels/cuda/rows.cu: the operations that work on one row at a time, without products.
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.  Limits: none.
 * Tested by: tests/gpu/check_ops.c
 *
 * Formulas are kernels.h's. Each is bound by its launch, not by its bytes, so none is clever.
 */
#include "kernels/cuda/dense.cuh"
#include "kernels/cuda/file_block.cuh"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/later.cuh"
#include "kernels/cuda/plain.cuh"

/* ---- feed ------------------------------------------------------------------------------------ */

/* One more, up to 65535; rows of one step may feed the same token of one slot. */
static __device__ void count_up(uint16_t *at) {
    unsigned short seen = *(volatile unsigned short *)at;
    while (seen < UINT16_MAX) {
        unsigned short found = atomicCAS((unsigned short *)at, seen, (unsigned short)(seen + 1));
        if (found == seen) return;
        seen = found;
    }
}

static __global__ void feed_kernel(const __grid_constant__ struct kbatch b,
                                   const __grid_constant__ struct kseqs q) {
    gdc_wait();
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= b.n_rows || b.slot[t] < 0) return;
    int slot = b.slot[t], token = b.token[t];
    if (token == K_TOKEN_LAST) token = q.last_token[slot];
    /* A row without a finite logit sampled -1; its sequence is failed, its step must not be. */
    if (token < 0 || token >= q.vocab) token = 0;
    b.token[t] = token;
    int64_t at = (int64_t)slot * q.vocab + token;
    if (b.pos[t] < q.sampling[slot].n_prompt)
        q.seen_prompt[at] = 1;
    else
        count_up(&q.seen_output[at]);
}

void cuda_feed(struct kctx *c, const struct kop_feed *o) {
    cuda_settle(c);
    if (o->batch->n_rows == 0) return;
    launch(c, feed_kernel, (unsigned)ceil_div(o->batch->n_rows, 128), 128, 0, *o->batch, *o->seqs);
}

/* ---- angles ---------------------------------------------------------------------------------- */

static __global__ void angles_kernel(const __grid_constant__ struct kbatch b, int n,
                                     const double *freq, float *angles) {
    gdc_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = i / n;
    if (t >= b.n_rows) return;
    double s, c, angle = b.slot[t] < 0 ? 0 : (double)b.pos[t] * freq[i % n];
    sincos(angle, &s, &c);
    angles[2 * (int64_t)i] = (float)c;
    angles[2 * (int64_t)i + 1] = (float)s;
}

void cuda_angles(struct kctx *c, const struct kop_angles *o) {
    cuda_settle(c);
    int64_t n = (int64_t)o->batch->n_rows * o->n_pairs;
    if (n == 0) return;
    launch(c, angles_kernel, (unsigned)ceil_div(n, 128), 128, 0, *o->batch, o->n_pairs, o->freq,
           o->angles);
}

/* ---- embed ----------------------------------------------------------------------------------- */

/* The value of one element, rounded as the format's definition says (quant.h). */
static __device__ float cell_value(int type, const struct cell_shape &s, const uint8_t *cell,
                                   int r16, int b, int i) {
    auto at = [&](int k) { return (int)cell[scale_cell_byte(type, s.code_bytes, r16, k)]; };
    auto f16 = [&](int k) {
        return __half2float(__ushort_as_half((unsigned short)(at(k) | at(k + 1) << 8)));
    };
    const int8_t iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};
    float q = (float)cell_code(s, cell, r16, b, i);
    int g = 2 * b + i / 16; /* group of sixteen */
    switch (type) {
    case KT_Q4_0:
        return __fmul_rn(f16(0), q - 8);
    case KT_Q4_1:
    case KT_Q5_1:
        return __fadd_rn(__fmul_rn(f16(0), q), f16(2));
    case KT_Q5_0:
        return __fmul_rn(f16(0), q - 16);
    case KT_Q8_0:
        return __fmul_rn(f16(0), (float)(int8_t)(int)q);
    case KT_IQ4_NL:
        return __fmul_rn(f16(0), (float)iq4[(int)q]);
    case KT_Q2_K:
        return __fsub_rn(__fmul_rn(__fmul_rn(f16(16), (float)(at(g) & 15)), q),
                         __fmul_rn(f16(18), (float)(at(g) >> 4)));
    case KT_Q3_K: {
        int low = g < 8 ? at(g) & 15 : at(g - 8) >> 4, high = at(8 + g % 4) >> 2 * (g / 4) & 3;
        return __fmul_rn(__fmul_rn(f16(12), (float)((low | high << 4) - 32)), q - 4);
    }
    case KT_Q4_K:
    case KT_Q5_K: {
        int a = b < 4 ? at(4 + b) & 63 : (at(8 + b) & 15) | at(b) >> 6 << 4;
        int m = b < 4 ? at(8 + b) & 63 : at(8 + b) >> 4 | at(4 + b) >> 6 << 4;
        return __fsub_rn(__fmul_rn(__fmul_rn(f16(0), (float)a), q), __fmul_rn(f16(2), (float)m));
    }
    case KT_Q6_K:
        return __fmul_rn(__fmul_rn(f16(16), (float)(int8_t)at(g)), q - 32);
    case KT_IQ4_XS: {
        int sh = at(2) | at(3) << 8, ls = (at(4 + b / 2) >> 4 * (b % 2) & 15) | (sh >> 2 * b & 3)
                                                                                    << 4;
        return __fmul_rn(__fmul_rn(f16(0), (float)(ls - 32)), (float)iq4[(int)q]);
    }
    }
    return 0;
}

static __global__ void embed_kernel(const __grid_constant__ struct kbatch b, int type,
                                    const uint8_t *table, int64_t cols, float *h) {
    gdc_wait();
    int t = blockIdx.y;
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols) return;
    float v = 0;
    if (b.slot[t] >= 0) {
        int64_t row = b.token[t];
        struct cell_shape s = cell_shape(type);
        if (s.cols == 0) {
            int bytes = dense_bytes(type);
            v = dense_load(type, table + row * cols * bytes, col, 1).x;
        } else {
            const uint8_t *cell = table + (row / 16 * (cols / s.cols) + col / s.cols) * s.bytes;
            v = cell_value(type, s, cell, (int)(row % 16), (int)(col % s.cols / 32),
                           (int)(col % 32));
        }
    }
    h[t * cols + col] = v;
}

void cuda_embed(struct kctx *c, const struct kop_embed *o) {
    if (type_is_plain(o->table->type)) {
        cuda_plain_embed(c, o);
        return;
    }
    cuda_settle(c);
    cuda_image_forget(c);
    if (o->batch->n_rows == 0) return;
    launch(c, embed_kernel,
           dim3((unsigned)ceil_div(o->table->cols, 128), (unsigned)o->batch->n_rows), 128, 0,
           *o->batch, o->table->type, (const uint8_t *)o->table->data, o->table->cols, o->h);
}

/* ---- norm, swiglu, gather ----------------------------------------------------------------------
 */

#define NORM_THREADS 1024 /* most of a block: a warp for 256 columns */
#define NORM_RUNS    2    /* of 256 columns that a warp keeps in registers: widths up to 16384 */
#define IMAGE_ROWS   64   /* that are left as records too, for the next product */

/* One row per block; the row stays in registers between the sum and the scaling. image: the rows as
 * records (gemv.cuh), or NULL. */
static __global__ void __launch_bounds__(NORM_THREADS)
    norm_kernel(int width, float *h, const float *add, const float *gain, float eps, float *y,
                uint8_t *image) {
    __shared__ float red[33];
    float v[NORM_RUNS][8], g[NORM_RUNS][8];
    int warps = (int)blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int runs = (width + GV_RUN - 1) / GV_RUN, at = lane / 4 * 32 + lane % 4 * 4;
    auto read = [&](float(&to)[8], const float *p) {
        float4 a = *(const float4 *)p, b = *(const float4 *)(p + 16);
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    };
    auto write = [&](float *p, const float(&from)[8]) {
        *(float4 *)p = make_float4(from[0], from[1], from[2], from[3]);
        *(float4 *)(p + 16) = make_float4(from[4], from[5], from[6], from[7]);
    };
    gdc_trigger();
#pragma unroll
    for (int i = 0; i < NORM_RUNS; i++) { /* weights: no earlier kernel writes them */
        int k = (warp + i * warps) * GV_RUN + at;
#pragma unroll
        for (int e = 0; e < 8; e++) v[i][e] = g[i][e] = 0;
        if (k < width) read(g[i], gain + k);
    }
    h += (int64_t)blockIdx.x * width;
    y += (int64_t)blockIdx.x * width;
    if (add) add += (int64_t)blockIdx.x * width;
    gdc_wait();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NORM_RUNS; i++) {
        int k = (warp + i * warps) * GV_RUN + at;
        if (k >= width) continue;
        read(v[i], h + k);
        if (add) {
            float a[8];
            read(a, add + k);
#pragma unroll
            for (int e = 0; e < 8; e++) v[i][e] += a[e];
            write(h + k, v[i]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++) sum += v[i][e] * v[i][e];
    }
    float s = 1.f / sqrtf(block_sum(sum, red) / (float)width + eps);
#pragma unroll
    for (int i = 0; i < NORM_RUNS; i++) {
        int run = warp + i * warps, k = run * GV_RUN + at;
        if (run >= runs) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) v[i][e] = v[i][e] * s * g[i][e];
        if (k < width) write(y + k, v[i]);
        if (image) gv_record(image + ((int64_t)blockIdx.x * runs + run) * GV_RECORD, v[i]);
    }
}

#define NORM_ANY_THREADS 512

/* Any width. */
static __global__ void __launch_bounds__(NORM_ANY_THREADS)
    norm_any_kernel(int width, float *h, const float *add, const float *gain, float eps, float *y) {
    __shared__ float red[33];
    gdc_trigger();
    gdc_wait();
    h += (int64_t)blockIdx.x * width;
    y += (int64_t)blockIdx.x * width;
    if (add) add += (int64_t)blockIdx.x * width;
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += NORM_ANY_THREADS) {
        float v = h[i];
        if (add) h[i] = v += add[i];
        sum += v * v;
    }
    float scale = 1.f / sqrtf(block_sum(sum, red) / (float)width + eps);
    for (int i = threadIdx.x; i < width; i += NORM_ANY_THREADS) y[i] = h[i] * scale * gain[i];
}

void cuda_norm(struct kctx *c, const struct kop_norm *o) {
    cuda_settle(c);
    cuda_image_forget(c);
    if (o->n_rows == 0) return;
    uintptr_t ends = (uintptr_t)o->h | (uintptr_t)o->add | (uintptr_t)o->gain | (uintptr_t)o->y;
    int64_t runs = ceil_div(o->width, GV_RUN);
    if (o->width % 32 || runs > NORM_THREADS / 32 * NORM_RUNS || ends % 16) {
        launch(c, norm_any_kernel, (unsigned)o->n_rows, NORM_ANY_THREADS, 0, o->width, o->h, o->add,
               o->gain, o->eps, o->y);
        return;
    }
    uint8_t *image = NULL;
    if (o->n_rows <= IMAGE_ROWS) {
        image = (uint8_t *)cuda_work(c, gv_image_bytes(o->n_rows, o->width));
        cuda_image_remember(c, o->y, o->width, o->n_rows, o->width);
    }
    launch(c, norm_kernel, (unsigned)o->n_rows, (unsigned)(32 * (runs < 32 ? runs : 32)), 0,
           o->width, o->h, o->add, o->gain, o->eps, o->y, image);
}

static __global__ void swiglu_kernel(const __grid_constant__ struct swiglu_args a) {
    gdc_trigger();
    gdc_wait();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (int64_t)a.n_rows * a.width) a.act[i] = silu(a.gate[i]) * a.up[i];
}

void cuda_swiglu_launch(struct kctx *c, const struct swiglu_args *a) {
    launch(c, swiglu_kernel, (unsigned)ceil_div((int64_t)a->n_rows * a->width, 256), 256, 0, *a);
}

void cuda_swiglu(struct kctx *c, const struct kop_swiglu *o) {
    struct swiglu_args a = {o->n_rows, o->width, o->gate, o->up, o->act};
    cuda_settle(c);
    if (o->n_rows == 0 || o->width == 0) return;
    if (c->image.x == o->act) cuda_image_forget(c);
    if (o->n_rows <= LATER_ROWS)
        c->later->swiglu = a, c->later->swiglu_due = true;
    else
        cuda_swiglu_launch(c, &a);
}

static __global__ void gather_kernel(const int32_t *out_row, int width, const float *x, float *y) {
    gdc_wait();
    int row = out_row[blockIdx.y], i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width) y[(int64_t)blockIdx.y * width + i] = row < 0 ? 0 : x[(int64_t)row * width + i];
}

void cuda_gather(struct kctx *c, const struct kop_gather *o) {
    cuda_settle(c);
    cuda_image_forget(c);
    if (o->batch->n_out == 0) return;
    launch(c, gather_kernel, dim3((unsigned)ceil_div(o->width, 256), (unsigned)o->batch->n_out),
           256, 0, o->batch->out_row, o->width, o->x, o->y);
}
