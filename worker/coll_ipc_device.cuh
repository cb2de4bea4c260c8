/* worker/coll_ipc_device.cuh: the kernels behind coll_ipc.cu.
 *
 * Owns: the layout of a slab.  Called by: coll_ipc.cu.
 * Fails how: a kernel leaves when the generation's abort word is set; its result is then rubbish.
 * Limits: IPC_RANKS ranks; a message of any length goes in pieces inside one launch.
 * Tested by: tests/gpu/test_coll_gpu.cu
 *
 * A slab is this rank's memory that all ranks map. Everything in it belongs to one *block number*:
 * block b of a kernel exchanges with blocks b of the other ranks and with nobody else, so no
 * grid-wide step is needed, and blocks may run in any order and any number at a time.
 *
 * A block counts its exchanges (epochs) in device memory, so that a captured graph can be replayed
 * any number of times and on any stream. Exchange e is: put data into set e & 1 of somebody's slab,
 * tell every peer "e", wait until every peer has said "e", take data out. Two sets are enough
 * without a trailing barrier: whoever writes for e has heard every peer say e - 1, which a peer
 * says only after it has read all it wanted of e - 2. This holds whichever of the algorithms below
 * the neighbouring exchanges use, because they all number them alike. Epochs are compared by signed
 * difference, so the counter may wrap.
 *
 * Small sums travel as packets of (value, epoch, value, epoch): the data is its own flag, which
 * saves a fence and a trip, at twice the bytes. A packet is believed when both its epochs are the
 * current one; so that none of 2^32 exchanges ago can look fresh, the packets of a block are
 * cleared every 2^31 exchanges, and the two exchanges around the clearing go the ordinary way.
 *
 * Every element is summed in rank order from rank 0's value on, in float32: the bits are the same
 * on all ranks and for all algorithms.
 */
#ifndef OCTAVO_WORKER_COLL_IPC_DEVICE_H
#define OCTAVO_WORKER_COLL_IPC_DEVICE_H

#include "kernels/cuda/cuda.cuh"

#define IPC_RANKS      16
#define IPC_BLOCKS     64
#define IPC_THREADS    512
#define IPC_PART_BYTES (16 << 10) /* what one source may put into one set of one block */
#define IPC_LL_THREADS 256
#define IPC_LL_BYTES   (IPC_LL_THREADS * 16)
#define IPC_LINE       32          /* words between the flags of two blocks */
#define IPC_CLEARING   0x7ffffffeu /* no bit set: this exchange clears packets */

/* Slab: head [flags, epochs], packets [block][set][source], data [block][set][source]. */
#define IPC_HEAD_BYTES (2 * IPC_BLOCKS * IPC_LINE * 4)

static __host__ __device__ __forceinline__ size_t ipc_slab_bytes(int world) {
    return IPC_HEAD_BYTES + (size_t)IPC_BLOCKS * 2 * world * (IPC_LL_BYTES + IPC_PART_BYTES);
}

/* Stands at one device address for the life of the worker, so that a rejoin recaptures nothing. */
struct ipc_table {
    char *slab[IPC_RANKS];      /* as this rank maps them */
    int from[IPC_RANKS];        /* the source this rank is to that peer: its rank, or, when one rank
                                 * plays them all, the peer's own number */
    const uint32_t *abort_word; /* host memory: bit 0 */
    uint32_t *left;             /* host memory: set by a kernel that left without its result */
    uint64_t *waited;           /* host memory: a copy of waited_ns */
    uint64_t waited_ns;         /* of block 0 for its peers, all kernels of the generation together;
                                 * the kernels' own, on the device */
    int rank, world;
};

/* What one block works with. */
struct ipc_view {
    const struct ipc_table *t;
    char *own;
    const uint32_t *abort_word;
    int block, rank, world;
};

static __device__ __forceinline__ struct ipc_view ipc_look(const struct ipc_table *t) {
    struct ipc_view v;
    v.t = t;
    v.rank = t->rank;
    v.world = t->world;
    v.own = t->slab[v.rank];
    v.abort_word = t->abort_word;
    v.block = (int)blockIdx.x;
    return v;
}

static __device__ __forceinline__ uint32_t *ipc_flag(char *slab, int block, int source) {
    return (uint32_t *)slab + block * IPC_LINE + source;
}
static __device__ __forceinline__ uint32_t *ipc_epoch(char *slab, int block) {
    return (uint32_t *)slab + (IPC_BLOCKS + block) * IPC_LINE;
}
static __device__ __forceinline__ uint4 *ipc_packets(const struct ipc_view &v, char *slab,
                                                     uint32_t e, int source) {
    size_t at = ((size_t)v.block * 2 + (e & 1)) * v.world + source;
    return (uint4 *)(slab + IPC_HEAD_BYTES + at * IPC_LL_BYTES);
}
/* [world] parts of IPC_PART_BYTES one after the other, or one stretch of all of them. */
static __device__ __forceinline__ char *ipc_data(const struct ipc_view &v, char *slab, uint32_t e,
                                                 int source) {
    size_t packets = (size_t)IPC_BLOCKS * 2 * v.world * IPC_LL_BYTES;
    size_t at = ((size_t)v.block * 2 + (e & 1)) * v.world + source;
    return slab + IPC_HEAD_BYTES + packets + at * IPC_PART_BYTES;
}

static __device__ __forceinline__ void st_release(uint32_t *p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
static __device__ __forceinline__ uint32_t ld_acquire(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ uint32_t ld_relaxed(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void st_packet(uint4 *p, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
static __device__ __forceinline__ uint4 ld_packet(const uint4 *p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

/* One turn of a waiting loop: after some hundred turns it naps, so that a peer that shares this
 * device gets on, and looks at the abort word now and then, which is a trip to host memory.
 * False: aborted. */
static __device__ __forceinline__ bool ipc_patience(const struct ipc_view &v, unsigned *turns) {
    if (++*turns < 256) return true;
    __nanosleep(100);
    return (*turns & 31) != 0 || (ld_relaxed(v.abort_word) & 1) == 0;
}

/* All threads of the block went through; else this rank is told that its result is rubbish. */
static __device__ __forceinline__ bool ipc_all(const struct ipc_view &v, bool ok) {
    ok = __syncthreads_and(ok);
    if (!ok && threadIdx.x == 0) st_release(v.t->left, 1);
    return ok;
}

/* How long block 0 waits, told to the host without anybody stopping for it: the sum so far is
 * fetched while the peers are waited for, and what is stored is not waited for. */
struct ipc_watch {
    uint64_t before, since;
};

static __device__ __forceinline__ uint64_t ipc_clock(void) {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

static __device__ __forceinline__ struct ipc_watch ipc_watch_start(const struct ipc_view &v) {
    if (v.block != 0 || threadIdx.x != 0) return {0, 0};
    return {*(const volatile uint64_t *)&v.t->waited_ns, ipc_clock()};
}

static __device__ __forceinline__ void ipc_watch_stop(const struct ipc_view &v,
                                                      const struct ipc_watch &w) {
    if (v.block != 0 || threadIdx.x != 0) return;
    const uint64_t sum = w.before + (ipc_clock() - w.since);
    *(volatile uint64_t *)const_cast<uint64_t *>(&v.t->waited_ns) = sum;
    *(volatile uint64_t *)v.t->waited = sum;
}

static __device__ void ipc_clear_packets(const struct ipc_view &v, uint32_t e) {
    uint4 *p = ipc_packets(v, v.own, e, 0);
    for (int i = (int)threadIdx.x; i < v.world * IPC_LL_THREADS; i += (int)blockDim.x)
        p[i] = make_uint4(0, 0, 0, 0);
}

/* Tells every peer e and waits for e from every peer. What the block's threads wrote before is seen
 * by the peers' blocks afterwards. False, in every thread: aborted. */
static __device__ bool ipc_exchange(const struct ipc_view &v, uint32_t e) {
    if ((e & IPC_CLEARING) == 0) ipc_clear_packets(v, e + 1);
    __syncthreads();
    bool ok = true;
    int p = (int)threadIdx.x;
    const struct ipc_watch watch = ipc_watch_start(v);
    if (p < v.world && p != v.rank) {
        st_release(ipc_flag(v.t->slab[p], v.block, v.t->from[p]), e);
        const uint32_t *flag = ipc_flag(v.own, v.block, p);
        unsigned turns = 0;
        while (ok && (int32_t)(ld_acquire(flag) - e) < 0) ok = ipc_patience(v, &turns);
    }
    ok = ipc_all(v, ok);
    ipc_watch_stop(v, watch);
    return ok;
}

/* ---- vectors of four floats anywhere in an array of n ---------------------------------------- */

static __device__ __forceinline__ float4 vec_load(const float *x, int64_t i, int64_t n, bool even) {
    x += 4 * i, n -= 4 * i;
    if (even && n >= 4) return *(const float4 *)x;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (n > 0) v.x = x[0];
    if (n > 1) v.y = x[1];
    if (n > 2) v.z = x[2];
    if (n > 3) v.w = x[3];
    return v;
}
static __device__ __forceinline__ void vec_store(float *x, int64_t i, int64_t n, bool even,
                                                 float4 v) {
    x += 4 * i, n -= 4 * i;
    if (even && n >= 4) {
        *(float4 *)x = v;
        return;
    }
    if (n > 0) x[0] = v.x;
    if (n > 1) x[1] = v.y;
    if (n > 2) x[2] = v.z;
    if (n > 3) x[3] = v.w;
}
static __device__ __forceinline__ bool vec_even(const float *x) {
    return ((uintptr_t)x & 15) == 0;
}

static __device__ __forceinline__ void vec_add(float4 *sum, float4 v) {
    sum->x = __fadd_rn(sum->x, v.x);
    sum->y = __fadd_rn(sum->y, v.y);
    sum->z = __fadd_rn(sum->z, v.z);
    sum->w = __fadd_rn(sum->w, v.w);
}

/* Sum in rank order of one vector: my own value and, for each peer, where its value lies. W >=
 * world is a constant, so that all loads are on their way before the first is added. */
template <int W>
static __device__ __forceinline__ float4 vec_sum(const struct ipc_view &v, float4 mine,
                                                 const char *const *peer, int64_t i) {
    float4 part[W];
#pragma unroll
    for (int r = 0; r < W; r++)
        part[r] = r < v.world && r != v.rank ? __ldcg((const float4 *)peer[r] + i) : mine;
    float4 sum = part[0];
#pragma unroll
    for (int r = 1; r < W; r++)
        if (r < v.world) vec_add(&sum, part[r]);
    return sum;
}

/* The stretch [from, to) of `total` items that is this block's. */
static __device__ __forceinline__ void block_share(int64_t total, int64_t *from, int64_t *to) {
    int64_t each = (total + gridDim.x - 1) / gridDim.x;
    *from = min((int64_t)blockIdx.x * each, total);
    *to = min(*from + each, total);
}

/* The frame of every exchanging kernel: this block's share of `total` items in pieces of at most
 * `most`, each with `exchanges` epochs of its own, which start at e. piece says whether it went
 * through. What the block counted is kept for the next kernel. */
template <typename Piece>
static __device__ __forceinline__ void ipc_pieces(const struct ipc_view &v, int64_t total,
                                                  int64_t most, int exchanges, Piece piece) {
    gdc_wait();
    uint32_t e = *(volatile uint32_t *)ipc_epoch(v.own, v.block);
    gdc_trigger();
    int64_t at, to;
    for (block_share(total, &at, &to); at < to; at += most, e += exchanges)
        if (!piece(e + 1, at, min(most, to - at))) return;
    if (threadIdx.x == 0) *ipc_epoch(v.own, v.block) = e;
}

/* Items of `bytes` that one set of a block takes: from each source a part, or one stretch. */
template <bool PUSH>
static __device__ __forceinline__ int64_t ipc_most(const struct ipc_view &v, int64_t bytes) {
    return (PUSH ? 1 : v.world) * (int64_t)IPC_PART_BYTES / bytes;
}

/* The k-th peer after this rank: all start with another one, so that no slab is everybody's first.
 */
static __device__ __forceinline__ int ipc_peer(const struct ipc_view &v, int k) {
    return v.rank + k < v.world ? v.rank + k : v.rank + k - v.world;
}

/* Where what this block gives away goes: PUSH: to the k-th peer's slab, for k from 1; else, once,
 * k = 0, into its own for the peers to fetch. And where a part of rank p is found afterwards. */
template <bool PUSH>
static __device__ __forceinline__ char *ipc_outbox(const struct ipc_view &v, uint32_t e, int k) {
    const int p = ipc_peer(v, k);
    return PUSH ? ipc_data(v, v.t->slab[p], e, v.t->from[p]) : ipc_data(v, v.own, e, 0);
}
template <bool PUSH>
static __device__ __forceinline__ const char *ipc_inbox(const struct ipc_view &v, uint32_t e,
                                                        int p) {
    return PUSH ? ipc_data(v, v.own, e, p) : ipc_data(v, v.t->slab[p], e, 0);
}

/* ---- all-reduce ------------------------------------------------------------------------------ */

/* Microseconds per all-reduce, one rank as eight in loop-back, in a graph of 50, H200, 2026-12-01:
 *    KB     packets  one-shot push  pull  two-shot push  pull
 *     4        2.05           3.43  3.18           9.05  7.02
 *    24        2.15           3.56  3.37           9.81  7.21
 *    96        2.29           3.67  3.46          10.07  7.35
 *   192        4.00           3.95  3.53          10.37  7.53
 *  1024       13.54           7.11  5.34          10.43  7.89
 * That is the cost without a wire: launch, flags, local bytes. */

/* Puts `mine` as item i where its takers find it. */
template <bool PUSH, typename T>
static __device__ __forceinline__ void ipc_give(const struct ipc_view &v, uint32_t e, int64_t i,
                                                T mine) {
    if (!PUSH) ((T *)ipc_outbox<false>(v, e, 0))[i] = mine;
    for (int k = 1; PUSH && k < v.world; k++) ((T *)ipc_outbox<true>(v, e, k))[i] = mine;
}

/* Vectors at + i of x, for i < count, become the sums of what all ranks gave; `skip` bytes into
 * what each gave. also(i, sum) sees them. */
template <int W, bool PUSH, typename Also>
static __device__ __forceinline__ void ipc_sum(const struct ipc_view &v, uint32_t e, float *x,
                                               int64_t at, int64_t count, int64_t n, int64_t skip,
                                               Also also) {
    const bool even = vec_even(x);
    const char *peer[W];
#pragma unroll
    for (int r = 0; r < W; r++) peer[r] = r < v.world ? ipc_inbox<PUSH>(v, e, r) + skip : NULL;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
        const float4 sum = vec_sum<W>(v, vec_load(x, at + i, n, even), peer, i);
        vec_store(x, at + i, n, even, sum);
        also(i, sum);
    }
}

/* One exchange: every rank has all parts and sums them itself. count <= what a part (PUSH) or a
 * stretch holds. Bytes over the wire per rank: 4 n (world - 1). */
template <int W, bool PUSH>
static __device__ bool one_shot_piece(const struct ipc_view &v, uint32_t e, float *x, int64_t at,
                                      int64_t count, int64_t n) {
    const bool even = vec_even(x);
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
        ipc_give<PUSH>(v, e, i, vec_load(x, at + i, n, even));
    if (!ipc_exchange(v, e)) return false;
    ipc_sum<W, PUSH>(v, e, x, at, count, n, 0, [](int64_t, float4) {});
    return true;
}

template <int W, bool PUSH>
__global__ void __launch_bounds__(IPC_THREADS)
    all_reduce_one_shot(const struct ipc_table *t, float *x, int64_t n) {
    const struct ipc_view v = ipc_look(t);
    ipc_pieces(v, (n + 3) / 4, ipc_most<PUSH>(v, 16), 1,
               [&](uint32_t e, int64_t at, int64_t count) {
                   return one_shot_piece<W, PUSH>(v, e, x, at, count, n);
               });
}

/* Two exchanges: rank r sums segment r of the piece for all (reduce-scatter), then hands out the
 * result (all-gather). Bytes over the wire per rank: 8 n (world - 1) / world. */
template <int W, bool PUSH>
static __device__ bool two_shot_piece(const struct ipc_view &v, uint32_t e, float *x, int64_t at,
                                      int64_t count, int64_t n) {
    const bool even = vec_even(x);
    const int64_t each = (count + v.world - 1) / v.world;
    const auto first = [&](int p) { return min(p * each, count); };
    const auto length = [&](int p) { return min(each, count - first(p)); };
    /* pushed: to each peer its segment; for fetching: the whole piece, once */
    for (int k = PUSH ? 1 : 0; k < (PUSH ? v.world : 1); k++) {
        const int p = ipc_peer(v, k);
        const int64_t from = PUSH ? first(p) : 0, n_p = PUSH ? length(p) : count;
        float4 *to = (float4 *)ipc_outbox<PUSH>(v, e, k);
        for (int64_t i = threadIdx.x; i < n_p; i += blockDim.x)
            to[i] = vec_load(x, at + from + i, n, even);
    }
    if (!ipc_exchange(v, e)) return false;
    const int64_t mine = first(v.rank);
    ipc_sum<W, PUSH>(v, e, x, at + mine, length(v.rank), n, PUSH ? 0 : mine * 16,
                     [&](int64_t i, float4 sum) { ipc_give<PUSH>(v, e + 1, i, sum); });
    if (!ipc_exchange(v, e + 1)) return false;
    for (int k = 1; k < v.world; k++) {
        const int p = ipc_peer(v, k);
        const float4 *from = (const float4 *)ipc_inbox<PUSH>(v, e + 1, p);
        for (int64_t i = threadIdx.x; i < length(p); i += blockDim.x)
            vec_store(x, at + first(p) + i, n, even, __ldcg(from + i));
    }
    return true;
}

template <int W, bool PUSH>
__global__ void __launch_bounds__(IPC_THREADS)
    all_reduce_two_shot(const struct ipc_table *t, float *x, int64_t n) {
    const struct ipc_view v = ipc_look(t);
    ipc_pieces(v, (n + 3) / 4, ipc_most<false>(v, 16), 2,
               [&](uint32_t e, int64_t at, int64_t count) {
                   return two_shot_piece<W, PUSH>(v, e, x, at, count, n);
               });
}

/* Packets: one exchange of two floats per thread. pair: which two floats of x. */
template <int W>
static __device__ bool packet_piece(const struct ipc_view &v, uint32_t e, float *x, int64_t pair,
                                    int64_t n) {
    int64_t left = n - 2 * pair;
    float a = left > 0 ? x[2 * pair] : 0.f, b = left > 1 ? x[2 * pair + 1] : 0.f;
    bool ok = true;
    if (left > 0) {
        const uint4 mine = make_uint4(__float_as_uint(a), e, __float_as_uint(b), e);
#pragma unroll
        for (int k = 1; k < W; k++) {
            if (k >= v.world) break;
            int p = ipc_peer(v, k);
            st_packet(ipc_packets(v, v.t->slab[p], e, v.t->from[p]) + threadIdx.x, mine);
        }
        uint4 part[W];
        unsigned turns = 0;
        const struct ipc_watch watch = ipc_watch_start(v);
        for (bool all = false; ok && !all; ok = all || ipc_patience(v, &turns)) {
            all = true;
#pragma unroll
            for (int r = 0; r < W; r++) {
                if (r >= v.world || r == v.rank)
                    part[r] = mine;
                else
                    part[r] = ld_packet(ipc_packets(v, v.own, e, r) + threadIdx.x);
            }
#pragma unroll
            for (int r = 0; r < W; r++) all = all && part[r].y == e && part[r].w == e;
        }
        ipc_watch_stop(v, watch);
        a = __uint_as_float(part[0].x), b = __uint_as_float(part[0].z);
#pragma unroll
        for (int r = 1; r < W; r++)
            if (r < v.world) {
                a = __fadd_rn(a, __uint_as_float(part[r].x));
                b = __fadd_rn(b, __uint_as_float(part[r].z));
            }
        x[2 * pair] = a;
        if (left > 1) x[2 * pair + 1] = b;
    }
    return ipc_all(v, ok);
}

/* blockDim.x <= IPC_LL_THREADS and even, so that a block's stretch is whole vectors. */
template <int W>
__global__ void __launch_bounds__(IPC_LL_THREADS)
    all_reduce_packets(const struct ipc_table *t, float *x, int64_t n) {
    struct ipc_view v = ipc_look(t);
    gdc_wait();
    uint32_t e = *(volatile uint32_t *)ipc_epoch(v.own, v.block);
    gdc_trigger();
    int64_t pairs = (n + 1) / 2, stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x; at < pairs; at += stride) {
        e++;
        bool ok;
        if ((e & IPC_CLEARING) == 0)
            ok = one_shot_piece<W, true>(v, e, x, at / 2,
                                         min((int64_t)blockDim.x, pairs - at + 1) / 2, n);
        else
            ok = packet_piece<W>(v, e, x, at + threadIdx.x, n);
        if (!ok) return;
    }
    if (threadIdx.x == 0) *ipc_epoch(v.own, v.block) = e;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* dst[r] = src of rank r, count items of T each. src may be dst[rank]. */
template <typename T, bool PUSH>
__global__ void __launch_bounds__(IPC_THREADS)
    gather_parts(const struct ipc_table *t, const T *src, T *dst, int64_t count) {
    const struct ipc_view v = ipc_look(t);
    ipc_pieces(v, count, ipc_most<PUSH>(v, sizeof(T)), 1, [&](uint32_t e, int64_t at, int64_t n) {
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const T mine = src[at + i];
            dst[v.rank * count + at + i] = mine;
            ipc_give<PUSH>(v, e, i, mine);
        }
        if (!ipc_exchange(v, e)) return false;
        for (int k = 1; k < v.world; k++) {
            const int p = ipc_peer(v, k);
            const T *from = (const T *)ipc_inbox<PUSH>(v, e, p);
            for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
                dst[p * count + at + i] = __ldcg(from + i);
        }
        return true;
    });
}

/* x of rank root goes to all, count items of T. */
template <typename T, bool PUSH>
__global__ void __launch_bounds__(IPC_THREADS)
    broadcast_from(const struct ipc_table *t, T *x, int64_t count, int root) {
    const struct ipc_view v = ipc_look(t);
    ipc_pieces(v, count, ipc_most<PUSH>(v, sizeof(T)), 1, [&](uint32_t e, int64_t at, int64_t n) {
        for (int64_t i = threadIdx.x; v.rank == root && i < n; i += blockDim.x)
            ipc_give<PUSH>(v, e, i, x[at + i]);
        if (!ipc_exchange(v, e)) return false;
        const T *from = (const T *)ipc_inbox<PUSH>(v, e, root);
        for (int64_t i = threadIdx.x; v.rank != root && i < n; i += blockDim.x)
            x[at + i] = __ldcg(from + i);
        return true;
    });
}

#endif
