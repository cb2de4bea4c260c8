/* kernels/cuda/later.cuh: small operations put off until the next one has been seen.
 *
 * Owns: struct later, one per context.  Called by: kernels/cuda/ only.
 * Tested by: tests/gpu/check_ops.c (chains)
 *
 * With one row of x a step is as long as its chain of dependent kernels, so an operation of a few
 * thousand values is not worth one. attn_prep, rope, swiglu and the merging of a split attention
 * are written down instead of launched; if the operation that reads their result comes next, it
 * does them on the way. Whoever else comes first calls cuda_settle, which launches what is written
 * down, in order. So the table's contract holds, except for one thing: what nobody but the next
 * operation reads need never stand in memory (attn_prep's q_a, rope's part of qk, attend's out,
 * swiglu's act).
 */
#ifndef OCTAVO_KERNELS_CUDA_LATER_H
#define OCTAVO_KERNELS_CUDA_LATER_H

#include "kernels/cuda/prep.cuh"

#define LATER_ROWS    1   /* more rows keep a kernel of their own busy */
#define MERGE_THREADS 256 /* r is at most twice that */

/* out[t][h] = sum of the splits' parts of an attention (attend.cu). */
struct merge_args {
    const float *partial; /* [T, splits, H, R] sums, then [T, splits, H, 2] maximum and weight */
    float *out;           /* [T, H, R] */
    int n_rows, splits, heads, r;
};

struct swiglu_args {
    int n_rows, width;
    const float *gate, *up;
    float *act;
};

struct later {
    bool prep_due, rope_due, merge_due, swiglu_due;
    struct prep_args prep;
    struct rope_args rope;
    struct merge_args merge;
    struct swiglu_args swiglu;
};

void cuda_prep_launch(struct kctx *, const struct prep_args *, int n_rows);
void cuda_rope_launch(struct kctx *, const struct rope_args *);
void cuda_merge_launch(struct kctx *, const struct merge_args *);
void cuda_swiglu_launch(struct kctx *, const struct swiglu_args *);

#if defined(__CUDACC__)

static __device__ __forceinline__ float *merge_stat(const struct merge_args &a, int t, int split,
                                                    int h) {
    return (float *)a.partial + (int64_t)a.n_rows * a.splits * a.heads * a.r +
           (((int64_t)t * a.splits + split) * a.heads + h) * 2;
}

/* out[k] of one row and head, two columns to a thread, the splits in their order; by r / 2 threads
 * or more of whole warps. Loads are asked for before anything is waited for. */
static __device__ __forceinline__ void merge_row(const struct merge_args &a, int t, int h,
                                                 float *out) {
    constexpr int BATCH = 8;
    int lane = threadIdx.x & 31, k = (int)threadIdx.x * 2;
    int64_t step = (int64_t)a.heads * a.r;
    const float *p = a.partial + ((int64_t)t * a.splits * a.heads + h) * a.r + min(k, a.r - 2);
    float2 v[BATCH], sum = make_float2(0, 0);
    float top[2], weight[2];
    auto ask = [&](int s0) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            v[i] = make_float2(0, 0);
            if (s0 + i < a.splits) v[i] = *(const float2 *)(p + (s0 + i) * step);
        }
    };
    ask(0);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int s = lane + 32 * i;
        float2 stat = make_float2(-INFINITY, 0);
        if (s < a.splits) stat = *(const float2 *)merge_stat(a, t, s, h);
        top[i] = stat.x, weight[i] = stat.y;
    }
    float most = warp_max(fmaxf(top[0], top[1]));
    float f0 = most > -INFINITY ? exp2f(top[0] - most) : 0.f;
    float f1 = most > -INFINITY ? exp2f(top[1] - most) : 0.f;
    float all = warp_sum(weight[0] * f0 + weight[1] * f1), w = all > 0 ? 1.f / all : 0.f;
    for (int s0 = 0; s0 < a.splits; s0 += BATCH) {
        if (s0 > 0) ask(s0);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            float f = __shfl_sync(~0u, s0 < 32 ? f0 : f1, (s0 + i) & 31);
            sum.x += v[i].x * f, sum.y += v[i].y * f;
        }
    }
    if (k < a.r) out[k] = sum.x * w, out[k + 1] = sum.y * w;
}

#endif /* __CUDACC__ */
#endif
