/* worker/bench.h: measuring the backend on models that exist only in device memory.
 *
 * octavo-worker-cuda --bench. Called by: worker/main.c, and the program of its own that needs no
 * messaging libraries.
 */
#ifndef OCTAVO_WORKER_BENCH_H
#define OCTAVO_WORKER_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Arguments after --bench. 0, or 2 with a sentence on stderr when they make no sense. */
int bench_main(int argc, char **argv);

/* bench_device.cu: what the kernel table has no slot for. Memory is device memory. */

/* Random quantised blocks of a type, `bytes` of them as the backend packs them, values about `size`
 * in magnitude; or random float32 in ±size for type 0. */
void bench_fill_weights(int type, void *p, uint64_t bytes, float size, uint64_t seed);
void bench_fill_floats(float *p, uint64_t n, float size, uint64_t seed);
void bench_fill_constant(float *p, uint64_t n, float value);
void bench_fill_cache(void *p, uint64_t bytes, uint64_t element_bytes, uint64_t seed);

/* Bytes per second of reading, over a buffer far larger than the caches. */
double bench_read_bandwidth(void);


#ifdef __cplusplus
}
#endif
#endif
