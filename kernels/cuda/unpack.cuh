/* kernels/cuda/unpack.cuh: quantised weights as operands of half-precision products, quickly.
 *
 * Owns: nothing.  Called by: gemm_wide.cu.  Tested by: tests/gpu/check_ops.c
 *
 * A warp's sixteen rows by 64 columns of a cell become sixteen registers a lane: for each sixteen
 * columns the operand of one product. Of its columns 4t..4t+3 a lane takes the even ones first:
 * that pairing falls out of one mask per register, and gemm_wide.cu converts x into the same order.
 * What a code costs is counted in instructions: and-or (1024 + code, or 1024 + 16 code, as a
 * half-precision number), subtract, scale.
 *
 * Numbers: codes are exact, a scale is rounded once to half precision (as gemm.cu does), and 64 w
 * once.
 */
#ifndef OCTAVO_KERNELS_CUDA_UNPACK_H
#define OCTAVO_KERNELS_CUDA_UNPACK_H

#include "kernels/cuda/quant.cuh"

#define UNPACK_SCALE 64.f

static constexpr bool unpack_takes(int type) {
    return type == KT_Q8_0 || type == KT_Q4_K || type == KT_Q5_K || type == KT_Q6_K;
}

static __device__ __forceinline__ __half2 as_half2(uint32_t v) {
    return *reinterpret_cast<__half2 *>(&v);
}
static __device__ __forceinline__ uint32_t as_bits(__half2 v) {
    return *reinterpret_cast<uint32_t *>(&v);
}
/* (v & mask) | with: one instruction, as long as the compiler does not know `with`. */
static __device__ __forceinline__ uint32_t and_or(uint32_t v, uint32_t mask, uint32_t with) {
    return (v & mask) | with;
}

/* What a lane keeps of its two rows of a 256-column cell. */
template <int TYPE> struct cell_scales {
    uint32_t dm[2];                  /* 64 d; and -64 of what is subtracted */
    uint32_t scale[2][4], low[2][2]; /* bytes */

    __device__ __forceinline__ void load(const uint8_t *cell, int lane) {
        const uint8_t *s = cell + quant<TYPE>::code_bytes;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint4 v = *(const uint4 *)(s + 16 * ((lane >> 2) + 8 * r));
            if constexpr (TYPE == KT_Q6_K) {
                scale[r][0] = v.x ^ 0x80808080, scale[r][1] = v.y ^ 0x80808080;
                scale[r][2] = v.z ^ 0x80808080, scale[r][3] = v.w ^ 0x80808080;
                __half d = *(const __half *)(s + 256 + 2 * ((lane >> 2) + 8 * r));
                dm[r] = as_bits(__hmul2(__half2half2(d), __float2half2_rn(UNPACK_SCALE)));
            } else {
                dm[r] =
                    as_bits(__hmul2(as_half2(v.x), __floats2half2_rn(UNPACK_SCALE, -UNPACK_SCALE)));
                scale[r][0] = v.y & 0x3f3f3f3f;
                scale[r][1] = (v.w & 0x0f0f0f0f) | ((v.y >> 2) & 0x30303030);
                low[r][0] = v.z & 0x3f3f3f3f;
                low[r][1] = ((v.w >> 4) & 0x0f0f0f0f) | ((v.z >> 2) & 0x30303030);
            }
        }
    }

    /* Of row r, for the four sixteens of columns 64 s .. 64 s + 63. */
    __device__ __forceinline__ void of(int r, int s, __half2 (&by)[4], __half2 (&less)[4]) const {
        const __half2 base = as_half2(dup16(TYPE == KT_Q6_K ? 0x6400 + 128 : 0x6400));
        if constexpr (TYPE == KT_Q6_K) {
            uint32_t w = pick4(scale[r], s);
            __half2 a = __hsub2(as_half2(__byte_perm(w, 0x64646464, 0x4140)), base);
            __half2 b = __hsub2(as_half2(__byte_perm(w, 0x64646464, 0x4342)), base);
            a = __hmul2(a, as_half2(dm[r]));
            b = __hmul2(b, as_half2(dm[r]));
            by[0] = __low2half2(a), by[1] = __high2half2(a);
            by[2] = __low2half2(b), by[3] = __high2half2(b);
        } else {
            uint32_t pick = s & 1 ? 0x4342 : 0x4140;
            uint32_t w = s < 2 ? scale[r][0] : scale[r][1], l = s < 2 ? low[r][0] : low[r][1];
            __half2 a = __hsub2(as_half2(__byte_perm(w, 0x64646464, pick)), base);
            __half2 b = __hsub2(as_half2(__byte_perm(l, 0x64646464, pick)), base);
            a = __hmul2(a, __low2half2(as_half2(dm[r])));
            b = __hmul2(b, __high2half2(as_half2(dm[r])));
            by[0] = by[1] = __low2half2(a), by[2] = by[3] = __high2half2(a);
            less[0] = less[1] = __low2half2(b), less[2] = less[3] = __high2half2(b);
        }
    }
};
template <> struct cell_scales<KT_Q8_0> {
    __device__ __forceinline__ void load(const uint8_t *, int) {}
};

/* 32 columns (group b of a 256-column cell, whose half h is b % 2) of codes as 1024 + code for the
 * first sixteen and 1024 + 16 code for the second: out[4 * half + 2 * odd + r]. */
template <int TYPE>
static __device__ __forceinline__ void codes_1024(const uint8_t *cell, int s, int h, int lane,
                                                  uint32_t magic, uint32_t high_bits,
                                                  uint32_t (&out)[8]) {
    uint2 v = *(const uint2 *)(cell + (2 * s + h) * 256 + lane * 8);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t w = r == 0 ? v.x : v.y, odd = w >> 8;
        out[r] = and_or(w, 0x000f000f, magic);
        out[2 + r] = and_or(odd, 0x000f000f, magic);
        out[4 + r] = and_or(w, 0x00f000f0, magic);
        out[6 + r] = and_or(odd, 0x00f000f0, magic);
    }
    if constexpr (TYPE == KT_Q5_K) { /* bit 4 h + q of each byte; q = 2 half + r */
#pragma unroll
        for (int q = 0; q < 4; q++) {
            int from = 4 * h + q, to = q < 2 ? 4 : 8, at = q < 2 ? q : 4 + q - 2;
            uint32_t mask = q < 2 ? 0x00100010 : 0x01000100;
            out[at] |= shift_to(high_bits, from, to) & mask;
            out[at + 2] |= shift_to(high_bits, from + 8, to) & mask;
        }
    } else if constexpr (TYPE == KT_Q6_K) { /* bits 2 q and 2 q + 1 */
        uint32_t w = *(const uint32_t *)(cell + 8 * 256 + (2 * s + h) * 128 + lane * 4);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            int to = q < 2 ? 4 : 8, at = q < 2 ? q : 4 + q - 2;
            uint32_t mask = q < 2 ? 0x00300030 : 0x03000300;
            out[at] |= shift_to(w, 2 * q, to) & mask;
            out[at + 2] |= shift_to(w, 2 * q + 8, to) & mask;
        }
    }
}

/* Columns 64 s .. 64 s + 63 of a 256-column cell, first or second 32 of them (h): a[4 k .. 4 k + 3]
 * is the operand of sixteen columns. magic: 0x64006400, unknown to the compiler. */
template <int TYPE>
static __device__ __forceinline__ void
unpack_group(const uint8_t *cell, int s, int h, int lane, uint32_t magic, uint32_t high_bits,
             const __half2 (&by)[2][4], const __half2 (&less)[2][4], uint32_t (&a)[8]) {
    constexpr int offset = code_offset<TYPE>();
    uint32_t c[8];
    codes_1024<TYPE>(cell, s, h, lane, magic, high_bits, c);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int i = 4 * half + 2 * odd + r;
                __half2 q = half == 0
                                ? __hadd2(as_half2(c[i]), __float2half2_rn(-(1024.f + offset)))
                                : __hfma2(as_half2(c[i]), __float2half2_rn(1 / 16.f),
                                          __float2half2_rn(-(64.f + offset)));
                if constexpr (TYPE == KT_Q6_K)
                    q = __hmul2(q, by[r][2 * h + half]);
                else
                    q = __hfma2(q, by[r][2 * h + half], less[r][2 * h + half]);
                a[i] = as_bits(q);
            }
}

/* The same of one 32-column cell of Q8_0. inside: false gives zeros. */
static __device__ __forceinline__ void unpack_q8(const uint8_t *cell, int lane, bool inside,
                                                 uint32_t (&a)[8]) {
    uint4 v = *(const uint4 *)(cell + lane * 16);
    uint32_t d = *(const uint32_t *)(cell + 512 + 4 * (lane >> 2));
    d = inside ? as_bits(__hmul2(as_half2(d), __float2half2_rn(UNPACK_SCALE))) : 0;
    const uint32_t q[4] = {v.x, v.y, v.z, v.w};
    const __half2 by[2] = {__low2half2(as_half2(d)), __high2half2(as_half2(d))};
    const __half2 base = as_half2(dup16(0x6400 + 128));
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t w = q[2 * half + r] ^ 0x80808080;
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                uint32_t h = __byte_perm(w, 0x64646464, odd ? 0x4341 : 0x4240);
                a[4 * half + 2 * odd + r] = as_bits(__hmul2(__hsub2(as_half2(h), base), by[r]));
            }
        }
}

#endif
