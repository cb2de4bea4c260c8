/* kernels/cuda/dense.cuh: unquantised matrices (F32, F16, BF16), which keep file order.
 *
 * Owns: nothing.  Called by: gemv.cu, gemm_dense.cu, experts_many.cu, rows.cu.
 * Tested by: tests/gpu/check_ops.c
 */
#ifndef OCTAVO_KERNELS_CUDA_DENSE_H
#define OCTAVO_KERNELS_CUDA_DENSE_H

#include "kernels/cuda/cuda.cuh"

/* Elements k..k + 3 of a row; n elements are left. */
static __device__ __forceinline__ float4 dense_load(int type, const uint8_t *row, int64_t k,
                                                    int64_t n) {
    float v[4] = {0, 0, 0, 0};
    if (type == KT_F32) {
        const float *p = (const float *)row + k;
        if (n >= 4) return load_float4(p);
        for (int i = 0; i < n; i++) v[i] = p[i];
    } else if (type == KT_F16) {
        const __half *p = (const __half *)row + k;
        for (int i = 0; i < 4 && i < n; i++) v[i] = __half2float(p[i]);
    } else {
        const uint16_t *p = (const uint16_t *)row + k;
        for (int i = 0; i < 4 && i < n; i++) v[i] = __uint_as_float((uint32_t)p[i] << 16);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

static __device__ __forceinline__ int dense_bytes(int type) { return type == KT_F32 ? 4 : 2; }

#endif
