/* kernels/cuda/route.cu: the router: which experts a row goes to, and its pairs sorted by expert.
 *
 * Owns: nothing.  Called by: experts.cu.  Fails how: a CUDA error ends the process.
 * Limits: EXPERTS_MAX experts, 32 choices.  Tested by: tests/gpu/check_ops.c
 *
 * A warp chooses for a row; one block counts and sorts, and is the only one with few rows. Many
 * pairs stand in no fixed order within an expert: each has a place of its own for its result, so
 * nothing depends on it.
 */
#include <algorithm>
#include <cmath>

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/route.cuh"

/* ---- choosing ----------------------------------------------------------------------------- */

/* Largest of (value, index) over the warp, the lower index on ties; NaN is never it. */
static __device__ __forceinline__ int warp_argmax(float v, int i) {
    for (int o = 16; o > 0; o >>= 1) {
        float w = __shfl_xor_sync(~0u, v, o);
        int j = __shfl_xor_sync(~0u, i, o);
        if (w > v || (w == v && j < i)) v = w, i = j;
    }
    return i;
}

/* Index of the largest of n scores in shared memory; taken ones are NaN. */
static __device__ int best_left(const float *score, int n) {
    int lane = threadIdx.x & 31, at = INT32_MAX;
    float best = -INFINITY;
    for (int i = lane; i < n; i += 32)
        if (score[i] > best || (score[i] == best && i < at)) best = score[i], at = i;
    return warp_argmax(best, at);
}

/* Experts outside the best groups fall to -inf; a group is worth the sum of its two best. */
static __device__ void keep_groups(const struct route_args &a, float *score, float *group) {
    int lane = threadIdx.x & 31, size = a.n_experts / a.n_groups;
    for (int g = lane; g < a.n_groups; g += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++) {
            float v = score[i];
            if (v > first) second = first, first = v;
            else if (v > second) second = v;
        }
        group[g] = size > 1 ? first + second : first;
    }
    __syncwarp();
    for (int k = 0; k < a.n_groups_used; k++) {
        int g = best_left(group, a.n_groups);
        __syncwarp();
        if (lane == 0 && g < a.n_groups) group[g] = NAN;
        __syncwarp();
    }
    for (int i = lane; i < a.n_experts; i += 32)
        if (group[i / size] == group[i / size]) score[i] = -INFINITY;
    __syncwarp();
}

/* One warp, one row. score: 3 * n_experts floats of shared memory. */
static __device__ void route_row(const struct route_args &a, int t, float *score) {
    int lane = threadIdx.x & 31, E = a.n_experts;
    int32_t *ids = a.ids + t * a.n_used;
    float *weights = a.weights + t * a.n_used, *gate = score + E;
    if (a.slot[t] < 0) {
        for (int j = lane; j < a.n_used; j += 32) ids[j] = -1, weights[j] = 0;
        return;
    }
    if (route_is_fast(a)) {
        int id;
        float weight;
        route_row_fast(a, t, &id, &weight);
        if (lane < a.n_used) ids[lane] = id, weights[lane] = weight;
        return;
    }
    const float *logits = a.logits + (int64_t)t * E;
    float top = -INFINITY, sum = 0;
    if (a.gating == 1) {
        for (int e = lane; e < E; e += 32) top = fmaxf(top, logits[e]);
        top = warp_max(top);
        for (int e = lane; e < E; e += 32) sum += gate[e] = expf(logits[e] - top);
        sum = warp_sum(sum);
    }
    for (int e = lane; e < E; e += 32) {
        gate[e] = a.gating == 1 ? gate[e] / sum : 1.f / (1.f + expf(-logits[e]));
        float s = a.bias ? gate[e] + a.bias[e] : gate[e];
        score[e] = s == s ? s : -INFINITY;
    }
    __syncwarp();
    if (a.n_groups > 1) keep_groups(a, score, gate + E);
    float total = 0;
    for (int j = 0; j < a.n_used; j++) {
        int e = best_left(score, E);
        if (e >= E) e = 0; /* fewer candidates than choices: as many as the groups leave */
        total += gate[e];
        __syncwarp();
        if (lane == 0) {
            ids[j] = e;
            weights[j] = gate[e];
            score[e] = NAN;
        }
        __syncwarp();
    }
    for (int j = lane; j < a.n_used; j += 32) {
        float w = weights[j];
        if (a.norm) w = w / (total + 1e-20f);
        weights[j] = w * a.scale;
    }
}

/* ---- sorting ------------------------------------------------------------------------------- */

/* f(i, ids[i]) for this thread's share of the n pairs that have an expert; eight loads at a time. */
template <typename F>
static __device__ __forceinline__ void each_pair(const int32_t *ids, int n, F f) {
    int step = blockDim.x;
    for (int i0 = threadIdx.x; i0 < n; i0 += 8 * step) {
        int e[8];
#pragma unroll
        for (int k = 0; k < 8; k++) e[k] = i0 + k * step < n ? ids[i0 + k * step] : -1;
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (e[k] >= 0) f(i0 + k * step, e[k]);
    }
}

/* Pairs to segments of at most `width`, an expert's of equal lengths (but for the last) that are
 * multiples of eight. One block; count: 3 * E ints of shared memory. few: the order within an
 * expert is that of the pairs. Many: an expert's first place is a multiple of eight, -1 in gaps. */
static __device__ void sort_pairs(const int32_t *ids, int n, int E, int width, bool few,
                                  int32_t *seg, int32_t *list, int32_t *count) {
    int align = few ? 1 : 8;
    int32_t *first = count + E, *cursor = count + 2 * E;
    for (int e = threadIdx.x; e < E; e += blockDim.x) count[e] = 0;
    __syncthreads();
    each_pair(ids, n, [&](int, int e) { atomicAdd(&count[e], 1); });
    __syncthreads();
    if (threadIdx.x < 32) {
        int per = (E + 31) / 32, e0 = threadIdx.x * per, e1 = min(E, e0 + per);
        int pairs = 0, segs = 0;
        for (int e = e0; e < e1; e++) {
            pairs += (count[e] + align - 1) / align * align;
            segs += (count[e] + width - 1) / width;
        }
        int pairs_before = pairs, segs_before = segs;
        for (int o = 1; o < 32; o <<= 1) {
            int p = __shfl_up_sync(~0u, pairs_before, o), s = __shfl_up_sync(~0u, segs_before, o);
            if ((int)threadIdx.x >= o) pairs_before += p, segs_before += s;
        }
        if (threadIdx.x == 31) seg[0] = segs_before;
        pairs_before -= pairs;
        segs_before -= segs;
        for (int e = e0; e < e1; e++) {
            first[e] = cursor[e] = pairs_before;
            int parts = (count[e] + width - 1) / width;
            int part = parts > 0 ? ((count[e] + parts - 1) / parts + 7) / 8 * 8 : width;
            for (int at = 0; at < count[e]; at += part) {
                int32_t *s = seg + 1 + 3 * segs_before++;
                s[0] = e, s[1] = pairs_before + at, s[2] = min(part, count[e] - at);
            }
            pairs_before += count[e];
            while (pairs_before % align != 0) list[pairs_before++] = -1;
        }
    }
    __syncthreads();
    each_pair(ids, n, [&](int i, int e) {
        int rank = 0;
        if (few) {
            for (int k = 0; k < i; k++) rank += ids[k] == e;
            rank += first[e];
        } else {
            rank = atomicAdd(&cursor[e], 1);
        }
        list[rank] = i;
    });
}

/* Number of pair i's expert among those of this rank, or -1. */
static __device__ __forceinline__ int32_t local_id(const struct route_args &a, int i) {
    int32_t id = a.ids[i] - a.first;
    return id >= 0 && id < a.count ? id : -1;
}

static __global__ void local_ids_kernel(const __grid_constant__ struct route_args a, int32_t *out) {
    gdc_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n_rows * a.n_used) out[i] = local_id(a, i);
}

/* Few rows: everything in one block, a warp per row. */
static __global__ void __launch_bounds__(1024)
    route_few_kernel(const __grid_constant__ struct route_args a, int32_t *seg, int32_t *list) {
    extern __shared__ float few[];
    __shared__ int32_t ids[EXPERTS_FEW_ROWS * 32];
    int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, stride = 3 * a.n_experts;
    gdc_trigger();
    gdc_wait();
    for (int t = warp; t < a.n_rows; t += warps) route_row(a, t, few + warp * stride);
    __syncthreads();
    int n = a.n_rows * a.n_used;
    if (a.n_rows == 1 && a.count == a.n_experts) { /* its choices differ: each is a segment */
        int j = threadIdx.x;
        bool routed = a.slot[0] >= 0;
        if (j == 0) seg[0] = routed ? n : 0;
        if (j < n && routed) {
            seg[1 + 3 * j] = a.ids[j], seg[2 + 3 * j] = j, seg[3 + 3 * j] = 1;
            list[j] = j;
        }
        return;
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) ids[i] = local_id(a, i);
    __syncthreads();
    sort_pairs(ids, n, a.count, GV_ROWS, true, seg, list, (int32_t *)few);
}

static __global__ void __launch_bounds__(256)
    route_many_kernel(const __grid_constant__ struct route_args a) {
    extern __shared__ float many[];
    int warp = threadIdx.x >> 5, t = blockIdx.x * (blockDim.x >> 5) + warp;
    gdc_wait();
    if (t < a.n_rows) route_row(a, t, many + warp * 3 * a.n_experts);
}

static __global__ void __launch_bounds__(1024)
    sort_kernel(const int32_t *ids, int n, int E, int32_t *seg, int32_t *list) {
    extern __shared__ int32_t sorted[];
    gdc_wait();
    sort_pairs(ids, n, E, GEMM_COLS, false, seg, list, sorted);
}

struct route_args cuda_route_args(const struct kop_experts_up *o) {
    const struct kdims *d = o->dims;
    struct route_args a = {};
    a.n_experts = d->n_experts, a.n_used = d->n_used, a.gating = d->gating;
    a.n_groups = d->n_groups, a.n_groups_used = d->n_groups_used;
    a.norm = d->norm_weights, a.scale = d->weights_scale;
    a.logits = o->logits, a.bias = o->bias, a.slot = o->batch->slot;
    a.ids = o->ids, a.weights = o->weights, a.n_rows = o->batch->n_rows;
    a.first = o->first, a.count = (int)o->gate->count;
    return a;
}

void cuda_route(struct kctx *c, const struct kop_experts_up *o, const struct pairs *p) {
    const struct kdims *d = o->dims;
    struct route_args a = cuda_route_args(o);
    CU_REQUIRE(d->n_experts <= EXPERTS_MAX && d->n_used <= 32);
    size_t one = 3 * (size_t)d->n_experts * sizeof(float);
    if (a.n_rows <= EXPERTS_FEW_ROWS) {
        int warps = (int)std::min<size_t>(32, (size_t)40960 / one);
        warps = std::max(1, std::min(warps, a.n_rows < 4 ? 4 : a.n_rows));
        launch(c, route_few_kernel, 1, (unsigned)warps * 32, (size_t)warps * one, a, p->seg,
               p->list);
        return;
    }
    int warps = (int)std::min<size_t>(8, 40960 / one);
    launch(c, route_many_kernel, (unsigned)ceil_div(a.n_rows, warps), (unsigned)warps * 32,
           (size_t)warps * one, a);
    const int32_t *ids = o->ids;
    int n = a.n_rows * a.n_used;
    if (a.count < a.n_experts) { /* dealt out: the results' memory is free until the second half */
        launch(c, local_ids_kernel, (unsigned)ceil_div(n, 256), 256, 0, a, (int32_t *)p->partial);
        ids = (const int32_t *)p->partial;
    }
    launch(c, sort_kernel, 1, 1024, one, ids, n, a.count, p->seg, p->list);
}
