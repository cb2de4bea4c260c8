/* worker/bench_device_cpu.c: what the benchmark asks of the CPU backend's device, which is the
 * host.
 *
 * Owns: nothing that lasts.  Called by: the benchmark.  Fails how: ends the process.
 * Limits: the weight types that the benchmark makes.  Tested by: tests/tree/test_bench.py
 */
#include <stdlib.h>
#include <string.h>

#include "worker/bench.h"

#define READ_BYTES ((size_t)128 << 20)

static uint64_t mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

static float random_float(uint64_t n) {
    return (float)(int32_t)(uint32_t)mix(n) * 0x1p-31f;
}

void bench_fill_floats(float *p, uint64_t n, float size, uint64_t seed) {
    for (uint64_t i = 0; i < n; i++) p[i] = size * random_float(seed + i);
}

void bench_fill_constant(float *p, uint64_t n, float value) {
    for (uint64_t i = 0; i < n; i++) p[i] = value;
}

void bench_fill_cache(void *p, uint64_t bytes, uint64_t element_bytes, uint64_t seed) {
    if (element_bytes == sizeof(float)) bench_fill_floats(p, bytes / sizeof(float), 1, seed);
}

/* Half precision of a small positive number; no denormals, no rounding to speak of. */
static uint16_t to_half(float v) {
    uint32_t u;
    memcpy(&u, &v, sizeof u);
    int exponent = (int)(u >> 23 & 255) - 127 + 15;
    return exponent <= 0 ? 0x0400 : (uint16_t)(exponent << 10 | (u >> 13 & 0x3ff));
}

/* Where the scale of a block stands, that of its minimum (-1: none), and what its codes reach. */
static void scales_of(int type, int *scale, int *minimum, float *reach) {
    *minimum = type == KT_Q4_K || type == KT_Q5_K ? 2 : -1;
    *scale = type == KT_Q6_K ? ktype_block_bytes(type) - 2 : 0;
    *reach = type == KT_Q8_0   ? 128.f
             : type == KT_Q4_K ? 15.f * 32
             : type == KT_Q5_K ? 31.f * 32
                               : 32.f * 64;
}

void bench_fill_weights(int type, void *p, uint64_t bytes, float size, uint64_t seed) {
    int scale, minimum;
    float reach;
    if (type == KT_F32) {
        bench_fill_floats(p, bytes / sizeof(float), size, seed);
        return;
    }
    scales_of(type, &scale, &minimum, &reach);
    uint64_t block = (uint64_t)ktype_block_bytes(type);
    for (uint64_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
        uint64_t word = mix(seed + at);
        memcpy((uint8_t *)p + at, &word, sizeof word);
    }
    const uint16_t d = to_half(size / reach), m = to_half(size / 64);
    for (uint64_t at = 0; at < bytes; at += block) {
        memcpy((uint8_t *)p + at + (uint64_t)scale, &d, sizeof d);
        if (minimum >= 0) memcpy((uint8_t *)p + at + (uint64_t)minimum, &m, sizeof m);
    }
}

double bench_read_bandwidth(void) {
    double best = 0;
    volatile uint64_t sink;
    uint64_t *p = malloc(READ_BYTES);
    if (!p) exit(1);
    for (size_t i = 0; i < READ_BYTES / sizeof *p; i++) p[i] = mix(i);
    for (int turn = 0; turn < 3; turn++) {
        uint64_t sum = 0;
        double start = bench_now_us();
        for (size_t i = 0; i < READ_BYTES / sizeof *p; i++) sum ^= p[i];
        sink = sum;
        best = MAX(best, (double)READ_BYTES / (bench_now_us() - start) * 1e6);
    }
    UNUSED(sink);
    free(p);
    return best;
}

double bench_matrix_rate(void) {
    return 0;
}

void bench_flush(struct kctx *ctx) {
    UNUSED(ctx);
}

bool bench_loopback(struct coll **out, struct kctx *ctx, int ranks) {
    UNUSED(out), UNUSED(ctx), UNUSED(ranks);
    return false;
}
