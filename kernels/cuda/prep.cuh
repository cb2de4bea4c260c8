/* kernels/cuda/prep.cuh: attn_prep as a device function, for its own kernel and for the product
 * that does it on the way.
 *
 * Owns: nothing.  Called by: prep.cu, gemv.cu.  Tested by: tests/gpu/check_ops.c
 */
#ifndef OCTAVO_KERNELS_CUDA_PREP_H
#define OCTAVO_KERNELS_CUDA_PREP_H

#include "kernels/cuda/cache.cuh"

#define PREP_WIDTH 2048 /* most values of an indexer key */

struct prep_args {
    const int32_t *pos, *slot, *page_table;
    int max_pages, r_q, r_kv, d_rope, ix_dim;
    bool interleaved, f32; /* f32: element of the caches */
    float eps, ix_eps;
    const float *angles;
    float *q_a;
    const float *q_norm, *kv, *kv_norm, *index_key, *ik_gain, *ik_bias;
    void *latent, *index;
};

struct rope_args {
    int n_rows, heads, N, P, R, ix_heads, ix_dim;
    bool interleaved;
    const float *angles, *q;
    float *qk, *iq;
};

#if defined(__CUDACC__)

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

static __device__ __forceinline__ float rms_scale(const float *x, int width, float eps,
                                                  float *red) {
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
    return 1.f / sqrtf(block_sum(sum, red) / (float)width + eps);
}

/* Cache rows of row t, by a block: part 0 the latent and shared key, 1 the indexer's key. red: 33
 * floats, row: PREP_WIDTH, both shared memory. */
template <typename E>
static __device__ __forceinline__ void prep_cache(const struct prep_args &a, int t, int part,
                                                  float *red, float *row) {
    int P = a.d_rope;
    if (a.slot[t] < 0) return;
    const float *angles = a.angles + (int64_t)t * P;
    int64_t at = cache_row(a.page_table, a.max_pages, a.slot[t], a.pos[t]);
    if (part == 0) {
        int R = a.r_kv;
        const float *x = a.kv + (int64_t)t * (R + P);
        E *out = (E *)a.latent + at * (R + P);
        float scale = rms_scale(x, R, a.eps, red);
        for (int i = threadIdx.x; i < R; i += blockDim.x)
            out[i] = cache_element<E>(x[i] * scale * a.kv_norm[i]);
        for (int i = threadIdx.x; i < P; i += blockDim.x)
            out[R + i] = cache_element<E>(rotated(x + R, i, P, angles, true));
        return;
    }
    if (!a.index_key) return;
    int J = a.ix_dim;
    const float *x = a.index_key + (int64_t)t * J;
    E *out = (E *)a.index + at * J;
    float sum = 0, square = 0;
    for (int i = threadIdx.x; i < J; i += blockDim.x) sum += x[i];
    float mean = block_sum(sum, red) / (float)J;
    for (int i = threadIdx.x; i < J; i += blockDim.x) square += (x[i] - mean) * (x[i] - mean);
    float inverse = 1.f / sqrtf(block_sum(square, red) / (float)J + a.ix_eps);
    for (int i = threadIdx.x; i < J; i += blockDim.x)
        row[i] = (x[i] - mean) * inverse * a.ik_gain[i] + a.ik_bias[i];
    __syncthreads();
    for (int i = threadIdx.x; i < J; i += blockDim.x)
        out[i] = cache_element<E>(i < P ? rotated(row, i, P, angles, a.interleaved) : row[i]);
}

#endif /* __CUDACC__ */
#endif
