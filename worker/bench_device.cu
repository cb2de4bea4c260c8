/* worker/bench_device.cu: device-side helpers of the benchmark: random weights, read bandwidth.
 *
 * Owns: nothing that lasts.  Called by: worker/bench.c.  Fails how: prints and ends the process.
 * Limits: none.  Tested by: being run.
 *
 * Weights are written in the packed order directly (kernels/cuda/quant.cuh): 26 to 55 GB would take
 * minutes to make on the host and send over. Data is random, not zero: zeros run faster.
 */
#include <algorithm>
#include <vector>

#include "kernels/cuda/quant.cuh"
#include "worker/bench.h"

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
