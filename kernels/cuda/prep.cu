/* kernels/cuda/prep.cu: attn_prep and rope: norms, rotation and cache rows between the projections.
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: r_kv + d_rope and ix_dim at most PREP_WIDTH.  Tested by: tests/gpu/check_ops.c
 *
 * Caches hold half precision (11 bits; values beyond ±65504 are cut off) unless the process was
 * asked for float32: a normed latent is of size one, so attention loses about 2e-4 of a score.
 */
#include "kernels/cuda/cache.cuh"

#define PREP_THREADS 256
#define PREP_WIDTH   2048

struct prep_args {
    const int32_t *pos, *slot, *page_table;
    int max_pages, r_q, r_kv, d_rope, ix_dim;
    bool interleaved;
    float eps, ix_eps;
    const float *angles;
    float *q_a;
    const float *q_norm, *kv, *kv_norm, *index_key, *ik_gain, *ik_bias;
    void *latent, *index;
};

/* Rotated value of element i of a row of `width` values whose first (or only) P rotate. */
static __device__ __forceinline__ float rotated(const float *x, int i, int P, const float *angles,
                                                bool interleaved) {
    int pair = interleaved ? i / 2 : i % (P / 2);
    bool second = interleaved ? i % 2 : i >= P / 2;
    float a = x[interleaved ? i & ~1 : pair], b = x[interleaved ? i | 1 : pair + P / 2];
    float c = angles[2 * pair], s = angles[2 * pair + 1];
    return second ? __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c))
                  : __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
}

static __device__ float rms_scale(const float *x, int width, float eps, float *red) {
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += PREP_THREADS) sum += x[i] * x[i];
    return 1.f / sqrtf(block_sum(sum, red) / (float)width + eps);
}

/* Block (t, part): 0 the latent and shared key, 1 the query's latent, 2 the indexer's key. */
template <typename E>
static __global__ void __launch_bounds__(PREP_THREADS)
    prep_kernel(const __grid_constant__ struct prep_args a) {
    __shared__ float red[33], row[PREP_WIDTH];
    int t = blockIdx.x, part = blockIdx.y, P = a.d_rope;
    gdc_trigger();
    gdc_wait();
    if (a.slot[t] < 0) return;
    const float *angles = a.angles + (int64_t)t * P;
    if (part == 1) {
        if (!a.q_a) return;
        float *x = a.q_a + (int64_t)t * a.r_q, scale = rms_scale(x, a.r_q, a.eps, red);
        for (int i = threadIdx.x; i < a.r_q; i += PREP_THREADS) x[i] = x[i] * scale * a.q_norm[i];
        return;
    }
    int64_t at = cache_row(a.page_table, a.max_pages, a.slot[t], a.pos[t]);
    if (part == 0) {
        int R = a.r_kv;
        const float *x = a.kv + (int64_t)t * (R + P);
        E *out = (E *)a.latent + at * (R + P);
        float scale = rms_scale(x, R, a.eps, red);
        for (int i = threadIdx.x; i < R; i += PREP_THREADS)
            out[i] = cache_element<E>(x[i] * scale * a.kv_norm[i]);
        for (int i = threadIdx.x; i < P; i += PREP_THREADS)
            out[R + i] = cache_element<E>(rotated(x + R, i, P, angles, true));
        return;
    }
    if (!a.index_key) return;
    int J = a.ix_dim;
    const float *x = a.index_key + (int64_t)t * J;
    E *out = (E *)a.index + at * J;
    float sum = 0, square = 0;
    for (int i = threadIdx.x; i < J; i += PREP_THREADS) sum += x[i];
    float mean = block_sum(sum, red) / (float)J;
    for (int i = threadIdx.x; i < J; i += PREP_THREADS) square += (x[i] - mean) * (x[i] - mean);
    float inverse = 1.f / sqrtf(block_sum(square, red) / (float)J + a.ix_eps);
    for (int i = threadIdx.x; i < J; i += PREP_THREADS)
        row[i] = (x[i] - mean) * inverse * a.ik_gain[i] + a.ik_bias[i];
    __syncthreads();
    for (int i = threadIdx.x; i < J; i += PREP_THREADS)
        out[i] = cache_element<E>(i < P ? rotated(row, i, P, angles, a.interleaved) : row[i]);
}

void cuda_attn_prep(struct kctx *c, const struct kop_attn_prep *o) {
    cuda_image_forget(c);
    const struct kdims *d = o->dims;
    if (o->batch->n_rows == 0) return;
    CU_REQUIRE(d->ix_dim <= PREP_WIDTH);
    struct prep_args a = {};
    a.pos = o->batch->pos, a.slot = o->batch->slot;
    a.page_table = o->seqs->page_table, a.max_pages = o->seqs->max_pages;
    a.r_q = d->r_q, a.r_kv = d->r_kv, a.d_rope = d->d_rope, a.ix_dim = d->ix_dim;
    a.interleaved = d->ix_rope_interleaved;
    a.eps = d->rms_eps, a.ix_eps = d->ix_eps, a.angles = o->angles;
    a.q_a = o->q_a, a.q_norm = o->q_norm, a.kv = o->kv, a.kv_norm = o->kv_norm;
    a.index_key = o->index_key, a.ik_gain = o->ik_gain, a.ik_bias = o->ik_bias;
    a.latent = o->cache->latent, a.index = o->cache->index;
    launch(c, cuda_cache_f32() ? prep_kernel<float> : prep_kernel<__half>,
           dim3((unsigned)o->batch->n_rows, 3), PREP_THREADS, 0, a);
}

struct rope_args {
    int n_rows, heads, N, P, R, ix_heads, ix_dim;
    bool interleaved;
    const float *angles, *q;
    float *qk, *iq;
};

/* One thread per rotated pair. */
static __global__ void rope_kernel(const __grid_constant__ struct rope_args a) {
    gdc_trigger();
    gdc_wait();
    int t = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    int half = a.P / 2, head = i / half, pair = i % half;
    if (head >= a.heads + a.ix_heads) return;
    const float *angles = a.angles + (int64_t)t * a.P;
    if (head < a.heads) {
        int64_t at = (int64_t)t * a.heads + head;
        const float *x = a.q + at * (a.N + a.P) + a.N;
        float *y = a.qk + at * (a.R + a.P) + a.R;
        y[2 * pair] = rotated(x, 2 * pair, a.P, angles, true);
        y[2 * pair + 1] = rotated(x, 2 * pair + 1, a.P, angles, true);
        return;
    }
    float *x = a.iq + ((int64_t)t * a.ix_heads + head - a.heads) * a.ix_dim;
    int i0 = a.interleaved ? 2 * pair : pair, i1 = a.interleaved ? 2 * pair + 1 : pair + half;
    float v0 = rotated(x, i0, a.P, angles, a.interleaved);
    float v1 = rotated(x, i1, a.P, angles, a.interleaved);
    x[i0] = v0;
    x[i1] = v1;
}

void cuda_rope(struct kctx *c, const struct kop_rope *o) {
    cuda_image_forget(c);
    const struct kdims *d = o->dims;
    if (o->batch->n_rows == 0) return;
    struct rope_args a = {};
    a.n_rows = o->batch->n_rows, a.heads = d->n_heads, a.N = d->d_nope, a.P = d->d_rope;
    a.R = d->r_kv, a.ix_heads = o->iq ? d->ix_heads : 0, a.ix_dim = d->ix_dim;
    a.interleaved = d->ix_rope_interleaved, a.angles = o->angles;
    a.q = o->q, a.qk = o->qk, a.iq = o->iq;
    int64_t n = (int64_t)(a.heads + a.ix_heads) * (a.P / 2);
    launch(c, rope_kernel, dim3((unsigned)ceil_div(n, 256), (unsigned)a.n_rows), 256, 0, a);
}
