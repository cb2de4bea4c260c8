/* kernels/cuda/plain.cu: products with the types that have no tiles. See plain.cuh.
 *
 * Owns: a copy of the codebooks on the device.  Called by: matmul.cu, experts_many.cu, rows.cu.
 * Fails how: a CUDA error ends the process.  Limits: none.
 * Tested by: tests/gpu/check_ops.c
 *
 * The plain way: matrices keep the file's order, a warp has a row of one, a lane decodes four
 * elements at a time by the formulas of quant.c and multiplies them with up to eight rows of x in
 * float32. Codes that name vectors do not fit the tiles of quant.cuh, where a code is a number;
 * files with such types are the smallest of a model, so they are served rather than raced. A weight
 * is read once for eight rows of x; the tables (33 KB) stay in the first-level cache.
 */
#include "kernels/cuda/plain.cuh"

#define THREADS 256 /* a warp to a row */
#define ROWS    (THREADS / 32)
#define X_ROWS  8   /* of x, for each decoded weight */

static __device__ struct kcodebooks books;

static __device__ __forceinline__ uint32_t u16_at(const uint8_t *p) { return p[0] | p[1] << 8; }
static __device__ __forceinline__ uint32_t u32_at(const uint8_t *p) {
    return u16_at(p) | u16_at(p + 2) << 16;
}
static __device__ __forceinline__ float f16_bits(uint32_t bits) {
    return __half2float(__ushort_as_half((unsigned short)bits));
}
static __device__ __forceinline__ float f16_at(const uint8_t *p) { return f16_bits(u16_at(p)); }

/* Seven sign bits and the one that makes their number even. */
static __device__ __forceinline__ uint32_t even_signs(uint32_t code) {
    return code | (uint32_t)(__popc(code) & 1) << 7;
}

/* Four elements at e, negated where a low bit of signs is set. */
static __device__ __forceinline__ float4 signed_four(float scale, const int8_t *e, uint32_t signs) {
    char4 v = *(const char4 *)e;
    float4 r = make_float4(scale * v.x, scale * v.y, scale * v.z, scale * v.w);
    if (signs & 1) r.x = -r.x;
    if (signs & 2) r.y = -r.y;
    if (signs & 4) r.z = -r.z;
    if (signs & 8) r.w = -r.w;
    return r;
}

static __device__ __forceinline__ float4 shifted_four(float scale, const int8_t *e, bool below) {
    char4 v = *(const char4 *)e;
    float d = below ? -0.125f : 0.125f;
    return make_float4(scale * (v.x + d), scale * (v.y + d), scale * (v.z + d), scale * (v.w + d));
}

/* Values of four E2M1 codes, doubled; code j in the low half of byte j. */
static __device__ __forceinline__ float4 e2m1_four(float scale, uint32_t codes) {
    const uint32_t t0 = 0x03020100, t1 = 0x0c080604; /* 0 1 2 3, 4 6 8 12 */
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t code = codes >> 8 * j & 15;
        float m = scale * (float)(__byte_perm(t0, t1, code & 7) & 255);
        v[j] = code & 8 ? -m : m;
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* Elements k..k + 3 of a row of blocks, k a multiple of four: see quant.c for the formulas. */
template <int TYPE> static __device__ __forceinline__ float4 four(const uint8_t *row, int k) {
    constexpr int elems = TYPE == KT_MXFP4 ? 32 : TYPE == KT_NVFP4 ? 64 : 256;
    constexpr int bytes = TYPE == KT_IQ2_XXS  ? 66
                          : TYPE == KT_IQ2_XS ? 74
                          : TYPE == KT_IQ2_S  ? 82
                          : TYPE == KT_IQ3_XXS ? 98
                          : TYPE == KT_IQ3_S  ? 110
                          : TYPE == KT_IQ1_S  ? 50
                          : TYPE == KT_IQ1_M  ? 56
                          : TYPE == KT_MXFP4  ? 17
                                              : 36;
    const uint8_t *b = row + (int64_t)(k / elems) * bytes;
    const int i = k % elems, e = i / 8, half = i & 4; /* eight e, its lower or upper four */
    if constexpr (TYPE == KT_MXFP4) {
        float d = __uint_as_float(b[0] < 2 ? 0x00200000u << b[0] : (uint32_t)(b[0] - 1) << 23);
        return e2m1_four(d, u32_at(b + 1 + i % 16) >> (i < 16 ? 0 : 4));
    } else if constexpr (TYPE == KT_NVFP4) {
        return e2m1_four(books.nvfp4[b[i / 16]], u32_at(b + 4 + i / 16 * 8 + i % 8) >> (i & 8 ? 4 : 0));
    } else if constexpr (TYPE == KT_IQ2_XXS) {
        const uint8_t *p = b + 2 + 8 * (i / 32);
        uint32_t aux = u32_at(p + 4), signs = even_signs(aux >> 7 * (e & 3) & 127);
        float scale = f16_at(b) * (0.5f + (float)(aux >> 28)) * 0.25f;
        return signed_four(scale, books.iq2_xxs[p[e & 3]] + half, signs >> half);
    } else if constexpr (TYPE == KT_IQ2_XS) {
        uint32_t q = u16_at(b + 2 + 2 * e), sc = b[66 + e / 4] >> 4 * (e % 4 / 2) & 15;
        float scale = f16_at(b) * (0.5f + (float)sc) * 0.25f;
        return signed_four(scale, books.iq2_xs[q & 511] + half, even_signs(q >> 9) >> half);
    } else if constexpr (TYPE == KT_IQ2_S) {
        uint32_t index = b[2 + e] | (b[66 + e / 4] >> 2 * (e % 4) & 3) << 8;
        uint32_t sc = b[74 + e / 4] >> 4 * (e % 4 / 2) & 15;
        float scale = f16_at(b) * (0.5f + (float)sc) * 0.25f;
        return signed_four(scale, books.iq2_s[index] + half, (uint32_t)b[34 + e] >> half);
    } else if constexpr (TYPE == KT_IQ3_XXS) {
        uint32_t aux = u32_at(b + 66 + 4 * (i / 32));
        float scale = f16_at(b) * (0.5f + (float)(aux >> 28)) * 0.5f;
        return signed_four(scale, books.iq3_xxs[b[2 + i / 4]],
                           even_signs(aux >> 7 * (e & 3) & 127) >> half);
    } else if constexpr (TYPE == KT_IQ3_S) {
        int q = i / 4;
        uint32_t index = b[2 + q] | (b[66 + q / 8] >> q % 8 & 1) << 8;
        uint32_t sc = b[106 + q / 16] >> 4 * (q % 16 / 8) & 15;
        return signed_four(f16_at(b) * (float)(1 + 2 * sc), books.iq3_s[index],
                           (uint32_t)b[74 + e] >> half);
    } else if constexpr (TYPE == KT_IQ1_S) {
        uint32_t qh = u16_at(b + 34 + 2 * (e / 4)), index = b[2 + e] | (qh >> 3 * (e % 4) & 7) << 8;
        float scale = f16_at(b) * (float)(2 * (qh >> 12 & 7) + 1);
        return shifted_four(scale, books.iq1[index] + half, qh >> 15);
    } else {
        uint32_t bits = b[49] >> 4 | (b[51] & 0xF0) | (b[53] & 0xF0) << 4 | (b[55] & 0xF0) << 8;
        uint32_t h = b[32 + e / 2] >> 4 * (e % 2), index = b[e] | (h & 7) << 8;
        uint32_t sc = u16_at(b + 48 + 2 * (e / 8)) >> 3 * (e % 8 / 2) & 7;
        return shifted_four(f16_bits(bits) * (float)(2 * sc + 1), books.iq1[index] + half, h & 8);
    }
}

/* ---- products ------------------------------------------------------------------------------ */

/* acc[j] = row . x_of(j) for j < n <= X_ROWS; every lane has the sums. */
template <int TYPE, typename F>
static __device__ __forceinline__ void row_products(float (&acc)[X_ROWS], const uint8_t *row,
                                                    int cols, int n, F x_of) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < X_ROWS; j++) acc[j] = 0;
    for (int k = lane * 4; k < cols; k += 128) {
        float4 a = four<TYPE>(row, k);
#pragma unroll
        for (int j = 0; j < X_ROWS; j++) {
            if (j >= n) break;
            float4 b = load_float4(x_of(j) + k);
            acc[j] += a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
        }
    }
#pragma unroll
    for (int j = 0; j < X_ROWS; j++)
        if (j < n) acc[j] = warp_sum(acc[j]);
}

struct product_args {
    const uint8_t *w;
    const float *x;
    float *y;
    int64_t w_head, w_row, x_head, x_row, y_head, y_row;
    int rows, cols, n_rows, scales;
    const float *scale;
};

/* The factor of matrix `at`: see struct kmat. */
static __device__ __forceinline__ float scale_of(const float *scale, int scales, int at) {
    return scales == 0 ? 1.f : scale[scales == 1 ? 0 : at];
}

template <int TYPE>
static __global__ void __launch_bounds__(THREADS)
    product_kernel(const __grid_constant__ struct product_args a) {
    gdc_trigger();
    gdc_wait();
    int row = blockIdx.x * ROWS + (threadIdx.x >> 5), t0 = blockIdx.y * X_ROWS, head = blockIdx.z;
    if (row >= a.rows) return;
    int n = min(X_ROWS, a.n_rows - t0);
    const float *x = a.x + head * a.x_head + t0 * a.x_row;
    float *y = a.y + head * a.y_head + t0 * a.y_row + row, acc[X_ROWS];
    row_products<TYPE>(acc, a.w + head * a.w_head + row * a.w_row, a.cols, n,
                       [&](int j) { return x + j * a.x_row; });
    float scale = scale_of(a.scale, a.scales, head);
#pragma unroll
    for (int j = 0; j < X_ROWS; j++)
        if ((threadIdx.x & 31) == j && j < n) y[j * a.y_row] = scale * acc[j];
}

struct pairs_args {
    const uint8_t *w;
    const float *x;
    float *y;
    const int32_t *seg, *list;
    int64_t w_mat, w_row, x_row, y_row;
    int n, cols, x_div, scales;
    const float *scale;
    bool times_gate;
};

template <int TYPE>
static __global__ void __launch_bounds__(THREADS)
    pairs_kernel(const __grid_constant__ struct pairs_args a) {
    gdc_trigger();
    gdc_wait();
    int row = blockIdx.x * ROWS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if ((int)blockIdx.y >= a.seg[0] || row >= a.n) return;
    const int32_t *seg = a.seg + 1 + 3 * blockIdx.y, *list = a.list + seg[1];
    const uint8_t *w = a.w + seg[0] * a.w_mat + row * a.w_row;
    float scale = scale_of(a.scale, a.scales, seg[0]);
    for (int at = 0; at < seg[2]; at += X_ROWS) {
        float acc[X_ROWS];
        int n = min(X_ROWS, seg[2] - at);
        row_products<TYPE>(acc, w, a.cols, n,
                           [&](int j) { return a.x + list[at + j] / a.x_div * a.x_row; });
#pragma unroll
        for (int j = 0; j < X_ROWS; j++) {
            if (lane != j || j >= n) continue;
            float *y = a.y + list[at + j] * a.y_row + row;
            *y = a.times_gate ? silu(*y) * (scale * acc[j]) : scale * acc[j];
        }
    }
}

template <int TYPE>
static __global__ void __launch_bounds__(128)
    embed_kernel(const __grid_constant__ struct kbatch b, const uint8_t *table, int64_t row_bytes,
                 int cols, const float *scale, float *h) {
    gdc_wait();
    int t = blockIdx.y, k = (blockIdx.x * 128 + threadIdx.x) * 4;
    if (k >= cols) return;
    float4 v = make_float4(0, 0, 0, 0);
    if (b.slot[t] >= 0) v = four<TYPE>(table + b.token[t] * row_bytes, k);
    float *y = h + (int64_t)t * cols + k;
    float s = scale ? *scale : 1.f;
    y[0] = s * v.x, y[1] = s * v.y, y[2] = s * v.z, y[3] = s * v.w;
}

static __global__ void zero_kernel(float *y, int64_t y_row, int n) {
    gdc_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[blockIdx.y * y_row + i] = 0;
}

/* ---- dispatch ------------------------------------------------------------------------------ */

/* f(std::integral_constant<int, type>) for the type at run time. */
template <typename F> static void with_type(int type, F f) {
    switch (type) {
#define X(t)                                                                                       \
    case t: f(std::integral_constant<int, t>()); return;
        X(KT_IQ2_XXS) X(KT_IQ2_XS) X(KT_IQ2_S) X(KT_IQ3_XXS) X(KT_IQ3_S) X(KT_IQ1_S) X(KT_IQ1_M)
        X(KT_MXFP4) X(KT_NVFP4)
#undef X
    }
    CU_REQUIRE(!"a type without tiles");
}

void cuda_plain_product(struct kctx *c, const struct kmat *w, const float *x, int64_t x_row,
                        int64_t x_head, float *y, int64_t y_row, int64_t y_head, int n_rows) {
    struct product_args a = {};
    if (n_rows == 0) return;
    cuda_settle(c);
    cuda_image_forget(c);
    a.w = (const uint8_t *)w->data, a.x = x, a.y = y;
    a.w_head = (int64_t)cuda_mat_bytes(w->type, 1, w->rows, w->cols);
    a.w_row = ktype_row_bytes(w->type, w->cols);
    a.x_head = x_head, a.x_row = x_row, a.y_head = y_head, a.y_row = y_row;
    a.rows = (int)w->rows, a.cols = (int)w->cols, a.n_rows = n_rows;
    a.scales = w->scales, a.scale = w->scale;
    dim3 grid((unsigned)ceil_div(w->rows, ROWS), (unsigned)ceil_div(n_rows, X_ROWS),
              (unsigned)w->count);
    with_type(w->type, [&](auto t) { launch(c, product_kernel<t>, grid, THREADS, 0, a); });
}

void cuda_plain_pairs(struct kctx *c, const struct plain_pairs *h, const struct pairs *p) {
    struct pairs_args a = {};
    cuda_settle(c);
    cuda_image_forget(c);
    a.w_mat = (int64_t)cuda_mat_bytes(h->w->type, 1, h->w->rows, h->w->cols);
    a.w_row = ktype_row_bytes(h->w->type, h->w->cols);
    a.w = (const uint8_t *)h->w->data + h->row0 * a.w_row;
    a.x = h->x, a.x_row = h->x_row, a.x_div = h->x_div, a.y = h->y, a.y_row = h->y_row;
    a.seg = p->seg, a.list = p->list, a.n = h->n, a.cols = (int)h->w->cols;
    a.times_gate = h->times_gate, a.scales = h->w->scales, a.scale = h->w->scale;
    dim3 grid((unsigned)ceil_div(h->n, ROWS), (unsigned)p->segs_max);
    with_type(h->w->type, [&](auto t) { launch(c, pairs_kernel<t>, grid, THREADS, 0, a); });
}

void cuda_plain_zero(struct kctx *c, float *y, int64_t y_row, int n, int n_rows) {
    if (n == 0 || n_rows == 0) return;
    cuda_settle(c);
    launch(c, zero_kernel, dim3((unsigned)ceil_div(n, 256), (unsigned)n_rows), 256, 0, y, y_row, n);
}

void cuda_plain_embed(struct kctx *c, const struct kop_embed *o) {
    const struct kmat *w = o->table;
    cuda_settle(c);
    cuda_image_forget(c);
    if (o->batch->n_rows == 0) return;
    dim3 grid((unsigned)ceil_div(w->cols, 512), (unsigned)o->batch->n_rows);
    with_type(w->type, [&](auto t) {
        launch(c, embed_kernel<t>, grid, 128, 0, *o->batch, (const uint8_t *)w->data,
               ktype_row_bytes(w->type, w->cols), (int)w->cols,
               w->scales ? w->scale : NULL, o->h);
    });
}

void cuda_plain_init(struct kctx *c) {
    CU(cudaMemcpyToSymbolAsync(books, &kcodebooks, sizeof kcodebooks, 0, cudaMemcpyHostToDevice,
                               c->stream));
    CU(cudaStreamSynchronize(c->stream));
}
