/* kernels/cpu/decode.h: decoders of the quantised blocks, sixteen elements at a time.
 *
 * Owns: nothing; pure.  Called by: inner.c, which includes it and is compiled once per instruction
 * set.  Fails how: cannot; the caller gives whole blocks.  Limits: none.
 * Tested by: tests/kernels/test_dequant.c (bit by bit against quant.c, the specification)
 *
 * The formulas are quant.c's, and so is the order of roundings: scale = d * sc first, then scale *
 * q, then the minimum. Scales are unpacked by ordinary integer code, once per sixteen or thirty-two
 * elements; only what touches every element is wide.
 */
#ifndef OCTAVO_KERNELS_CPU_DECODE_H
#define OCTAVO_KERNELS_CPU_DECODE_H

#include "kernels/cpu/simd.h"

static inline unsigned decode_u16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline float decode_f16(const uint8_t *p) {
#ifdef __F16C__
    return _cvtsh_ss((uint16_t)decode_u16(p));
#else
    return kf16_to_f32((uint16_t)decode_u16(p));
#endif
}

static void decode_f32(const uint8_t *b, float *y, int64_t n) {
    memcpy(y, b, (size_t)n * 4);
}

static void decode_f16s(const uint8_t *b, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_f16(b + 2 * i));
    for (; i < n; i++) y[i] = decode_f16(b + 2 * i);
}

static void decode_bf16s(const uint8_t *b, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_of_bits(v16i_shl(v16i_u16(b + 2 * i), 16)));
    for (; i < n; i++) y[i] = kbf16_to_f32((uint16_t)decode_u16(b + 2 * i));
}

static void decode_q4_0(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, b += 18) {
        v16 d = v16_set(decode_f16(b));
        v16i q = v16i_u8(b + 2), eight = v16i_set(8), low = v16i_set(15);
        v16_store(y + i, v16_mul(d, v16_of_int(v16i_sub(v16i_and(q, low), eight))));
        v16_store(y + i + 16, v16_mul(d, v16_of_int(v16i_sub(v16i_shr(q, 4), eight))));
    }
}

static void decode_q4_1(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, b += 20) {
        v16 d = v16_set(decode_f16(b)), m = v16_set(decode_f16(b + 2));
        v16i q = v16i_u8(b + 4);
        v16_store(y + i, v16_add(v16_mul(d, v16_of_int(v16i_and(q, v16i_set(15)))), m));
        v16_store(y + i + 16, v16_add(v16_mul(d, v16_of_int(v16i_shr(q, 4))), m));
    }
}

static void decode_q5_0(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, b += 22) {
        v16 d = v16_set(decode_f16(b));
        v16i q = v16i_u8(b + 6), offset = v16i_set(16);
        v16i lo = v16i_or_bits(v16i_and(q, v16i_set(15)), decode_u16(b + 2), 16);
        v16i hi = v16i_or_bits(v16i_shr(q, 4), decode_u16(b + 4), 16);
        v16_store(y + i, v16_mul(d, v16_of_int(v16i_sub(lo, offset))));
        v16_store(y + i + 16, v16_mul(d, v16_of_int(v16i_sub(hi, offset))));
    }
}

static void decode_q5_1(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, b += 24) {
        v16 d = v16_set(decode_f16(b)), m = v16_set(decode_f16(b + 2));
        v16i q = v16i_u8(b + 8);
        v16i lo = v16i_or_bits(v16i_and(q, v16i_set(15)), decode_u16(b + 4), 16);
        v16i hi = v16i_or_bits(v16i_shr(q, 4), decode_u16(b + 6), 16);
        v16_store(y + i, v16_add(v16_mul(d, v16_of_int(lo)), m));
        v16_store(y + i + 16, v16_add(v16_mul(d, v16_of_int(hi)), m));
    }
}

static void decode_q8_0(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, b += 34) {
        v16 d = v16_set(decode_f16(b));
        v16_store(y + i, v16_mul(d, v16_of_int(v16i_i8(b + 2))));
        v16_store(y + i + 16, v16_mul(d, v16_of_int(v16i_i8(b + 18))));
    }
}

static void decode_q2_k(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 84) {
        float d = decode_f16(b + 80), dmin = decode_f16(b + 82);
        for (int s = 0; s < 16; s++) {
            v16 scale = v16_set(d * (float)(b[s] & 15)), low = v16_set(dmin * (float)(b[s] >> 4));
            v16i q = v16i_shr(v16i_u8(b + 16 + 32 * (s / 8) + 16 * (s % 2)), 2 * (s % 8 / 2));
            q = v16i_and(q, v16i_set(3));
            v16_store(y + i + 16 * s, v16_sub(v16_mul(scale, v16_of_int(q)), low));
        }
    }
}

static void decode_q3_k(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 110) {
        float d = decode_f16(b + 108);
        const uint8_t *sc = b + 96;
        for (int s = 0; s < 16; s++) {
            int low = s < 8 ? sc[s] & 15 : sc[s - 8] >> 4, high = sc[8 + s % 4] >> 2 * (s / 4) & 3;
            v16 scale = v16_set(d * (float)((low | high << 4) - 32));
            v16i q = v16i_shr(v16i_u8(b + 32 + 32 * (s / 8) + 16 * (s % 2)), 2 * (s % 8 / 2));
            v16i h = v16i_shr(v16i_u8(b + 16 * (s % 2)), 4 * (s / 8) + s % 8 / 2);
            h = v16i_shl(v16i_and(h, v16i_set(1)), 2);
            q = v16i_sub(v16i_add(v16i_and(q, v16i_set(3)), h), v16i_set(4));
            v16_store(y + i + 16 * s, v16_mul(scale, v16_of_int(q)));
        }
    }
}

/* The eight six-bit scales and eight minima of Q4_K and Q5_K, unpacked four at a time. */
static inline void decode_k_scales(const uint8_t *sc, uint8_t *scale, uint8_t *low) {
    uint32_t a, m, am, out;
    memcpy(&a, sc, 4);
    memcpy(&m, sc + 4, 4);
    memcpy(&am, sc + 8, 4);
    out = a & 0x3F3F3F3F;
    memcpy(scale, &out, 4);
    out = (am & 0x0F0F0F0F) | (a >> 2 & 0x30303030);
    memcpy(scale + 4, &out, 4);
    out = m & 0x3F3F3F3F;
    memcpy(low, &out, 4);
    out = (am >> 4 & 0x0F0F0F0F) | (m >> 2 & 0x30303030);
    memcpy(low + 4, &out, 4);
}

/* scale[s] = d * a_s, low[s] = dmin * m_s for the eight sub-blocks; both in one register. */
static inline void decode_k_products(const uint8_t *b, float *scale, float *low) {
    uint8_t packed[16];
    float both[16], d[16], product[16];
    decode_k_scales(b + 4, packed, packed + 8);
    v16_store(both, v16_of_int(v16i_u8(packed)));
    for (int s = 0; s < 8; s++) d[s] = decode_f16(b), d[s + 8] = decode_f16(b + 2);
    v16_store(product, v16_mul(v16_load(d), v16_load(both)));
    memcpy(scale, product, 32);
    memcpy(low, product + 8, 32);
}

static void decode_q4_k(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 144) {
        float scale[8], low[8];
        decode_k_products(b, scale, low);
        for (int s = 0; s < 8; s += 2) {
            v16 s0 = v16_set(scale[s]), m0 = v16_set(low[s]);
            v16 s1 = v16_set(scale[s + 1]), m1 = v16_set(low[s + 1]);
            for (int h = 0; h < 32; h += 16) {
                v16i q = v16i_u8(b + 16 + 16 * s + h);
                v16 lo = v16_of_int(v16i_and(q, v16i_set(15))), hi = v16_of_int(v16i_shr(q, 4));
                v16_store(y + i + 32 * s + h, v16_sub(v16_mul(s0, lo), m0));
                v16_store(y + i + 32 * s + 32 + h, v16_sub(v16_mul(s1, hi), m1));
            }
        }
    }
}

static void decode_q5_k(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 176) {
        float scale[8], low[8];
        decode_k_products(b, scale, low);
        for (int h = 0; h < 32; h += 16) {
            v16i qh = v16i_u8(b + 16 + h), bit = v16i_set(16), nib = v16i_set(15);
            for (int s = 0; s < 8; s += 2) {
                v16i q = v16i_u8(b + 48 + 16 * s + h);
                v16i h0 = v16i_and(v16i_shl(v16i_shr(qh, s), 4), bit);
                v16i h1 = v16i_and(v16i_shl(v16i_shr(qh, s + 1), 4), bit);
                v16 lo = v16_of_int(v16i_or(v16i_and(q, nib), h0));
                v16 hi = v16_of_int(v16i_or(v16i_shr(q, 4), h1));
                v16_store(y + i + 32 * s + h,
                          v16_sub(v16_mul(v16_set(scale[s]), lo), v16_set(low[s])));
                v16_store(y + i + 32 * s + 32 + h,
                          v16_sub(v16_mul(v16_set(scale[s + 1]), hi), v16_set(low[s + 1])));
            }
        }
    }
}

static void decode_q6_k(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 210) {
        float scale[16];
        v16_store(scale, v16_mul(v16_set(decode_f16(b + 208)), v16_of_int(v16i_i8(b + 192))));
        v16i offset = v16i_set(32), nib = v16i_set(15), top = v16i_set(48);
        for (int k = 0; k < 4; k++) { /* half n = k / 2, columns 16 * (k % 2) of its 32 */
            const uint8_t *ql = b + 64 * (k / 2) + 16 * (k % 2);
            v16i qh = v16i_u8(b + 128 + 32 * (k / 2) + 16 * (k % 2));
            v16i q0 = v16i_u8(ql), q1 = v16i_u8(ql + 32);
            v16i q[4] = {v16i_or(v16i_and(q0, nib), v16i_and(v16i_shl(qh, 4), top)),
                         v16i_or(v16i_and(q1, nib), v16i_and(v16i_shl(qh, 2), top)),
                         v16i_or(v16i_shr(q0, 4), v16i_and(qh, top)),
                         v16i_or(v16i_shr(q1, 4), v16i_and(v16i_shr(qh, 2), top))};
            for (int g = 0; g < 4; g++) {
                int s = 8 * (k / 2) + 2 * g + k % 2;
                v16_store(y + i + 16 * s,
                          v16_mul(v16_set(scale[s]), v16_of_int(v16i_sub(q[g], offset))));
            }
        }
    }
}

static inline v16 decode_codebook(void) {
    static const float values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
    return v16_load(values);
}

static void decode_iq4_nl(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, b += 18) {
        v16 table = v16_mul(v16_set(decode_f16(b)), decode_codebook());
        v16i q = v16i_u8(b + 2);
        v16_store(y + i, v16_pick(table, q));
        v16_store(y + i + 16, v16_pick(table, v16i_shr(q, 4)));
    }
}

static void decode_iq4_xs(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 136) {
        float d = decode_f16(b);
        unsigned sh = decode_u16(b + 2);
        for (int s = 0; s < 8; s++) {
            int ls = (b[4 + s / 2] >> 4 * (s % 2) & 15) | (int)(sh >> 2 * s & 3) << 4;
            v16 table = v16_mul(v16_set(d * (float)(ls - 32)), decode_codebook());
            v16i q = v16i_u8(b + 8 + 16 * s);
            v16_store(y + i + 32 * s, v16_pick(table, q));
            v16_store(y + i + 32 * s + 16, v16_pick(table, v16i_shr(q, 4)));
        }
    }
}

static inline v16 decode_mxfp4_values(void) {
    static const float values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return v16_load(values);
}

static void decode_mxfp4(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, b += 17) {
        v16 table = v16_mul(v16_set(kmxfp4_scale(b[0])), decode_mxfp4_values());
        v16i q = v16i_u8(b + 1);
        v16_store(y + i, v16_pick(table, q));
        v16_store(y + i + 16, v16_pick(table, v16i_shr(q, 4)));
    }
}

static void decode_nvfp4(const uint8_t *b, float *y, int64_t n) {
    const uint64_t low = 0x0F0F0F0F0F0F0F0F;
    for (int64_t i = 0; i < n; i += 64, b += 36)
        for (int s = 0; s < 4; s++) {
            uint64_t both, codes[2];
            memcpy(&both, b + 4 + 8 * s, 8);
            codes[0] = both & low, codes[1] = both >> 4 & low;
            v16 table = v16_mul(v16_set(kcodebooks.nvfp4[b[s]]), decode_mxfp4_values());
            v16_store(y + i + 16 * s, v16_pick(table, v16i_u8((const uint8_t *)codes)));
        }
}

/* ---- codes that name vectors of a codebook: sixteen elements are two or four of them ------ */

static inline uint32_t decode_u32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* scale * element, negated where a bit of signs is set; elements are never 0. */
static inline v16 decode_signed(float scale, const int8_t *elements, unsigned signs) {
    v16i e = v16i_i8((const uint8_t *)elements);
    v16i negative = v16i_and(e, v16i_or_bits(v16i_set(0), signs, -1));
    return v16_mul(v16_set(scale), v16_of_int(v16i_sub(e, v16i_shl(negative, 1))));
}

static inline v16 decode_eights(float scale, const int8_t *g0, const int8_t *g1, unsigned signs) {
    int8_t elements[16];
    memcpy(elements, g0, 8);
    memcpy(elements + 8, g1, 8);
    return decode_signed(scale, elements, signs);
}

/* Entries idx[0..4) plus 256 times the low bits of high. */
static inline v16 decode_fours(float scale, const int8_t (*grid)[4], const uint8_t *idx,
                               unsigned high, unsigned signs) {
    int8_t elements[16];
    for (int k = 0; k < 4; k++) memcpy(elements + 4 * k, grid[idx[k] | (high >> k & 1) << 8], 4);
    return decode_signed(scale, elements, signs);
}

/* Sixteen sign bits of the two seven-bit codes in aux. */
static inline unsigned decode_sign_codes(uint32_t aux) {
    return kcodebooks.sign[aux & 127] | (unsigned)kcodebooks.sign[aux >> 7 & 127] << 8;
}

static void decode_iq2_xxs(const uint8_t *b, float *y, int64_t n) {
    const int8_t(*grid)[8] = kcodebooks.iq2_xxs;
    for (int64_t i = 0; i < n; i += 256, b += 66) {
        float d = decode_f16(b);
        for (int s = 0; s < 16; s++) { /* half s % 2 of a sub-block */
            const uint8_t *p = b + 2 + 8 * (s / 2), *idx = p + 2 * (s % 2);
            uint32_t aux = decode_u32(p + 4);
            float scale = d * (0.5f + (float)(aux >> 28)) * 0.25f;
            v16_store(y + i + 16 * s, decode_eights(scale, grid[idx[0]], grid[idx[1]],
                                                    decode_sign_codes(aux >> 14 * (s % 2))));
        }
    }
}

static void decode_iq2_xs(const uint8_t *b, float *y, int64_t n) {
    const int8_t(*grid)[8] = kcodebooks.iq2_xs;
    for (int64_t i = 0; i < n; i += 256, b += 74) {
        float d = decode_f16(b);
        for (int s = 0; s < 16; s++) {
            unsigned q0 = decode_u16(b + 2 + 4 * s), q1 = decode_u16(b + 4 + 4 * s);
            float scale = d * (0.5f + (float)(b[66 + s / 2] >> 4 * (s % 2) & 15)) * 0.25f;
            unsigned signs = kcodebooks.sign[q0 >> 9] | (unsigned)kcodebooks.sign[q1 >> 9] << 8;
            v16_store(y + i + 16 * s, decode_eights(scale, grid[q0 & 511], grid[q1 & 511], signs));
        }
    }
}

static void decode_iq2_s(const uint8_t *b, float *y, int64_t n) {
    const int8_t(*grid)[8] = kcodebooks.iq2_s;
    for (int64_t i = 0; i < n; i += 256, b += 82) {
        float d = decode_f16(b);
        for (int s = 0; s < 16; s++) {
            unsigned high = b[66 + s / 2] >> 4 * (s % 2);
            float scale = d * (0.5f + (float)(b[74 + s / 2] >> 4 * (s % 2) & 15)) * 0.25f;
            const int8_t *g0 = grid[b[2 + 2 * s] | (high & 3) << 8];
            const int8_t *g1 = grid[b[3 + 2 * s] | (high >> 2 & 3) << 8];
            v16_store(y + i + 16 * s, decode_eights(scale, g0, g1, decode_u16(b + 34 + 2 * s)));
        }
    }
}

static void decode_iq3_xxs(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 98) {
        float d = decode_f16(b);
        for (int s = 0; s < 16; s++) {
            uint32_t aux = decode_u32(b + 66 + 4 * (s / 2));
            float scale = d * (0.5f + (float)(aux >> 28)) * 0.5f;
            v16_store(y + i + 16 * s, decode_fours(scale, kcodebooks.iq3_xxs, b + 2 + 4 * s, 0,
                                                   decode_sign_codes(aux >> 14 * (s % 2))));
        }
    }
}

static void decode_iq3_s(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 110) {
        float d = decode_f16(b);
        for (int s = 0; s < 16; s++) {
            int sc = b[106 + s / 4] >> 4 * (s % 4 / 2) & 15;
            v16_store(y + i + 16 * s,
                      decode_fours(d * (float)(1 + 2 * sc), kcodebooks.iq3_s, b + 2 + 4 * s,
                                   b[66 + s / 2] >> 4 * (s % 2), decode_u16(b + 74 + 2 * s)));
        }
    }
}

/* (entry + delta) for two entries, of which `below` tells by eight bits each which delta is
 * negative. */
static inline v16 decode_shifted(unsigned i0, unsigned i1, unsigned below) {
    int8_t elements[16];
    memcpy(elements, kcodebooks.iq1[i0], 8);
    memcpy(elements + 8, kcodebooks.iq1[i1], 8);
    v16i eighths = v16i_or_bits(v16i_set(1), below, -1);
    eighths = v16i_add(eighths, v16i_shl(v16i_i8((const uint8_t *)elements), 3));
    return v16_mul(v16_of_int(eighths), v16_set(0.125f));
}

static void decode_iq1_s(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 50) {
        float d = decode_f16(b);
        for (int s = 0; s < 16; s++) {
            unsigned qh = decode_u16(b + 34 + 2 * (s / 2)), high = qh >> 6 * (s % 2);
            v16 x = decode_shifted(b[2 + 2 * s] | (high & 7) << 8,
                                   b[3 + 2 * s] | (high >> 3 & 7) << 8, qh >> 15 ? 0xFFFF : 0);
            v16_store(y + i + 16 * s, v16_mul(v16_set(d * (float)(2 * (qh >> 12 & 7) + 1)), x));
        }
    }
}

static void decode_iq1_m(const uint8_t *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, b += 56) {
        const uint8_t bits[2] = {(uint8_t)(b[49] >> 4 | (b[51] & 0xF0)),
                                 (uint8_t)(b[53] >> 4 | (b[55] & 0xF0))};
        float d = decode_f16(bits);
        for (int s = 0; s < 16; s++) {
            unsigned h = b[32 + s], sc = decode_u16(b + 48 + 2 * (s / 4)) >> 3 * (s % 4) & 7;
            v16 x = decode_shifted(b[2 * s] | (h & 7) << 8, b[2 * s + 1] | (h >> 4 & 7) << 8,
                                   (h & 8 ? 0xFFu : 0) | (h & 128 ? 0xFF00u : 0));
            v16_store(y + i + 16 * s, v16_mul(v16_set(d * (float)(2 * sc + 1)), x));
        }
    }
}

#define DECODERS                                                                                   \
    [KT_F32] = decode_f32, [KT_F16] = decode_f16s, [KT_BF16] = decode_bf16s,                       \
    [KT_Q4_0] = decode_q4_0, [KT_Q4_1] = decode_q4_1, [KT_Q5_0] = decode_q5_0,                     \
    [KT_Q5_1] = decode_q5_1, [KT_Q8_0] = decode_q8_0, [KT_Q2_K] = decode_q2_k,                     \
    [KT_Q3_K] = decode_q3_k, [KT_Q4_K] = decode_q4_k, [KT_Q5_K] = decode_q5_k,                     \
    [KT_Q6_K] = decode_q6_k, [KT_IQ4_NL] = decode_iq4_nl, [KT_IQ4_XS] = decode_iq4_xs,             \
    [KT_IQ2_XXS] = decode_iq2_xxs, [KT_IQ2_XS] = decode_iq2_xs, [KT_IQ2_S] = decode_iq2_s,         \
    [KT_IQ3_XXS] = decode_iq3_xxs, [KT_IQ3_S] = decode_iq3_s, [KT_IQ1_S] = decode_iq1_s,           \
    [KT_IQ1_M] = decode_iq1_m, [KT_MXFP4] = decode_mxfp4, [KT_NVFP4] = decode_nvfp4

#endif
