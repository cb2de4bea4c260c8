/* kernels/cuda/route.cuh: choosing the experts of a row, for the router and for who does it on the
 * way.
 *
 * Owns: nothing.  Called by: route.cu, experts_one.cu.  Tested by: tests/gpu/check_ops.c
 */
#ifndef OCTAVO_KERNELS_CUDA_ROUTE_H
#define OCTAVO_KERNELS_CUDA_ROUTE_H

#include <cmath>

#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/topk.cuh"

struct route_args {
    int n_experts, n_used, n_groups, n_groups_used, gating;
    bool norm;
    float scale;
    const float *logits, *bias;
    const int32_t *slot;
    int32_t *ids;
    float *weights;
    int n_rows;
    int first, count; /* experts of this rank */
};

#define ROUTE_FAST 256 /* experts, a power of two */

struct route_args cuda_route_args(const struct kop_experts_up *);

static __host__ __device__ inline bool route_is_fast(const struct route_args &a) {
    return a.n_experts <= ROUTE_FAST && a.n_groups <= 1 && a.n_used <= 32;
}

#if defined(__CUDACC__)

/* Gates and keys (an order of the selection scores, 0 for none) of row 0 for at most ROUTE_FAST
 * experts, by that many threads or more. */
static __device__ __forceinline__ void route_keys(const struct route_args &a, float *gate,
                                                  uint32_t *key) {
    __shared__ float red[33];
    int e = threadIdx.x, E = a.n_experts;
    float v = e < E ? a.logits[e] : -INFINITY, bias = a.bias && e < E ? a.bias[e] : 0.f;
    if (a.gating == 1) {
        float top = warp_max(v);
        if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = top;
        __syncthreads();
        for (int i = 0; i < (int)blockDim.x / 32; i++) top = fmaxf(top, red[i]);
        v = e < E ? expf(v - top) : 0.f;
        v /= block_sum(v, red);
    } else {
        v = 1.f / (1.f + expf(-v));
    }
    if (e < ROUTE_FAST) gate[e] = v, key[e] = e < E ? order_key(a.bias ? v + bias : v) : 0;
}

/* Number of the largest of a warp's keys, key[i] of a lane being number lane + 32 * i; the lower
 * one of equals. */
static __device__ __forceinline__ int best_key(const uint32_t (&key)[8]) {
    int lane = threadIdx.x & 31, at = INT32_MAX;
    uint32_t best = max(max(max(key[0], key[1]), max(key[2], key[3])),
                        max(max(key[4], key[5]), max(key[6], key[7])));
    best = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int i = 7; i >= 0; i--)
        if (key[i] == best) at = lane + 32 * i;
    return __reduce_min_sync(~0u, at);
}

/* The choices of route_keys' row, by a warp. Lane j gets choice j and its weight. */
static __device__ __forceinline__ void route_pick(const struct route_args &a, const float *gate,
                                                  const uint32_t *keys, int *id, float *weight) {
    int lane = threadIdx.x & 31;
    uint32_t key[8];
    *id = -1;
#pragma unroll
    for (int i = 0; i < 8; i++) key[i] = keys[lane + 32 * i];
    for (int j = 0; j < a.n_used; j++) {
        int at = best_key(key);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (at == lane + 32 * i) key[i] = 0;
        if (lane == j) *id = at;
    }
    float mine = lane < a.n_used ? gate[*id & (ROUTE_FAST - 1)] : 0.f, total = 0;
    for (int j = 0; j < a.n_used; j++) total += __shfl_sync(~0u, mine, j);
    *weight = (a.norm ? mine / (total + 1e-20f) : mine) * a.scale;
}

/* One warp, one row, at most 256 experts in one group: scores stay in registers. Lane j gets choice
 * j and its weight. */
static __device__ __forceinline__ void route_row_fast(const struct route_args &a, int t, int *id,
                                                      float *weight) {
    int lane = threadIdx.x & 31, E = a.n_experts;
    const float *logits = a.logits + (int64_t)t * E;
    float gate[8], mine = 0, total = 0, top = -INFINITY, sum = 0;
    uint32_t key[8];
    *id = -1;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int e = lane + 32 * i;
        gate[i] = e < E ? logits[e] : -INFINITY;
        top = fmaxf(top, gate[i]);
    }
    if (a.gating == 1) {
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += gate[i] = expf(gate[i] - top);
        sum = warp_sum(sum);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int e = lane + 32 * i;
        gate[i] = a.gating == 1 ? gate[i] / sum : 1.f / (1.f + expf(-gate[i]));
        /* 0 is below the key of every score, -inf and NaN included */
        key[i] = e < E ? order_key(a.bias ? gate[i] + a.bias[e] : gate[i]) : 0;
    }
    for (int j = 0; j < a.n_used; j++) {
        int at = best_key(key);
        float g = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (at == lane + 32 * i) g = gate[i], key[i] = 0;
        g = __shfl_sync(~0u, g, at & 31);
        total += g;
        if (lane == j) mine = g, *id = at;
    }
    *weight = (a.norm ? mine / (total + 1e-20f) : mine) * a.scale;
}

#endif /* __CUDACC__ */
#endif
