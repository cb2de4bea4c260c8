/* kernels/cuda/quant.cuh: how quantised matrices lie on the device, and how a warp decodes them.
 *
 * Owns: nothing.  Called by: file_block.cuh, gemv.cuh, gemm.cu, unpack.cuh, plain.cuh.
 * Tested by: tests/gpu/check_ops.c (unpacking gives the file's bytes back; products agree)
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
 * and g + 8. Of 32 columns it takes 4t..4t+3 (the first sixteen) and 16+4t..16+4t+3 (the second),
 * four codes to a register, one per byte: code_bytes(). The activations are staged in the same
 * order. A code is exact in a byte and in half precision; scales are applied to sums over 32 (or 16)
 * columns. So weights never lose a bit in gemv.cuh, and only their last in gemm.cu.
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

/* Types that have no tiles: see plain.cuh. */
static inline bool type_is_plain(int type) {
    return ktype_supported(type) && !ktype_scalar(type);
}

static inline bool type_in_file_order(int type) {
    return type_is_dense(type) || type_is_plain(type);
}

/* Bytes of one packed matrix. */
static inline size_t packed_bytes(int type, int64_t rows, int64_t cols) {
    struct cell_shape s = cell_shape(type);
    return (size_t)ceil_div(rows, 16) * (size_t)(cols / s.cols) * (size_t)s.bytes;
}

#if defined(__CUDACC__)

/* Offset of the code planes of 32-column group b within a cell. Planes stand 8, 4, 2, 1; single bits
 * of 256-column types are kept for two groups at a time. */
template <int TYPE> static __device__ __forceinline__ int plane_at(int plane, int b) {
    constexpr int groups = quant<TYPE>::cols / 32, has = quant<TYPE>::planes;
    int at = 0;
    if (plane < PLANE_8 && (has & PLANE_8)) at += groups * 512;
    if (plane < PLANE_4 && (has & PLANE_4)) at += groups * 256;
    if (plane < PLANE_2 && (has & PLANE_2)) at += groups * 128;
    if (plane == PLANE_1 && groups > 1) return at + b / 2 * 128;
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

/* Moves bit `from` of every byte to bit `to`; bits that cross bytes are for the caller to mask. */
static __device__ __forceinline__ uint32_t shift_to(uint32_t v, int from, int to) {
    return from >= to ? v >> (from - to) : v << (to - from);
}

/* Table values of the four codes in the low half of w, as signed bytes. The table is
 * -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113. */
static __device__ __forceinline__ uint32_t iq4_values(uint32_t w) {
    const uint32_t t0 = 0xbfad9881, t1 = 0xf6eaddcf, t2 = 0x26190d01, t3 = 0x71594535;
    uint32_t at = w & 0x7777;
    uint32_t lo = __byte_perm(t0, t1, at), hi = __byte_perm(t2, t3, at);
    return __byte_perm(lo, hi, 0x3210 | ((w & 0x8888) >> 1));
}

/* Codes are signed bytes (Q8_0, IQ4); else unsigned, and `offset` is to be subtracted. */
template <int TYPE> static constexpr __host__ __device__ bool code_signed(void) {
    return TYPE == KT_Q8_0 || TYPE == KT_IQ4_NL || TYPE == KT_IQ4_XS;
}
template <int TYPE> static constexpr __host__ __device__ int code_offset(void) {
    return TYPE == KT_Q4_0 ? 8 : TYPE == KT_Q5_0 ? 16 : TYPE == KT_Q3_K ? 4 : TYPE == KT_Q6_K ? 32 : 0;
}

/* This lane's codes of 32 columns: a[0] row g and a[1] row g + 8, columns 4t..4t+3; a[2], a[3] the
 * same rows, columns 16+4t..16+4t+3. */
template <int TYPE>
static __device__ __forceinline__ void code_bytes(const uint8_t *cell, int b, int lane,
                                                  uint32_t (&a)[4]) {
    constexpr int has = quant<TYPE>::planes;
    if constexpr ((has & PLANE_8) != 0) {
        uint4 v = *(const uint4 *)(cell + plane_at<TYPE>(PLANE_8, b) + lane * 16);
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
        return;
    }
    if constexpr ((has & PLANE_4) != 0) {
        uint2 v = *(const uint2 *)(cell + plane_at<TYPE>(PLANE_4, b) + lane * 8);
        if constexpr (TYPE == KT_IQ4_NL || TYPE == KT_IQ4_XS) { /* byte j: nibbles j and 4 + j */
            uint32_t e0 = iq4_values(v.x & 0xffff), f0 = iq4_values(v.x >> 16);
            uint32_t e1 = iq4_values(v.y & 0xffff), f1 = iq4_values(v.y >> 16);
            a[0] = __byte_perm(e0, f0, 0x6420), a[2] = __byte_perm(e0, f0, 0x7531);
            a[1] = __byte_perm(e1, f1, 0x6420), a[3] = __byte_perm(e1, f1, 0x7531);
            return;
        }
        a[0] = v.x & 0x0f0f0f0f, a[1] = v.y & 0x0f0f0f0f;
        a[2] = v.x >> 4 & 0x0f0f0f0f, a[3] = v.y >> 4 & 0x0f0f0f0f;
    }
    if constexpr ((has & PLANE_2) != 0) {
        uint32_t w = *(const uint32_t *)(cell + plane_at<TYPE>(PLANE_2, b) + lane * 4);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            if constexpr ((has & PLANE_4) != 0) a[q] |= shift_to(w, 2 * q, 4) & 0x30303030;
            else a[q] = w >> 2 * q & 0x03030303;
        }
    }
    if constexpr ((has & PLANE_1) != 0 && quant<TYPE>::cols == 256) {
        constexpr int to = (has & PLANE_4) != 0 ? 4 : 2;
        uint32_t w = *(const uint32_t *)(cell + plane_at<TYPE>(PLANE_1, b) + lane * 4);
#pragma unroll
        for (int q = 0; q < 4; q++)
            a[q] |= shift_to(w, b % 2 * 4 + q, to) & 0x01010101u << to;
    } else if constexpr ((has & PLANE_1) != 0) {
        uint32_t w = *(const uint16_t *)(cell + plane_at<TYPE>(PLANE_1, b) + lane * 2);
#pragma unroll
        for (int q = 0; q < 4; q++) a[q] |= (w >> 4 * q & 15) * 0x02040810u & 0x10101010;
    }
}

/* Four codes as half precision numbers, two to a register: 1024 + code is 0x6400 | code. */
template <int TYPE>
static __device__ __forceinline__ void codes_half(uint32_t bytes, uint32_t (&h)[2]) {
    constexpr uint32_t base = dup16(0x6400 + (code_signed<TYPE>() ? 128 : code_offset<TYPE>()));
    if constexpr (code_signed<TYPE>()) bytes ^= 0x80808080;
    h[0] = h2_sub(__byte_perm(bytes, 0x64646464, 0x4140), base);
    h[1] = h2_sub(__byte_perm(bytes, 0x64646464, 0x4342), base);
}

/* Byte k of w as a float, exact. */
static __device__ __forceinline__ float byte_float(uint32_t w, int k) {
    return __uint_as_float(__byte_perm(w, 0x4b000000, 0x7540 | k)) - 8388608.f;
}

/* One of a few registers; selects where the index is known only at run time, never local memory. */
static __device__ __forceinline__ uint32_t pick2(const uint32_t (&v)[4], int i) {
    return i == 0 ? v[0] : v[1];
}
static __device__ __forceinline__ uint32_t pick4(const uint32_t (&v)[4], int i) {
    return i < 2 ? (i == 0 ? v[0] : v[1]) : (i == 2 ? v[2] : v[3]);
}

/* Scales of a cell for rows g and g + 8, decoded once per cell. scale(r, b, half) is what a code of
 * 32-column group b, first or second sixteen, is multiplied with; low(r, b, half) is subtracted. */
template <int TYPE> struct scales {
    static constexpr bool fine = TYPE == KT_Q2_K || TYPE == KT_Q3_K || TYPE == KT_Q6_K;
    static constexpr bool has_low = TYPE == KT_Q4_1 || TYPE == KT_Q5_1 || TYPE == KT_Q2_K ||
                                    TYPE == KT_Q4_K || TYPE == KT_Q5_K;
    /* something is to be subtracted from products of plain codes */
    static constexpr bool corrects = has_low || code_offset<TYPE>() != 0;
    float d[2], m[2];
    uint32_t raw[2][4], aux[2][4];

    __device__ __forceinline__ void load(const uint8_t *cell, int lane) {
        int g = lane >> 2;
        const uint8_t *s = cell + quant<TYPE>::code_bytes;
        if constexpr (quant<TYPE>::cols == 32) {
            uint32_t v = *(const uint32_t *)(s + 4 * g);
            d[0] = h_lo(v), d[1] = h_hi(v);
            raw[0][0] = dup16(v & 0xffff), raw[1][0] = dup16(v >> 16);
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
            return d[r] * byte_float(pick2(raw[r], b / 4), b % 4);
        else if constexpr (TYPE == KT_Q6_K)
            return d[r] * (byte_float(pick4(raw[r], b / 2), (2 * b + half) % 4) - 128.f);
        else if constexpr (TYPE == KT_Q2_K)
            return d[r] * byte_float(pick4(raw[r], b / 2), (2 * b + half) % 4);
        else if constexpr (TYPE == KT_Q3_K)
            return d[r] * (byte_float(pick4(raw[r], b / 2), (2 * b + half) % 4) - 32.f);
        else
            return d[r] * (float)((int)((raw[r][0] >> 4 * b & 15) | (raw[r][1] >> 2 * b & 3) << 4) -
                                  32);
    }

    __device__ __forceinline__ float low(int r, int b, int half) const {
        if constexpr (quant<TYPE>::cols == 32) return m[r];
        else if constexpr (TYPE == KT_Q4_K || TYPE == KT_Q5_K)
            return m[r] * byte_float(pick2(aux[r], b / 4), b % 4);
        else if constexpr (TYPE == KT_Q2_K)
            return m[r] * byte_float(pick4(aux[r], b / 2), (2 * b + half) % 4);
        else return 0.f;
    }

    /* The same for group base + side of 32 columns (of sixteen when fine), side known only at run time
     * and base + side in the same four; of a 256-column type without d and m. */
    __device__ __forceinline__ float unit(int r, int base, int side) const {
        if constexpr (quant<TYPE>::cols == 32) return d[r];
        else if constexpr (TYPE == KT_Q4_K || TYPE == KT_Q5_K)
            return byte_float(pick2(raw[r], base / 4), base % 4 + side);
        else if constexpr (TYPE == KT_IQ4_XS)
            return (float)((int)((raw[r][0] >> 4 * (base + side) & 15) |
                                 (raw[r][1] >> 2 * (base + side) & 3) << 4) - 32);
        else
            return byte_float(pick4(raw[r], base / 4), base % 4 + side) -
                   (TYPE == KT_Q6_K ? 128.f : TYPE == KT_Q3_K ? 32.f : 0.f);
    }
    __device__ __forceinline__ float low_unit(int r, int base, int side) const {
        if constexpr (quant<TYPE>::cols == 32) return m[r];
        else if constexpr (TYPE == KT_Q4_K || TYPE == KT_Q5_K)
            return byte_float(pick2(aux[r], base / 4), base % 4 + side);
        else return byte_float(pick4(aux[r], base / 4), base % 4 + side);
    }

    /* What is to be subtracted from a whole cell's products of plain codes: the product of this
     * operand (a[0], a[2] row g and a[1], a[3] row g + 8; whole numbers, one per sixteen columns)
     * with the sums of x over sixteen columns, times low_factor(r). t = lane % 4; the operand's
     * columns 2t, 2t+1 and 2t+8, 2t+9 are this lane's. 256-column types. */
    __device__ __forceinline__ void low_operand(int t, uint32_t (&a)[4]) const {
        constexpr uint32_t base = dup16(TYPE == KT_Q6_K ? 0x6400 + 128 : TYPE == KT_Q3_K ? 0x6400 + 32 : 0x6400);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t first, second;
            if constexpr (fine) {
                const uint32_t *w = TYPE == KT_Q2_K ? aux[r] : raw[r];
                uint32_t w0 = t < 2 ? w[0] : w[1], w1 = t < 2 ? w[2] : w[3];
                uint32_t pick = t & 1 ? 0x4342 : 0x4140;
                first = __byte_perm(w0, 0x64646464, pick);
                second = __byte_perm(w1, 0x64646464, pick);
            } else { /* both sixteens of group t, and of group t + 4 */
                uint32_t pick = 0x4040 | t * 0x0101;
                first = __byte_perm(aux[r][0], 0x64646464, pick);
                second = __byte_perm(aux[r][1], 0x64646464, pick);
            }
            a[r] = h2_sub(first, base);
            a[2 + r] = h2_sub(second, base);
        }
    }
    __device__ __forceinline__ float low_factor(int r) const {
        return has_low ? m[r] : d[r] * (float)code_offset<TYPE>();
    }

    /* The same for a 32-column type: one number per row, twice in half precision, and what its
     * product with the sums is worth (subtracted). */
    __device__ __forceinline__ uint32_t low_pair(int r) const { return raw[r][0]; }
    static constexpr __device__ float low_pair_factor(void) {
        return has_low ? -1.f : (float)code_offset<TYPE>();
    }
};

#endif /* __CUDACC__ */
#endif
