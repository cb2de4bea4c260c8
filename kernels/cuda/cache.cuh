/* kernels/cuda/cache.cuh: where a position's row stands in a paged cache, and its element type.
 *
 * Owns: nothing.  Called by: prep.cuh, select.cu, attend_many.cu.
 */
#ifndef OCTAVO_KERNELS_CUDA_CACHE_H
#define OCTAVO_KERNELS_CUDA_CACHE_H

#include "kernels/cuda/cuda.cuh"

/* Row number, in rows of the cache, of position pos of a slot. */
static __device__ __forceinline__ int64_t cache_row(const int32_t *page_table, int max_pages,
                                                    int slot, int pos) {
    int64_t page = page_table[(int64_t)slot * max_pages + pos / K_PAGE];
    return page * K_PAGE + pos % K_PAGE;
}

template <typename E> static __device__ __forceinline__ E cache_element(float v);
template <> __device__ __forceinline__ float cache_element<float>(float v) { return v; }
template <> __device__ __forceinline__ __half cache_element<__half>(float v) {
    return __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f));
}
static __device__ __forceinline__ float cache_float(float v) { return v; }
static __device__ __forceinline__ float cache_float(__half v) { return __half2float(v); }

#endif
