/* kernels/quant.c: block layouts of the weight types and their decoders in plain C.
 *
 * Owns: nothing; pure.  Called by: both backends, the worker's loader, tests.
 * Fails how: an unsupported type has block size 0; decoding one is a bug (assert).
 * Limits: none.  Tested by: tests/kernels/test_dequant.c
 *
 * These decoders are the specification, not the fast path: each value is computed by the formula in
 * the comment beside it, every product and difference rounded to float32 in the written order
 * (the build forbids contraction). cpu/decode.h and the CUDA decoders are compared with them bit by
 * bit. Bytes are assembled by hand rather than through structs, because blocks lie at any
 * alignment.
 *
 * d, m and dmin are IEEE half floats; `@` in a comment is a byte offset in the block; i is the
 * element's index in the block, s = i / 32 (or i / 16 where scales cover sixteen).
 */
#include "kernels/quant.h"

#include <assert.h>
#include <string.h>

static uint16_t u16_at(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t u32_at(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static float f16_at(const uint8_t *p) {
    return kf16_to_f32(u16_at(p));
}

static float float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

float kf16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7F800000 | mantissa << 13);
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact in float32 */
        float v = (float)mantissa * 0x1p-24f;
        return sign ? -v : v;
    }
    return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

float kbf16_to_f32(uint16_t h) {
    return float_of_bits((uint32_t)h << 16);
}

static void f32_block(const uint8_t *b, float *y) {
    y[0] = float_of_bits(u32_at(b));
}

static void f16_block(const uint8_t *b, float *y) {
    y[0] = f16_at(b);
}

static void bf16_block(const uint8_t *b, float *y) {
    y[0] = kbf16_to_f32(u16_at(b));
}

/* The nibble of element i of 32: byte i mod 16, low half first. */
static int nibble(const uint8_t *qs, int i) {
    return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
}

/* d@0 qs[16]@2: d * (n - 8) */
static void q4_0_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int i = 0; i < 32; i++) y[i] = d * (float)(nibble(b + 2, i) - 8);
}

/* d@0 m@2 qs[16]@4: d * n + m */
static void q4_1_block(const uint8_t *b, float *y) {
    float d = f16_at(b), m = f16_at(b + 2);
    for (int i = 0; i < 32; i++) y[i] = d * (float)nibble(b + 4, i) + m;
}

/* d@0 qh@2 qs[16]@6: d * ((n + 16 bit_i(qh)) - 16) */
static void q5_0_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    uint32_t qh = u32_at(b + 2);
    for (int i = 0; i < 32; i++)
        y[i] = d * (float)((nibble(b + 6, i) | (int)(qh >> i & 1) << 4) - 16);
}

/* d@0 m@2 qh@4 qs[16]@8: d * (n + 16 bit_i(qh)) + m */
static void q5_1_block(const uint8_t *b, float *y) {
    float d = f16_at(b), m = f16_at(b + 2);
    uint32_t qh = u32_at(b + 4);
    for (int i = 0; i < 32; i++) y[i] = d * (float)(nibble(b + 8, i) | (int)(qh >> i & 1) << 4) + m;
}

/* d@0 q[32]@2 int8: d * q */
static void q8_0_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int i = 0; i < 32; i++) y[i] = d * (float)(int8_t)b[2 + i];
}

/* scales[16]@0 qs[64]@16 d@80 dmin@82: (d * (sc & 15)) * q - dmin * (sc >> 4) */
static void q2_k_block(const uint8_t *b, float *y) {
    float d = f16_at(b + 80), dmin = f16_at(b + 82);
    for (int i = 0; i < 256; i++) {
        int sc = b[i / 16], q = b[16 + 32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3;
        float scale = d * (float)(sc & 15), low = dmin * (float)(sc >> 4);
        y[i] = scale * (float)q - low;
    }
}

/* hmask[32]@0 qs[64]@32 scales[12]@96 d@108: (d * (sc - 32)) * q, q = two bits, minus 4 where the
 * mask bit is clear; scales are six bits, the low four in bytes 0..7, the high two in 8..11. */
static void q3_k_block(const uint8_t *b, float *y) {
    const uint8_t *sc = b + 96;
    float d = f16_at(b + 108);
    for (int i = 0; i < 256; i++) {
        int s = i / 16, j = i % 128 / 32, l = i % 32;
        int low = s < 8 ? sc[s] & 15 : sc[s - 8] >> 4, high = sc[8 + s % 4] >> 2 * (s / 4) & 3;
        int q =
            (b[32 + 32 * (i / 128) + l] >> 2 * j & 3) + 4 * (b[l] >> (4 * (i / 128) + j) & 1) - 4;
        float scale = d * (float)((low | high << 4) - 32);
        y[i] = scale * (float)q;
    }
}

/* Six-bit scale and minimum number s of the twelve packed bytes of Q4_K and Q5_K. */
static void k_scale(const uint8_t *sc, int s, int *scale, int *low) {
    *scale = s < 4 ? sc[s] & 63 : (sc[s + 4] & 15) | sc[s - 4] >> 6 << 4;
    *low = s < 4 ? sc[s + 4] & 63 : sc[s + 4] >> 4 | sc[s] >> 6 << 4;
}

/* d@0 dmin@2 sc[12]@4 qs[128]@16: (d * a) * q - dmin * m */
static void q4_k_block(const uint8_t *b, float *y) {
    float d = f16_at(b), dmin = f16_at(b + 2);
    for (int i = 0; i < 256; i++) {
        int s = i / 32, a, m, q = b[16 + 32 * (i / 64) + i % 32] >> 4 * (s % 2) & 15;
        k_scale(b + 4, s, &a, &m);
        float scale = d * (float)a, low = dmin * (float)m;
        y[i] = scale * (float)q - low;
    }
}

/* d@0 dmin@2 sc[12]@4 qh[32]@16 qs[128]@48: as Q4_K with a fifth bit: bit s of qh[i mod 32] */
static void q5_k_block(const uint8_t *b, float *y) {
    float d = f16_at(b), dmin = f16_at(b + 2);
    for (int i = 0; i < 256; i++) {
        int s = i / 32, a, m, q = b[48 + 32 * (i / 64) + i % 32] >> 4 * (s % 2) & 15;
        q |= (b[16 + i % 32] >> s & 1) << 4;
        k_scale(b + 4, s, &a, &m);
        float scale = d * (float)a, low = dmin * (float)m;
        y[i] = scale * (float)q - low;
    }
}

/* ql[128]@0 qh[64]@128 int8 sc[16]@192 d@208: (d * sc) * ((lo + 16 hi) - 32) */
static void q6_k_block(const uint8_t *b, float *y) {
    float d = f16_at(b + 208);
    for (int i = 0; i < 256; i++) {
        int n = i / 128, g = i % 128 / 32, l = i % 32;
        int lo = b[64 * n + 32 * (g % 2) + l] >> 4 * (g / 2) & 15;
        int hi = b[128 + 32 * n + l] >> 2 * g & 3;
        float scale = d * (float)(int8_t)b[192 + i / 16];
        y[i] = scale * (float)((lo | hi << 4) - 32);
    }
}

/* d@0 qs[16]@2: d * KV[n] */
static void iq4_nl_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int i = 0; i < 32; i++) y[i] = d * (float)kvalues_iq4[nibble(b + 2, i)];
}

/* d@0 sh@2 sl[4]@4 qs[128]@8: (d * (ls - 32)) * KV[n] */
static void iq4_xs_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    int sh = u16_at(b + 2);
    for (int s = 0; s < 8; s++) {
        int ls = (b[4 + s / 2] >> 4 * (s % 2) & 15) | (sh >> 2 * s & 3) << 4;
        float scale = d * (float)(ls - 32);
        for (int i = 0; i < 32; i++)
            y[32 * s + i] = scale * (float)kvalues_iq4[nibble(b + 8 + 16 * s, i)];
    }
}

/* e@0 qs[16]@1: 2^(e - 128) * K4[n] */
static void mxfp4_block(const uint8_t *b, float *y) {
    float d = kmxfp4_scale(b[0]);
    for (int i = 0; i < 32; i++) y[i] = d * (float)kvalues_mxfp4[nibble(b + 1, i)];
}

/* scale[4]@0 qs[32]@4: f(scale) * K4[n]; sixteen elements to a scale, low nibbles first */
static void nvfp4_block(const uint8_t *b, float *y) {
    for (int i = 0; i < 64; i++) {
        int r = i % 16, n = b[4 + i / 16 * 8 + r % 8] >> 4 * (r / 8) & 15;
        y[i] = kcodebooks.nvfp4[b[i / 16]] * (float)kvalues_mxfp4[n];
    }
}

/* ---- codes that name vectors of a codebook G ---------------------------------------------- */

/* y = scale * entry, negated where the sign bit is set. Entries are never 0. */
static void signed_entry(float scale, const int8_t *entry, int n, int signs, float *y) {
    for (int i = 0; i < n; i++) {
        float v = scale * (float)entry[i];
        y[i] = signs >> i & 1 ? -v : v;
    }
}

/* d@0, eight times (idx[4], aux u32)@2: aux holds four seven-bit sign codes and a scale above;
 * (d * (0.5 + scale) * 0.25) * G[idx] */
static void iq2_xxs_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int s = 0; s < 8; s++) {
        const uint8_t *p = b + 2 + 8 * s;
        uint32_t aux = u32_at(p + 4);
        float scale = d * (0.5f + (float)(aux >> 28)) * 0.25f;
        for (int l = 0; l < 4; l++)
            signed_entry(scale, kcodebooks.iq2_xxs[p[l]], 8, kcodebooks.sign[aux >> 7 * l & 127],
                         y + 32 * s + 8 * l);
    }
}

/* d@0 q[32]@2 u16 sc[8]@66: nine bits of index, seven of signs; a nibble of scale for sixteen;
 * (d * (0.5 + sc) * 0.25) * G[index] */
static void iq2_xs_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int e = 0; e < 32; e++) {
        int q = u16_at(b + 2 + 2 * e), sc = b[66 + e / 4] >> 4 * (e % 4 / 2) & 15;
        float scale = d * (0.5f + (float)sc) * 0.25f;
        signed_entry(scale, kcodebooks.iq2_xs[q & 511], 8, kcodebooks.sign[q >> 9], y + 8 * e);
    }
}

/* d@0 idx[32]@2 sign[32]@34 qh[8]@66 sc[8]@74: as IQ2_XS with whole sign bytes and an index of
 * ten bits, the upper two in qh */
static void iq2_s_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int e = 0; e < 32; e++) {
        int index = b[2 + e] | (b[66 + e / 4] >> 2 * (e % 4) & 3) << 8;
        int sc = b[74 + e / 4] >> 4 * (e % 4 / 2) & 15;
        float scale = d * (0.5f + (float)sc) * 0.25f;
        signed_entry(scale, kcodebooks.iq2_s[index], 8, b[34 + e], y + 8 * e);
    }
}

/* d@0 idx[64]@2 aux[8]@66 u32: as IQ2_XXS with vectors of four; (d * (0.5 + scale) * 0.5) * G */
static void iq3_xxs_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int e = 0; e < 64; e++) {
        uint32_t aux = u32_at(b + 66 + 4 * (e / 8));
        float scale = d * (0.5f + (float)(aux >> 28)) * 0.5f;
        int signs = kcodebooks.sign[aux >> 7 * (e % 8 / 2) & 127] >> 4 * (e % 2);
        signed_entry(scale, kcodebooks.iq3_xxs[b[2 + e]], 4, signs, y + 4 * e);
    }
}

/* d@0 idx[64]@2 qh[8]@66 sign[32]@74 sc[4]@106: vectors of four, a ninth bit of index in qh;
 * (d * (1 + 2 sc)) * G[index] */
static void iq3_s_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int e = 0; e < 64; e++) {
        int index = b[2 + e] | (b[66 + e / 8] >> e % 8 & 1) << 8;
        int sc = b[106 + e / 16] >> 4 * (e % 16 / 8) & 15;
        signed_entry(d * (float)(1 + 2 * sc), kcodebooks.iq3_s[index], 4,
                     b[74 + e / 2] >> 4 * (e % 2), y + 4 * e);
    }
}

/* scale * (entry + delta), eight times */
static void shifted_entry(float scale, int index, bool below, float *y) {
    float delta = below ? -0.125f : 0.125f;
    for (int i = 0; i < 8; i++) y[i] = scale * ((float)kcodebooks.iq1[index][i] + delta);
}

/* d@0 idx[32]@2 qh[8]@34 u16: for 32 elements four times three upper bits of index, three bits of
 * scale, the sign of delta; (d * (2 scale + 1)) * (G[index] + delta) */
static void iq1_s_block(const uint8_t *b, float *y) {
    float d = f16_at(b);
    for (int e = 0; e < 32; e++) {
        int qh = u16_at(b + 34 + 2 * (e / 4));
        shifted_entry(d * (float)(2 * (qh >> 12 & 7) + 1), b[2 + e] | (qh >> 3 * (e % 4) & 7) << 8,
                      qh >> 15, y + 8 * e);
    }
}

/* idx[32]@0 qh[16]@32 S[4]@48 u16: d is the top nibbles of S; below them four scales of three bits
 * each, one for sixteen elements; a nibble of qh holds three upper bits of index and delta's sign
 */
static void iq1_m_block(const uint8_t *b, float *y) {
    int bits = 0;
    for (int k = 0; k < 4; k++) bits |= u16_at(b + 48 + 2 * k) >> 12 << 4 * k;
    float d = kf16_to_f32((uint16_t)bits);
    for (int e = 0; e < 32; e++) {
        int h = b[32 + e / 2] >> 4 * (e % 2) & 15;
        int sc = u16_at(b + 48 + 2 * (e / 8)) >> 3 * (e % 8 / 2) & 7;
        shifted_entry(d * (float)(2 * sc + 1), b[e] | (h & 7) << 8, h >> 3, y + 8 * e);
    }
}

static const struct quant {
    const char *name;
    int elems, bytes;
    void (*block)(const uint8_t *b, float *y);
} quants[KT_MAX] = {
    [KT_F32] = {"F32", 1, 4, f32_block},
    [KT_F16] = {"F16", 1, 2, f16_block},
    [KT_BF16] = {"BF16", 1, 2, bf16_block},
    [KT_Q4_0] = {"Q4_0", 32, 18, q4_0_block},
    [KT_Q4_1] = {"Q4_1", 32, 20, q4_1_block},
    [KT_Q5_0] = {"Q5_0", 32, 22, q5_0_block},
    [KT_Q5_1] = {"Q5_1", 32, 24, q5_1_block},
    [KT_Q8_0] = {"Q8_0", 32, 34, q8_0_block},
    [KT_Q2_K] = {"Q2_K", 256, 84, q2_k_block},
    [KT_Q3_K] = {"Q3_K", 256, 110, q3_k_block},
    [KT_Q4_K] = {"Q4_K", 256, 144, q4_k_block},
    [KT_Q5_K] = {"Q5_K", 256, 176, q5_k_block},
    [KT_Q6_K] = {"Q6_K", 256, 210, q6_k_block},
    [KT_IQ4_NL] = {"IQ4_NL", 32, 18, iq4_nl_block},
    [KT_IQ4_XS] = {"IQ4_XS", 256, 136, iq4_xs_block},
    [KT_IQ2_XXS] = {"IQ2_XXS", 256, 66, iq2_xxs_block},
    [KT_IQ2_XS] = {"IQ2_XS", 256, 74, iq2_xs_block},
    [KT_IQ2_S] = {"IQ2_S", 256, 82, iq2_s_block},
    [KT_IQ3_XXS] = {"IQ3_XXS", 256, 98, iq3_xxs_block},
    [KT_IQ3_S] = {"IQ3_S", 256, 110, iq3_s_block},
    [KT_IQ1_S] = {"IQ1_S", 256, 50, iq1_s_block},
    [KT_IQ1_M] = {"IQ1_M", 256, 56, iq1_m_block},
    [KT_MXFP4] = {"MXFP4", 32, 17, mxfp4_block},
    [KT_NVFP4] = {"NVFP4", 64, 36, nvfp4_block},
};

static const struct quant *quant_of(int type) {
    return type >= 0 && type < KT_MAX && quants[type].name ? &quants[type] : NULL;
}

const char *ktype_name(int type) {
    const struct quant *q = quant_of(type);
    return q ? q->name : "?";
}

bool ktype_supported(int type) {
    return quant_of(type) != NULL;
}

bool ktype_scalar(int type) {
    bool vectors = type >= KT_IQ2_XXS && type <= KT_IQ1_M && type != KT_IQ4_NL && type != KT_IQ4_XS;
    return quant_of(type) && !vectors && type != KT_MXFP4 && type != KT_NVFP4;
}

int ktype_block_elems(int type) {
    const struct quant *q = quant_of(type);
    return q ? q->elems : 0;
}

int ktype_block_bytes(int type) {
    const struct quant *q = quant_of(type);
    return q ? q->bytes : 0;
}

int64_t ktype_row_bytes(int type, int64_t cols) {
    const struct quant *q = quant_of(type);
    assert(q && cols >= 0 && cols % q->elems == 0);
    return cols / q->elems * q->bytes;
}

void kdequant_row(int type, const void *src, float *dst, int64_t n) {
    const struct quant *q = quant_of(type);
    assert(q && n >= 0 && n % q->elems == 0);
    const uint8_t *b = src;
    for (int64_t i = 0; i < n; i += q->elems, b += q->bytes) q->block(b, dst + i);
}
