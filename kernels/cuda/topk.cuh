/* kernels/cuda/topk.cuh: the K largest of many numbers, by one block.
 *
 * Owns: nothing.  Called by: select.cu, sample.cu.  Tested by: tests/gpu/check_ops.c
 *
 * The K-th largest key is fixed digit by digit from the top (11, 11 and 10 bits), then everything
 * above it and the first of those equal to it are written out in ascending order of their index.
 */
#ifndef OCTAVO_KERNELS_CUDA_TOPK_H
#define OCTAVO_KERNELS_CUDA_TOPK_H

#include "kernels/cuda/cuda.cuh"

#define TOPK_THREADS 1024

struct topk_smem {
    int count[2048], found[2], above[32], equal[32];
};

/* An integer in the order of the floats; NaN counts as -inf, -0 equals 0. */
static __device__ __forceinline__ uint32_t order_key(float x) {
    uint32_t v = __float_as_uint(x != x ? -INFINITY : x + 0.f);
    return v & 0x80000000 ? ~v : v | 0x80000000;
}

/* All TOPK_THREADS threads; 1 <= K <= n. out[0..K): indices, ascending. */
static __device__ void topk_block(const float *score, int n, int K, int32_t *out,
                                  struct topk_smem *s) {
    const int shift[3] = {21, 10, 0}, bits[3] = {11, 11, 10};
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, left = K;
    uint32_t prefix = 0, mask = 0;
    for (int d = 0; d < 3; d++) {
        uint32_t low = (1u << bits[d]) - 1;
        for (int i = tid; i < 2048; i += TOPK_THREADS) s->count[i] = 0;
        __syncthreads();
        for (int u = tid; u < n; u += TOPK_THREADS) {
            uint32_t key = order_key(score[u]);
            if ((key & mask) == prefix) atomicAdd(&s->count[key >> shift[d] & low], 1);
        }
        __syncthreads();
        if (warp == 0) { /* from the top: which digit holds the left-th */
            int sum = 0;
            for (int i = 0; i < 64; i++) sum += s->count[(31 - lane) * 64 + i];
            int before = sum;
            for (int o = 1; o < 32; o <<= 1) {
                int v = __shfl_up_sync(~0u, before, o);
                if (lane >= o) before += v;
            }
            before -= sum;
            if (before < left && left <= before + sum) {
                int at = (31 - lane) * 64 + 63;
                while (before + s->count[at] < left) before += s->count[at--];
                s->found[0] = at;
                s->found[1] = left - before;
            }
        }
        __syncthreads();
        prefix |= (uint32_t)s->found[0] << shift[d];
        mask |= low << shift[d];
        left = s->found[1];
        __syncthreads();
    }
    int at = 0, ties = 0; /* written, and equals seen, so far */
    for (int u0 = 0; u0 < n; u0 += TOPK_THREADS) {
        int u = u0 + tid;
        uint32_t key = u < n ? order_key(score[u]) : 0;
        bool is_above = u < n && key > prefix, is_equal = u < n && key == prefix;
        uint32_t vote_a = __ballot_sync(~0u, is_above), vote_e = __ballot_sync(~0u, is_equal);
        if (lane == 0) s->above[warp] = __popc(vote_a), s->equal[warp] = __popc(vote_e);
        __syncthreads();
        int before_a = __popc(vote_a & ((1u << lane) - 1)), all_a = 0;
        int before_e = __popc(vote_e & ((1u << lane) - 1)), all_e = 0;
        for (int i = 0; i < 32; i++) {
            if (i < warp) before_a += s->above[i], before_e += s->equal[i];
            all_a += s->above[i], all_e += s->equal[i];
        }
        int rank_e = ties + before_e, equals_kept = min(rank_e, left) - min(ties, left);
        if (is_above || (is_equal && rank_e < left)) out[at + before_a + equals_kept] = u;
        at += all_a + min(ties + all_e, left) - min(ties, left);
        ties += all_e;
        __syncthreads();
    }
}

#endif
