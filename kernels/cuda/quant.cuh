/* kernels/cuda/quant.cuh: how quantised matrices lie on the device, and how a warp decodes them.
 *
 * Owns: nothing.  Called by: repack.cu, gemv.cuh, gemm.cu, embed.cu.
 * Tested by: tests/gpu/check_ops.cu (unpacking gives the file's bytes back; products agree)
 *
 * Layout. A matrix is cut into tiles of sixteen rows (the last one padded with zero blocks), a tile
 * into cells: sixteen rows by one block (32 or 256 columns). The cells of a tile follow each other,
 * so a tile is one run of memory that can be streamed by bulk copies, and a cell has exactly the
 * bytes of its sixteen blocks, only in another order:
 *   codes     for each 32 columns, each lane's sixteen codes (see below), by planes of 8, 4, 2, 1 bits
 *   scales    32-column types: d as [g][row g, row g + 8], then m the same way
 *             256-column types: per row, the block's scale bytes
 *
 * Who decodes what. In the tensor-core product of sixteen weight rows, lane 4g + t supplies rows g
 * and g + 8. Of 32 columns it takes 4t..4t+3 (the first k = 16 step) and 16+4t..16+4t+3 (the
 * second): four pairs per row, which codes() returns as small whole numbers in half precision.
 * The activations are staged in the same order. A code is exact in half precision, so is the
 * product of a code and an activation in float32; scales are applied to sums over 32 (or 16)
 * columns in float32. So weights never lose a bit.
 */
#ifndef OCTAVO_KERNELS_CUDA_QUANT_H
#define OCTAVO_KERNELS_CUDA_QUANT_H

#include "kernels/cuda/cuda.cuh"

/* Bits of a code kept in the plane of 8, 4, 2 or 1 bits. */
enum plane { PLANE_8 = 8, PLANE_4 = 4, PLANE_2 = 2, PLANE_1 = 1 };

/* Geometry of a type's cell; usable on host and device. */
struct cell_shape {
    int cols;        /* of a block: 32 or 256 */
    int bytes;       /* of a cell: sixteen blocks */
    int planes;      /* sum of enum plane */
    int code_bytes;  /* of all planes */
    int row_bytes;   /* scale bytes per row, 256-column types */
};

template <int TYPE> struct quant;
#define QUANT(type, cols_, block_bytes_, planes_)                                                  \
    template <> struct quant<type> {                                                               \
        static constexpr int cols = cols_, bytes = 16 * (block_bytes_), planes = planes_;          \
        static constexpr int code_bytes = (cols_ / 32) * 64 * (planes_);                           \
    }
QUANT(KT_Q4_0, 32, 18, PLANE_4);
QUANT(KT_Q4_1, 32, 20, PLANE_4);
QUANT(KT_Q5_0, 32, 22, PLANE_4 | PLANE_1);
QUANT(KT_Q5_1, 32, 24, PLANE_4 | PLANE_1);
QUANT(KT_Q8_0, 32, 34, PLANE_8);
QUANT(KT_IQ4_NL, 32, 18, PLANE_4);
QUANT(KT_Q2_K, 256, 84, PLANE_2);
QUANT(KT_Q3_K, 256, 110, PLANE_2 | PLANE_1);
QUANT(KT_Q4_K, 256, 144, PLANE_4);
QUANT(KT_Q5_K, 256, 176, PLANE_4 | PLANE_1);
QUANT(KT_Q6_K, 256, 210, PLANE_4 | PLANE_2);
QUANT(KT_IQ4_XS, 256, 136, PLANE_4);
#undef QUANT

/* Types that a product dispatches over. X(type) for each. */
#define QUANT_TYPES(X)                                                                             \
    X(KT_Q4_0) X(KT_Q4_1) X(KT_Q5_0) X(KT_Q5_1) X(KT_Q8_0) X(KT_IQ4_NL) X(KT_Q2_K) X(KT_Q3_K)      \
    X(KT_Q4_K) X(KT_Q5_K) X(KT_Q6_K) X(KT_IQ4_XS)

static __host__ __device__ inline struct cell_shape cell_shape(int type) {
    switch (type) {
#define X(t)                                                                                       \
    case t:                                                                                        \
        return {quant<t>::cols, quant<t>::bytes, quant<t>::planes, quant<t>::code_bytes,           \
                quant<t>::cols == 256 ? quant<t>::bytes / 16 - quant<t>::code_bytes / 16 : 0};
        QUANT_TYPES(X)
#undef X
    default: return {0, 0, 0, 0, 0};
    }
}

static inline bool type_is_dense(int type) {
    return type == KT_F32 || type == KT_F16 || type == KT_BF16;
}

/* Bytes of one packed matrix. */
static inline size_t packed_bytes(int type, int64_t rows, int64_t cols) {
    struct cell_shape s = cell_shape(type);
    return (size_t)ceil_div(rows, 16) * (size_t)(cols / s.cols) * (size_t)s.bytes;
}

#if defined(__CUDACC__)

/* Offset of the code planes of 32-column group b within a cell. Planes stand 8, 4, 2, 1. */
template <int TYPE> static __device__ __forceinline__ int plane_at(int plane, int b) {
    constexpr int groups = quant<TYPE>::cols / 32, has = quant<TYPE>::planes;
    int at = 0;
    if (plane < PLANE_8 && (has & PLANE_8)) at += groups * 512;
    if (plane < PLANE_4 && (has & PLANE_4)) at += groups * 256;
    if (plane < PLANE_2 && (has & PLANE_2)) at += groups * 128;
    return at + b * 64 * plane;
}

static __device__ __forceinline__ uint32_t h2_sub(uint32_t v, uint32_t c) {
    __half2 r = __hsub2(*reinterpret_cast<__half2 *>(&v), *reinterpret_cast<__half2 *>(&c));
    return *reinterpret_cast<uint32_t *>(&r);
}
static __device__ __forceinline__ float h_lo(uint32_t v) {
    return __low2float(*reinterpret_cast<__half2 *>(&v));
}
static __device__ __forceinline__ float h_hi(uint32_t v) {
    return __high2float(*reinterpret_cast<__half2 *>(&v));
}
static constexpr __host__ __device__ uint32_t dup16(uint32_t h) {
    return h | h << 16;
}

/* What stands under a code as the half-precision number 1024 + code (1024 is 0x6400 and its last
 * bit is worth 1); subtracting 1024 + offset leaves the signed code. */
template <int TYPE> static constexpr __host__ __device__ uint32_t code_base(void) {
    return TYPE == KT_Q4_0   ? 0x6400 + 8
           : TYPE == KT_Q5_0 ? 0x6400 + 16
           : TYPE == KT_Q8_0 ? 0x6400 + 128
           : TYPE == KT_Q3_K ? 0x6400 + 4
           : TYPE == KT_Q6_K ? 0x6400 + 32
           : (TYPE == KT_IQ4_NL || TYPE == KT_IQ4_XS) ? 0x6400 + 128
                                                      : 0x6400;
}

/* Moves bit `from` to bit `to` (and from + 16 to to + 16). */
static __device__ __forceinline__ uint32_t shift_to(uint32_t v, int from, int to) {
    return from >= to ? v >> (from - to) : v << (to - from);
}

/* Four table values (each + 128) for the four codes in the low half of w. The table is
 * -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113. */
static __device__ __forceinline__ uint32_t iq4_values(uint32_t w) {
    const uint32_t t0 = 0x3f2d1801, t1 = 0x766a5d4f, t2 = 0xa6998d81, t3 = 0xf1d9c5b5;
    uint32_t at = w & 0x7777;
    uint32_t lo = __byte_perm(t0, t1, at), hi = __byte_perm(t2, t3, at);
    return __byte_perm(lo, hi, 0x3210 | ((w & 0x8888) >> 1));
}

/* This lane's codes of 32 columns: p[0] row g, p[1] row g + 8; pairs (4t, 4t+1) (4t+2, 4t+3)
 * (16+4t, ..+1) (..+2, ..+3). */
template <int TYPE>
static __device__ __forceinline__ void codes(const uint8_t *cell, int b, int lane,
                                             uint32_t (&p)[2][4]) {
    constexpr int has = quant<TYPE>::planes;
    constexpr uint32_t base = dup16(code_base<TYPE>());
    if constexpr ((has & PLANE_8) != 0) {
        uint4 v = *(const uint4 *)(cell + plane_at<TYPE>(PLANE_8, b) + lane * 16);
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i / 2][i % 2 * 2] = h2_sub(__byte_perm(w[i], 0x64646464, 0x4140), base);
            p[i / 2][i % 2 * 2 + 1] = h2_sub(__byte_perm(w[i], 0x64646464, 0x4342), base);
        }
    } else if constexpr (TYPE == KT_IQ4_NL || TYPE == KT_IQ4_XS) {
        uint2 v = *(const uint2 *)(cell + plane_at<TYPE>(PLANE_4, b) + lane * 8);
        uint32_t w[2] = {v.x, v.y};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            /* first of each pair in lo, second in hi: bytes 0..3 are pairs 0..3 */
            uint32_t lo = iq4_values(w[r] & 0xffff), hi = iq4_values(w[r] >> 16);
            uint32_t e01 = __byte_perm(lo, hi, 0x5140), e23 = __byte_perm(lo, hi, 0x7362);
            p[r][0] = h2_sub(__byte_perm(e01, 0x64646464, 0x4140), base);
            p[r][1] = h2_sub(__byte_perm(e01, 0x64646464, 0x4342), base);
            p[r][2] = h2_sub(__byte_perm(e23, 0x64646464, 0x4140), base);
            p[r][3] = h2_sub(__byte_perm(e23, 0x64646464, 0x4342), base);
        }
    } else {
        uint32_t w4[2] = {0, 0}, w2 = 0, w1 = 0;
        if constexpr ((has & PLANE_4) != 0) {
            uint2 v = *(const uint2 *)(cell + plane_at<TYPE>(PLANE_4, b) + lane * 8);
            w4[0] = v.x, w4[1] = v.y;
        }
        if constexpr ((has & PLANE_2) != 0)
            w2 = *(const uint32_t *)(cell + plane_at<TYPE>(PLANE_2, b) + lane * 4);
        if constexpr ((has & PLANE_1) != 0) {
            uint32_t u = *(const uint16_t *)(cell + plane_at<TYPE>(PLANE_1, b) + lane * 2);
            w1 = __byte_perm(u, 0, 0x4140);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t v = 0x64006400;
                if constexpr ((has & PLANE_4) != 0) {
                    v |= (w4[r] >> 4 * i) & 0x000f000f;
                    if constexpr ((has & PLANE_2) != 0)
                        v |= shift_to(w2, 2 * (4 * r + i), 4) & 0x00300030;
                    if constexpr ((has & PLANE_1) != 0)
                        v |= shift_to(w1, 4 * r + i, 4) & 0x00100010;
                } else {
                    v |= shift_to(w2, 2 * (4 * r + i), 0) & 0x00030003;
                    if constexpr ((has & PLANE_1) != 0)
                        v |= shift_to(w1, 4 * r + i, 2) & 0x00040004;
                }
                p[r][i] = h2_sub(v, base);
            }
        }
    }
}

/* Byte k of w as a float, exact. */
static __device__ __forceinline__ float byte_float(uint32_t w, int k) {
    return __uint_as_float(__byte_perm(w, 0x4b000000, 0x7540 | k)) - 8388608.f;
}

/* Scales of a cell for rows g and g + 8, decoded once per cell. scale(r, b, half) is what a code of
 * 32-column group b, first or second sixteen, is multiplied with; low(r, b, half) is subtracted. */
template <int TYPE> struct scales {
    /* m of 32-column types, twice in half precision, stands in raw[r][0] */
    static constexpr bool fine = TYPE == KT_Q2_K || TYPE == KT_Q3_K || TYPE == KT_Q6_K;
    static constexpr bool has_low = TYPE == KT_Q4_1 || TYPE == KT_Q5_1 || TYPE == KT_Q2_K ||
                                    TYPE == KT_Q4_K || TYPE == KT_Q5_K;
    float d[2], m[2];
    uint32_t raw[2][4], aux[2][4];

    __device__ __forceinline__ void load(const uint8_t *cell, int lane) {
        int g = lane >> 2;
        const uint8_t *s = cell + quant<TYPE>::code_bytes;
        if constexpr (quant<TYPE>::cols == 32) {
            uint32_t v = *(const uint32_t *)(s + 4 * g);
            d[0] = h_lo(v), d[1] = h_hi(v);
            if constexpr (has_low) {
                uint32_t w = *(const uint32_t *)(s + 32 + 4 * g);
                m[0] = -h_lo(w), m[1] = -h_hi(w);
                raw[0][0] = dup16(w & 0xffff), raw[1][0] = dup16(w >> 16);
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; r++) load_row(s, r, g + 8 * r);
        }
    }

    __device__ __forceinline__ void load_row(const uint8_t *s, int r, int row) {
        if constexpr (TYPE == KT_Q4_K || TYPE == KT_Q5_K) {
            uint4 v = *(const uint4 *)(s + 16 * row);
            d[r] = h_lo(v.x), m[r] = h_hi(v.x);
            raw[r][0] = v.y & 0x3f3f3f3f;
            raw[r][1] = (v.w & 0x0f0f0f0f) | ((v.y >> 2) & 0x30303030);
            aux[r][0] = v.z & 0x3f3f3f3f;
            aux[r][1] = ((v.w >> 4) & 0x0f0f0f0f) | ((v.z >> 2) & 0x30303030);
        } else if constexpr (TYPE == KT_Q6_K) {
            uint4 v = *(const uint4 *)(s + 16 * row);
            raw[r][0] = v.x ^ 0x80808080, raw[r][1] = v.y ^ 0x80808080;
            raw[r][2] = v.z ^ 0x80808080, raw[r][3] = v.w ^ 0x80808080;
            d[r] = __half2float(*(const __half *)(s + 256 + 2 * row));
        } else if constexpr (TYPE == KT_Q2_K) {
            uint4 v = *(const uint4 *)(s + 16 * row);
            uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                raw[r][i] = w[i] & 0x0f0f0f0f;
                aux[r][i] = (w[i] >> 4) & 0x0f0f0f0f;
            }
            uint32_t dm = *(const uint32_t *)(s + 256 + 4 * row);
            d[r] = h_lo(dm), m[r] = h_hi(dm);
        } else if constexpr (TYPE == KT_Q3_K) {
            const uint32_t *w = (const uint32_t *)(s + 12 * row);
            uint32_t a = w[0], b = w[1], h = w[2];
            raw[r][0] = (a & 0x0f0f0f0f) | ((h << 4) & 0x30303030);
            raw[r][1] = (b & 0x0f0f0f0f) | ((h << 2) & 0x30303030);
            raw[r][2] = ((a >> 4) & 0x0f0f0f0f) | (h & 0x30303030);
            raw[r][3] = ((b >> 4) & 0x0f0f0f0f) | ((h >> 2) & 0x30303030);
            d[r] = __half2float(*(const __half *)(s + 192 + 2 * row));
        } else if constexpr (TYPE == KT_IQ4_XS) {
            uint2 v = *(const uint2 *)(s + 8 * row);
            d[r] = h_lo(v.x);
            raw[r][0] = v.y;       /* low nibbles of the eight scales */
            raw[r][1] = v.x >> 16; /* their high bits */
        }
    }

    __device__ __forceinline__ float scale(int r, int b, int half) const {
        if constexpr (quant<TYPE>::cols == 32) return d[r];
        else if constexpr (TYPE == KT_Q4_K || TYPE == KT_Q5_K)
            return d[r] * byte_float(raw[r][b / 4], b % 4);
        else if constexpr (TYPE == KT_Q6_K)
            return d[r] * (byte_float(raw[r][b / 2], (2 * b + half) % 4) - 128.f);
        else if constexpr (TYPE == KT_Q2_K)
            return d[r] * byte_float(raw[r][b / 2], (2 * b + half) % 4);
        else if constexpr (TYPE == KT_Q3_K)
            return d[r] * (byte_float(raw[r][b / 2], (2 * b + half) % 4) - 32.f);
        else
            return d[r] * (float)((int)((raw[r][0] >> 4 * b & 15) | (raw[r][1] >> 2 * b & 3) << 4) -
                                  32);
    }

    __device__ __forceinline__ float low(int r, int b, int half) const {
        if constexpr (quant<TYPE>::cols == 32) return m[r];
        else if constexpr (TYPE == KT_Q4_K || TYPE == KT_Q5_K)
            return m[r] * byte_float(aux[r][b / 4], b % 4);
        else if constexpr (TYPE == KT_Q2_K)
            return m[r] * byte_float(aux[r][b / 2], (2 * b + half) % 4);
        else return 0.f;
    }

    /* The minima of a whole cell as the operand of one product with the sums of x over sixteen
     * columns (256-column types): a[0], a[2] row g and a[1], a[3] row g + 8, whole numbers;
     * the product is scaled by m[r] afterwards. t = lane % 4. */
    __device__ __forceinline__ void low_operand(int t, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t first, second;
            if constexpr (TYPE == KT_Q2_K) { /* groups 2t, 2t+1 and 2t+8, 2t+9 */
                uint32_t w0 = t < 2 ? aux[r][0] : aux[r][1], w1 = t < 2 ? aux[r][2] : aux[r][3];
                uint32_t pick = t & 1 ? 0x4342 : 0x4140;
                first = __byte_perm(w0, 0x64646464, pick);
                second = __byte_perm(w1, 0x64646464, pick);
            } else { /* both sixteens of group t, and of group t + 4 */
                uint32_t pick = 0x4040 | t * 0x0101;
                first = __byte_perm(aux[r][0], 0x64646464, pick);
                second = __byte_perm(aux[r][1], 0x64646464, pick);
            }
            a[r] = h2_sub(first, 0x64006400);
            a[2 + r] = h2_sub(second, 0x64006400);
        }
    }
};

#endif /* __CUDACC__ */
#endif
