/* tests/gpu/coll_rank.cuh: one rank of test_coll_gpu.cu: its values, its operations, its life.
 *
 * Owns: a rank's stream, buffers and collective.  Called by: the scenarios of test_coll_gpu.cu.
 * Fails how: a scenario's failure is a sentence on the board, with rank and seed.
 *
 * Values come from a hash of (seed, round, rank, index), so host and device, and any rank for any
 * other, can say what a sum must be, bit for bit.
 */
#ifndef OCTAVO_TESTS_GPU_COLL_RANK_H
#define OCTAVO_TESTS_GPU_COLL_RANK_H

#include <atomic>
#include <cstdarg>
#include <cstring>
#include <ctime>
#include <unistd.h>
#include <vector>

#include "kernels/cuda/cuda.cuh"
#include "worker/coll_ipc.h"

#define RANKS_MAX   8
#define FLOATS_MAX  (4 << 20)
#define GENERATIONS 6

/* ---- shared between the processes of a scenario ---------------------------------------------- */

struct board {
    char failure[RANKS_MAX][240];
    char note[160];
    std::atomic<int> ready, phase, go;
    std::atomic<int> at[RANKS_MAX]; /* the round a rank is in */
    double seconds;
};

struct scenario {
    const char *name;
    bool (*body)(struct rank *);
    int world;
    bool threads;
    struct ipc_options options;
    int kill_rank; /* 1 + the rank that dies and is started anew */
    bool talks;    /* its log is worth reading */
};

struct rank {
    const struct scenario *s;
    struct board *board;
    int rank, world;
    bool newborn;
    int fd[GENERATIONS];
    uint64_t shm_bytes, seed;
    struct kctx ctx;
    struct ipc_slab *slab;
    struct coll *c;
    float *x;      /* [FLOATS_MAX + 16] */
    float *all;    /* [FLOATS_MAX] */
    uint32_t *bad; /* [4] mismatches; replay number */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool failed(struct rank *k, const char *fmt, ...) {
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    snprintf(k->board->failure[k->rank], sizeof k->board->failure[k->rank], "rank %d seed %llu: %s",
             k->rank, (unsigned long long)k->seed, text);
    return false;
}

#define EXPECT(k, x)                                                                               \
    do {                                                                                           \
        if (!(x)) return failed(k, "line %d: expected %s", __LINE__, #x);                          \
    } while (0)

/* ---- values ---------------------------------------------------------------------------------- */

static __host__ __device__ uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Exponents differ, so that the order of adding shows in the bits. */
static __host__ __device__ float value(uint64_t seed, uint64_t round, int rank, int64_t i) {
    uint64_t r = mix(seed ^ mix(round << 40 ^ (uint64_t)rank << 32 ^ (uint64_t)i));
    return (float)(int32_t)(r >> 32) * 4.656612873077393e-10f * (float)(1 << (r & 15));
}

static __host__ __device__ float sum_of(uint64_t seed, uint64_t round, int world, int64_t i) {
    float s = value(seed, round, 0, i);
    for (int r = 1; r < world; r++) s = s + value(seed, round, r, i);
    return s;
}

/* The round is `round`, or, in graphs, counted on the device from it. */
static __global__ void fill(float *x, int64_t n, uint64_t seed, uint64_t round,
                            const uint32_t *counted, int rank) {
    gdc_wait();
    if (counted) round += (uint64_t) * (volatile const uint32_t *)counted * 64;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x)
        x[i] = value(seed, round, rank, i);
}

enum { CHECK_SUM, CHECK_GATHER, CHECK_ROOT };

static __global__ void verify(const float *x, int64_t n, uint64_t seed, uint64_t round,
                              const uint32_t *counted, int world, int what, int root,
                              uint32_t *bad) {
    gdc_wait();
    if (counted) round += (uint64_t) * (volatile const uint32_t *)counted * 64;
    int64_t total = what == CHECK_GATHER ? n * world : n;
    uint32_t wrong = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < total;
         i += (int64_t)gridDim.x * blockDim.x) {
        float want = what == CHECK_SUM    ? sum_of(seed, round, world, i)
                     : what == CHECK_ROOT ? value(seed, round, root, i)
                                          : value(seed, round, (int)(i / n), i % n);
        wrong += __float_as_uint(want) != __float_as_uint(x[i]);
    }
    if (wrong) atomicAdd(bad, wrong);
}

static __global__ void count_up(uint32_t *counter) {
    gdc_wait();
    ++*(volatile uint32_t *)counter;
}

static __global__ void dawdle(unsigned us) {
    gdc_wait();
    for (unsigned i = 0; i < us; i++) __nanosleep(1000);
}

/* Stays until so many nanoseconds have passed. */
static __global__ void occupy(uint64_t ns) {
    uint64_t from, now;
    gdc_wait();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(from));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - from < ns);
}

/* ---- one rank's life ------------------------------------------------------------------------- */

static bool open_device(struct rank *k) {
    CU(cudaSetDevice(0));
    CU(cudaGetDeviceProperties(&k->ctx.prop, 0));
    k->ctx.pdl = getenv("OCTAVO_CUDA_PDL") == NULL;
    CU(cudaStreamCreateWithFlags(&k->ctx.stream, cudaStreamNonBlocking));
    CU(cudaMalloc((void **)&k->x, (FLOATS_MAX + 16) * sizeof(float)));
    CU(cudaMalloc((void **)&k->all, FLOATS_MAX * sizeof(float)));
    CU(cudaMalloc((void **)&k->bad, 4 * sizeof(uint32_t)));
    CU(cudaMemset(k->bad, 0, 4 * sizeof(uint32_t)));
    CU(cudaDeviceSynchronize());
    return true;
}

static int open_shm(struct rank *k, int generation, struct coll **shm, struct err_text *err) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", k->fd[generation]);
    return coll_open_shm(shm, path, k->shm_bytes, k->rank, k->world, (uint32_t)generation + 1, err);
}

static bool open_generation(struct rank *k, int generation) {
    struct err_text err = {};
    struct coll *shm;
    if (open_shm(k, generation, &shm, &err) < 0 ||
        (!k->slab &&
         ipc_slab_new(&k->slab, &k->ctx, k->rank, k->world, &k->s->options, &err) < 0) ||
        coll_open_ipc(&k->c, k->slab, shm, &err) < 0)
        return failed(k, "generation %d: expected to open, found: %s", generation, err.text);
    return true;
}

static void close_rank(struct rank *k) {
    if (k->c) coll_close(k->c);
    ipc_slab_free(k->slab);
    k->c = NULL, k->slab = NULL;
}

static bool sync_and_count(struct rank *k, const char *what, uint64_t round, int64_t n) {
    uint32_t bad = 0;
    CU(cudaMemcpyAsync(&bad, k->bad, sizeof bad, cudaMemcpyDeviceToHost, k->ctx.stream));
    CU(cudaStreamSynchronize(k->ctx.stream));
    if (bad)
        return failed(k, "%s round %llu of %lld floats: expected 0 wrong values, found %u", what,
                      (unsigned long long)round, (long long)n, bad);
    return true;
}

static int64_t some_size(struct rank *k, int round, int64_t most) {
    uint64_t r = mix(k->seed * 3 + (uint64_t)round);
    int64_t bound = r % 16 == 0 ? most : r % 4 == 0 ? 200000 : r % 4 == 1 ? 40 : 20000;
    return 1 + (int64_t)((r >> 8) % (uint64_t)MIN(bound, most));
}

static bool same_as_on_host(struct rank *k, const float *x, uint64_t round, int64_t n) {
    std::vector<float> h((size_t)n);
    CU(cudaMemcpyAsync(h.data(), x, (size_t)n * 4, cudaMemcpyDeviceToHost, k->ctx.stream));
    CU(cudaStreamSynchronize(k->ctx.stream));
    for (int64_t i = 0; i < n; i++) {
        float want = sum_of(k->seed, round, k->world, i);
        if (memcmp(&want, &h[(size_t)i], 4) != 0)
            return failed(k, "round %llu element %lld of %lld: expected %a, found %a",
                          (unsigned long long)round, (long long)i, (long long)n, want,
                          h[(size_t)i]);
    }
    return true;
}

/* One operation of a kind, size, alignment and skew drawn from the seed. */
static bool some_operation(struct rank *k, int round, int64_t most) {
    cudaStream_t s = k->ctx.stream;
    k->board->at[k->rank] = round;
    uint64_t draw = mix(k->seed + (uint64_t)round);
    uint64_t lag = mix(draw + (uint64_t)k->rank);
    int64_t n = some_size(k, round, most);
    float *x = k->x + (draw >> 20) % 4; /* any float's address */
    int root = (int)((draw >> 32) % (uint64_t)k->world), kind = (int)(draw % 8);
    if (lag % 4 == 0) usleep((useconds_t)((lag >> 8) % 300));
    if (lag % 4 == 1) launch(&k->ctx, dawdle, 1, 32, 0, (unsigned)((lag >> 8) % 200));
    if (kind >= 5) n = MIN(n, most / k->world);
    fill<<<64, 256, 0, s>>>(x, n, k->seed, (uint64_t)round, NULL, k->rank);
    if (kind < 5) {
        EXPECT(k, coll_all_reduce(k->c, x, n) == OK);
        verify<<<64, 256, 0, s>>>(x, n, k->seed, (uint64_t)round, NULL, k->world, CHECK_SUM, 0,
                                  k->bad);
        if (!sync_and_count(k, "all_reduce", (uint64_t)round, n)) return false;
        return n > 3000 || same_as_on_host(k, x, (uint64_t)round, n);
    }
    if (kind < 7) {
        EXPECT(k, coll_all_gather(k->c, x, k->all, n * 4) == OK);
        verify<<<64, 256, 0, s>>>(k->all, n, k->seed, (uint64_t)round, NULL, k->world, CHECK_GATHER,
                                  0, k->bad);
        return sync_and_count(k, "all_gather", (uint64_t)round, n);
    }
    EXPECT(k, coll_broadcast(k->c, x, n * 4 - (n > 1 ? 3 : 0), root) == OK);
    verify<<<64, 256, 0, s>>>(x, n > 1 ? n - 1 : n, k->seed, (uint64_t)round, NULL, k->world,
                              CHECK_ROOT, root, k->bad);
    return sync_and_count(k, "broadcast", (uint64_t)round, n);
}

/* A chain of sums of the sizes of all algorithms over one buffer, each filled and checked on the
 * device inside the graph, with a round that the device counts: nothing waits between replays. */
static const int64_t chain_sizes[] = {6144, 129, 40001, 6144, 300007, 24576, 7};

static void queue_chain(struct rank *k, bool counted, uint64_t round) {
    cudaStream_t s = k->ctx.stream;
    for (size_t i = 0; i < sizeof chain_sizes / sizeof chain_sizes[0]; i++, round++) {
        int64_t n = chain_sizes[i];
        const uint32_t *counter = counted ? k->bad + 1 : NULL;
        fill<<<16, 256, 0, s>>>(k->x, n, k->seed, round, counter, k->rank);
        coll_all_reduce(k->c, k->x, n);
        verify<<<16, 256, 0, s>>>(k->x, n, k->seed, round, counter, k->world, CHECK_SUM, 0, k->bad);
    }
    if (counted) launch(&k->ctx, count_up, 1, 1, 0, k->bad + 1);
}

static cudaGraphExec_t capture_chain(struct rank *k) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CU(cudaStreamBeginCapture(k->ctx.stream, cudaStreamCaptureModeThreadLocal));
    k->ctx.capturing = true;
    queue_chain(k, true, 0);
    k->ctx.capturing = false;
    CU(cudaStreamEndCapture(k->ctx.stream, &graph));
    CU(cudaGraphInstantiate(&exec, graph, 0));
    CU(cudaGraphDestroy(graph));
    return exec;
}

#endif
