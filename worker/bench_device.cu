/* worker/bench_device.cu: device-side helpers of the benchmark: random weights, ceilings.
 *
 * Owns: the buffer that flushes the caches.  Called by: the benchmark.
 * Fails how: prints and ends the process.  Limits: none.  Tested by: being run.
 *
 * Weights are written in the packed order directly (kernels/cuda/quant.cuh): 26 to 55 GB would take
 * minutes to make on the host and send over. Data is random, not zero: zeros run faster.
 */
#include <algorithm>
#include <vector>

#include "kernels/cuda/quant.cuh"
#include "worker/bench.h"
#include "worker/coll_ipc.h"

static __device__ uint64_t mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

static __global__ void fill_words(uint64_t *p, uint64_t n, uint64_t seed) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        p[i] = mix(seed + i);
}

/* Sets the half-precision scales of one row of one cell: d to `d`, the minimum to `m`. */
static __global__ void fill_scales(uint8_t *p, uint64_t cells, int type, struct cell_shape s,
                                   float d, float m) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= cells * 16) return;
    int row = (int)(i % 16);
    uint8_t *cell = p + i / 16 * s.bytes + s.code_bytes;
    __half hd = __float2half_rn(d), hm = __float2half_rn(m);
    switch (type) {
    case KT_Q2_K: ((__half *)(cell + 256 + 4 * row))[0] = hd, ((__half *)(cell + 256 + 4 * row))[1] = hm; break;
    case KT_Q3_K: *(__half *)(cell + 192 + 2 * row) = hd; break;
    case KT_Q4_K:
    case KT_Q5_K: ((__half *)(cell + 16 * row))[0] = hd, ((__half *)(cell + 16 * row))[1] = hm; break;
    case KT_Q6_K: *(__half *)(cell + 256 + 2 * row) = hd; break;
    case KT_IQ4_XS: *(__half *)(cell + 8 * row) = hd; break;
    default:
        ((__half *)cell)[row] = hd;
        if (type == KT_Q4_1 || type == KT_Q5_1) ((__half *)(cell + 32))[row] = hm;
    }
}

static __global__ void fill_floats(float *p, uint64_t n, float size, float offset, uint64_t seed) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        p[i] = offset + size * ((float)(int32_t)(uint32_t)mix(seed + i) * 0x1p-31f);
}

static __global__ void fill_halves(__half *p, uint64_t n, uint64_t seed) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        p[i] = __float2half_rn((float)(int32_t)(uint32_t)mix(seed + i) * 0x1p-31f);
}

void bench_fill_floats(float *p, uint64_t n, float size, uint64_t seed) {
    fill_floats<<<2048, 256>>>(p, n, size, 0.f, seed);
    CU(cudaDeviceSynchronize());
}

void bench_fill_constant(float *p, uint64_t n, float value) {
    fill_floats<<<2048, 256>>>(p, n, 0.f, value, 0);
    CU(cudaDeviceSynchronize());
}

void bench_fill_cache(void *p, uint64_t bytes, uint64_t element_bytes, uint64_t seed) {
    if (element_bytes == 4) bench_fill_floats((float *)p, bytes / 4, 1.f, seed);
    else fill_halves<<<2048, 256>>>((__half *)p, bytes / 2, seed);
    CU(cudaDeviceSynchronize());
}

/* The largest whole number that a code, with its small scale where there is one, stands for. */
static float code_size(int type) {
    switch (type) {
    case KT_Q8_0: return 128.f;
    case KT_Q4_K: return 15.f * 32;
    case KT_Q5_K: return 31.f * 32;
    case KT_Q6_K: return 32.f * 64;
    default: return 16.f;
    }
}

void bench_fill_weights(int type, void *p, uint64_t bytes, float size, uint64_t seed) {
    if (type == KT_F32) {
        bench_fill_floats((float *)p, bytes / 4, size, seed);
        return;
    }
    struct cell_shape s = cell_shape(type);
    uint64_t cells = bytes / (uint64_t)s.bytes;
    fill_words<<<4096, 256>>>((uint64_t *)p, bytes / 8, seed);
    float d = size / code_size(type);
    fill_scales<<<(unsigned)ceil_div((int64_t)cells * 16, 256), 256>>>(
        (uint8_t *)p, cells, type, s, d, type == KT_Q4_K || type == KT_Q5_K ? size / 64 : 0.f);
    CU(cudaGetLastError());
    CU(cudaDeviceSynchronize());
}

static __global__ void __launch_bounds__(512) read_kernel(const uint4 *p, uint64_t n, uint4 *out) {
    uint4 sum = make_uint4(0, 0, 0, 0);
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = __ldcs(p + i), b = __ldcs(p + i + step);
        uint4 c = __ldcs(p + i + 2 * step), d = __ldcs(p + i + 3 * step);
        sum.x ^= a.x ^ b.x ^ c.x ^ d.x, sum.y ^= a.y ^ b.y ^ c.y ^ d.y;
        sum.z ^= a.z ^ b.z ^ c.z ^ d.z, sum.w ^= a.w ^ b.w ^ c.w ^ d.w;
    }
    if (sum.x == 0x12345678 && sum.y == 0x9abcdef0) *out = sum;
}

double bench_read_bandwidth(void) {
    const uint64_t bytes = (uint64_t)4 << 30;
    void *p;
    cudaEvent_t e[2];
    std::vector<double> rate;
    CU(cudaMalloc(&p, bytes));
    fill_words<<<4096, 256>>>((uint64_t *)p, bytes / 8, 7);
    for (int i = 0; i < 2; i++) CU(cudaEventCreate(&e[i]));
    for (int i = 0; i < 9; i++) {
        float ms;
        CU(cudaEventRecord(e[0]));
        read_kernel<<<132 * 4, 512>>>((const uint4 *)p, bytes / 16, (uint4 *)p);
        CU(cudaEventRecord(e[1]));
        CU(cudaEventSynchronize(e[1]));
        CU(cudaEventElapsedTime(&ms, e[0], e[1]));
        if (i >= 2) rate.push_back((double)bytes / ms * 1e3);
    }
    for (int i = 0; i < 2; i++) CU(cudaEventDestroy(e[i]));
    CU(cudaFree(p));
    std::sort(rate.begin(), rate.end());
    return rate[rate.size() / 2];
}

/* ---- the matrix units ------------------------------------------------------------------------ */

#define RATE_TURNS 2000

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define RATE_WARPGROUPS 1
#else
#define RATE_WARPGROUPS 0
#endif

#define R8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]),          \
              "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

/* Random bits with exponents near one. */
static __device__ uint32_t rate_word(uint64_t n) {
    return ((uint32_t)mix(n) & 0x83ff83ffu) | 0x38003800u;
}

#if RATE_WARPGROUPS
/* d[64, 128] += a[64, 16] b[16, 128], both in shared memory, without swizzle. */
static __device__ __forceinline__ void rate_wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, 0, 0;"
        : R8(0), R8(8), R8(16), R8(24), R8(32), R8(40), R8(48), R8(56)
        : "l"(a), "l"(b));
}

static __device__ __forceinline__ uint64_t rate_operand(const void *p) {
    return (uint64_t)(smem_addr(p) >> 4 & 0x3fff) | (uint64_t)8 << 16 | (uint64_t)16 << 32;
}

static __device__ float rate_loop(uint32_t *smem) {
    float d[64];
    for (int i = 0; i < 64; i++) d[i] = 0;
    uint64_t a = rate_operand(smem + threadIdx.x / 128 * 512), b = rate_operand(smem + 2048);
    for (int turn = 0; turn < RATE_TURNS; turn++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int i = 0; i < 4; i++) rate_wgmma(d, a, b);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float sum = 0;
    for (int i = 0; i < 64; i++) sum += d[i];
    return sum;
}
#else
/* Per warp and turn as many operations as a quarter of a group above. */
static __device__ float rate_loop(uint32_t *smem) {
    float d[8][4];
    uint32_t r[6];
    for (int i = 0; i < 32; i++) d[i / 4][i % 4] = 0;
    for (int i = 0; i < 6; i++) r[i] = smem[(threadIdx.x * 6 + i) % 4096];
    for (int turn = 0; turn < RATE_TURNS * 4; turn++)
#pragma unroll
        for (int i = 0; i < 64; i++) mma16816(d[i % 8], r[0], r[1], r[2], r[3], r[4], r[5]);
    float sum = 0;
    for (int i = 0; i < 32; i++) sum += d[i / 4][i % 4];
    return sum;
}
#endif

/* 512 threads: 2 * 64 * 128 * 16 * 4 * 4 operations per turn. */
static __global__ void __launch_bounds__(512) rate_kernel(float *out) {
    __shared__ __align__(1024) uint32_t smem[4096];
    for (int i = threadIdx.x; i < 4096; i += blockDim.x) smem[i] = rate_word(i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float sum = rate_loop(smem);
    if (sum == 1.2345f) *out = sum;
}

static double timed(cudaEvent_t *e, void (*run)(void *), void *user) {
    float ms;
    CU(cudaEventRecord(e[0]));
    run(user);
    CU(cudaEventRecord(e[1]));
    CU(cudaEventSynchronize(e[1]));
    CU(cudaEventElapsedTime(&ms, e[0], e[1]));
    return ms / 1e3;
}

struct rate_run {
    float *out;
    int blocks;
};

static void run_rate(void *user) {
    const struct rate_run *r = (const struct rate_run *)user;
    rate_kernel<<<r->blocks, 512>>>(r->out);
}

double bench_matrix_rate(void) {
    int device;
    cudaDeviceProp prop;
    struct rate_run r = {NULL, 0};
    cudaEvent_t e[2];
    std::vector<double> rate;
    CU(cudaGetDevice(&device));
    CU(cudaGetDeviceProperties(&prop, device));
    CU(cudaMalloc((void **)&r.out, 256));
    r.blocks = prop.multiProcessorCount;
    for (int i = 0; i < 2; i++) CU(cudaEventCreate(&e[i]));
    for (int i = 0; i < 7; i++) {
        double seconds = timed(e, run_rate, &r);
        if (i >= 2) rate.push_back(2.0 * 64 * 128 * 16 * 16 * RATE_TURNS * r.blocks / seconds);
    }
    CU(cudaGetLastError());
    for (int i = 0; i < 2; i++) CU(cudaEventDestroy(e[i]));
    CU(cudaFree(r.out));
    std::sort(rate.begin(), rate.end());
    return rate[rate.size() / 2];
}

/* ---- between turns --------------------------------------------------------------------------- */

void bench_flush(struct kctx *ctx) {
    static void *buffer;
    const size_t bytes = (size_t)256 << 20;
    if (!buffer) CU(cudaMalloc(&buffer, bytes));
    for (int i = 0; i < 3; i++) /* long enough for the host to queue what is measured */
        CU(cudaMemsetAsync(buffer, 0x5a, bytes, ctx->stream));
}

bool bench_loopback(struct coll **out, struct kctx *ctx, int ranks) {
    struct err_text err = {};
    if (ranks < 2) return false;
    if (coll_open_loopback(out, ctx, ranks, NULL, &err) == OK) return true;
    fprintf(stderr, "bench: %s\n", err.text);
    exit(1);
}
