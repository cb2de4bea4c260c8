/* kernels/cuda/prep.cu: attn_prep and rope: norms, rotation and cache rows between the projections.
 *
 * Owns: nothing.  Called by: the table.  Fails how: a CUDA error ends the process.
 * Limits: r_kv + d_rope and ix_dim at most PREP_WIDTH.  Tested by: tests/gpu/check_ops.c
 *
 * Caches hold half precision (11 bits; values beyond ±65504 are cut off) unless the process was
 * asked for float32: a normed latent is of size one, so attention loses about 2e-4 of a score.
 */
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/later.cuh"

#define PREP_THREADS 256
#define IMAGE_ROWS   64 /* of the query's latent that are left as records too, for the next product \
                         */

/* Block (t, part): 0 the latent and shared key, 1 the indexer's key, 2 the query's latent. */
template <typename E>
static __global__ void __launch_bounds__(PREP_THREADS)
    prep_kernel(const __grid_constant__ struct prep_args a, uint8_t *image) {
    __shared__ float red[33], row[PREP_WIDTH];
    int t = blockIdx.x, part = blockIdx.y;
    gdc_trigger();
    gdc_wait();
    if (part < 2) {
        prep_cache<E>(a, t, part, red, row);
        return;
    }
    float *x = a.q_a + (int64_t)t * a.r_q, scale = rms_scale(x, a.r_q, a.eps, red);
    if (!image) {
        for (int i = threadIdx.x; i < a.r_q; i += PREP_THREADS) x[i] = x[i] * scale * a.q_norm[i];
        return;
    }
    gv_make(image + (int64_t)t * ((a.r_q + GV_RUN - 1) / GV_RUN) * GV_RECORD, a.r_q,
            PREP_THREADS / 32, [&](int k) {
                float4 v = load_float4(x + k), g = load_float4(a.q_norm + k);
                v = make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z,
                                v.w * scale * g.w);
                x[k] = v.x, x[k + 1] = v.y, x[k + 2] = v.z, x[k + 3] = v.w;
                return v;
            });
}

void cuda_prep_launch(struct kctx *c, const struct prep_args *a, int n_rows) {
    uint8_t *image = NULL;
    cuda_image_forget(c);
    if (a->q_a && n_rows <= IMAGE_ROWS && a->r_q % 32 == 0) {
        image = (uint8_t *)cuda_work(c, gv_image_bytes(n_rows, a->r_q));
        cuda_image_remember(c, a->q_a, a->r_q, n_rows, a->r_q);
    }
    launch(c, a->f32 ? prep_kernel<float> : prep_kernel<__half>,
           dim3((unsigned)n_rows, a->q_a ? 3 : 2), PREP_THREADS, 0, *a, image);
}

void cuda_attn_prep(struct kctx *c, const struct kop_attn_prep *o) {
    cuda_settle(c);
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
    a.f32 = cuda_cache_f32();
    if (a.q_a && o->batch->n_rows <= LATER_ROWS)
        c->later->prep = a, c->later->prep_due = true;
    else
        cuda_prep_launch(c, &a, o->batch->n_rows);
}

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

void cuda_rope_launch(struct kctx *c, const struct rope_args *a) {
    int64_t n = (int64_t)(a->heads + a->ix_heads) * (a->P / 2);
    launch(c, rope_kernel, dim3((unsigned)ceil_div(n, 256), (unsigned)a->n_rows), 256, 0, *a);
}

void cuda_rope(struct kctx *c, const struct kop_rope *o) {
    cuda_settle(c);
    if (c->image.x == o->qk || c->image.x == o->iq) cuda_image_forget(c);
    const struct kdims *d = o->dims;
    if (o->batch->n_rows == 0) return;
    struct rope_args a = {};
    a.n_rows = o->batch->n_rows, a.heads = d->n_heads, a.N = d->d_nope, a.P = d->d_rope;
    a.R = d->r_kv, a.ix_heads = o->iq ? d->ix_heads : 0, a.ix_dim = d->ix_dim;
    a.interleaved = d->ix_rope_interleaved, a.angles = o->angles;
    a.q = o->q, a.qk = o->qk, a.iq = o->iq;
    if (a.n_rows <= LATER_ROWS && !o->iq)
        c->later->rope = a, c->later->rope_due = true;
    else
        cuda_rope_launch(c, &a);
}
