/* kernels/cpu/simd.h: sixteen floats, or sixteen 32-bit integers, as one value.
 *
 * Owns: nothing; pure.  Called by: inner.c and decode.h, which are compiled once per instruction
 * set. Tested by: tests/kernels/test_dequant.c, test_matmul.c, test_ops.c, which compare the three.
 *
 * Three renderings of the same few operations: AVX-512 (one register), AVX2 with FMA (two), and
 * loops over an array, which say what the others mean. No operation here may round differently from
 * its loop: no reciprocal estimates, no reassociation. v16_max(a, b) is a > b ? a : b and
 * v16_min(a, b) is a < b ? a : b, which is what the machine does with NaN and signed zeros too.
 */
#ifndef OCTAVO_KERNELS_CPU_SIMD_H
#define OCTAVO_KERNELS_CPU_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/quant.h"

/* One operation, one line. */
/* clang-format off */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define SIMD_REGISTERS 32
#define SIMD_PER_V16   1

typedef __m512 v16;
typedef __m512i v16i;

static inline v16 v16_set(float x) { return _mm512_set1_ps(x); }
static inline v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
static inline v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
static inline v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
static inline v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
static inline v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
static inline v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
static inline v16 v16_f16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline v16i v16i_set(int x) { return _mm512_set1_epi32(x); }
static inline v16i v16i_u8(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static inline v16i v16i_i8(const uint8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static inline v16i v16i_u16(const uint8_t *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
static inline v16i v16i_and(v16i a, v16i b) { return _mm512_and_si512(a, b); }
static inline v16i v16i_or(v16i a, v16i b) { return _mm512_or_si512(a, b); }
static inline v16i v16i_add(v16i a, v16i b) { return _mm512_add_epi32(a, b); }
static inline v16i v16i_sub(v16i a, v16i b) { return _mm512_sub_epi32(a, b); }
static inline v16i v16i_shl(v16i a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
static inline v16i v16i_shr(v16i a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
static inline v16i v16i_sra(v16i a, int n) { return _mm512_srai_epi32(a, (unsigned)n); }
static inline v16i v16i_or_bits(v16i a, unsigned bits, int value) {
    return _mm512_mask_or_epi32(a, (__mmask16)bits, a, _mm512_set1_epi32(value));
}
static inline v16 v16_of_int(v16i a) { return _mm512_cvtepi32_ps(a); }
static inline v16 v16_of_bits(v16i a) { return _mm512_castsi512_ps(a); }
static inline v16i v16_bits(v16 a) { return _mm512_castps_si512(a); }
static inline v16 v16_pick(v16 table, v16i index) { return _mm512_permutexvar_ps(index, table); }

static inline __m128 v16_fold(v16 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    return _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define SIMD_REGISTERS 16
#define SIMD_PER_V16   2

typedef struct {
    __m256 a, b;
} v16;
typedef struct {
    __m256i a, b;
} v16i;

#define V16_BOTH(op, x, y) ((v16){op((x).a, (y).a), op((x).b, (y).b)})
#define V16I_BOTH(op, x, y) ((v16i){op((x).a, (y).a), op((x).b, (y).b)})

static inline v16 v16_set(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline v16 v16_load(const float *p) {
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static inline void v16_store(float *p, v16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline v16 v16_add(v16 x, v16 y) { return V16_BOTH(_mm256_add_ps, x, y); }
static inline v16 v16_sub(v16 x, v16 y) { return V16_BOTH(_mm256_sub_ps, x, y); }
static inline v16 v16_mul(v16 x, v16 y) { return V16_BOTH(_mm256_mul_ps, x, y); }
static inline v16 v16_div(v16 x, v16 y) { return V16_BOTH(_mm256_div_ps, x, y); }
static inline v16 v16_max(v16 x, v16 y) { return V16_BOTH(_mm256_max_ps, x, y); }
static inline v16 v16_min(v16 x, v16 y) { return V16_BOTH(_mm256_min_ps, x, y); }
static inline v16 v16_fma(v16 x, v16 y, v16 z) {
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline v16 v16_f16(const uint8_t *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
static inline v16i v16i_set(int x) { return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline v16i v16i_u8(const uint8_t *p) {
    return (v16i){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                  _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}
static inline v16i v16i_i8(const uint8_t *p) {
    return (v16i){_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                  _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}
static inline v16i v16i_u16(const uint8_t *p) {
    return (v16i){_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)),
                  _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
static inline v16i v16i_and(v16i x, v16i y) { return V16I_BOTH(_mm256_and_si256, x, y); }
static inline v16i v16i_or(v16i x, v16i y) { return V16I_BOTH(_mm256_or_si256, x, y); }
static inline v16i v16i_add(v16i x, v16i y) { return V16I_BOTH(_mm256_add_epi32, x, y); }
static inline v16i v16i_sub(v16i x, v16i y) { return V16I_BOTH(_mm256_sub_epi32, x, y); }
static inline v16i v16i_shl(v16i x, int n) {
    return (v16i){_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
static inline v16i v16i_shr(v16i x, int n) {
    return (v16i){_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
static inline v16i v16i_sra(v16i x, int n) {
    return (v16i){_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
static inline v16i v16i_or_bits(v16i x, unsigned bits, int value) {
    const v16i each = {_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128),
                       _mm256_setr_epi32(256, 512, 1024, 2048, 4096, 8192, 16384, 32768)};
    v16i on = v16i_and(v16i_set((int)bits), each);
    on = V16I_BOTH(_mm256_cmpeq_epi32, on, each);
    return v16i_or(x, v16i_and(on, v16i_set(value)));
}
static inline v16 v16_of_int(v16i x) {
    return (v16){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
static inline v16 v16_of_bits(v16i x) {
    return (v16){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
static inline v16i v16_bits(v16 x) {
    return (v16i){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
static inline __m256 v16_pick_half(v16 table, __m256i index) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.a, index),
                            _mm256_permutevar8x32_ps(table.b, index),
                            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
static inline v16 v16_pick(v16 table, v16i index) {
    return (v16){v16_pick_half(table, index.a), v16_pick_half(table, index.b)};
}

static inline __m128 v16_fold(v16 x) {
    __m256 b = _mm256_add_ps(x.a, x.b);
    return _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}

#else
#include "kernels/cpu/dot.h"
#define SIMD_REGISTERS 16
#define SIMD_PER_V16   4

typedef struct {
    float at[16];
} v16;
typedef struct {
    uint32_t at[16];
} v16i;

#define V16_EACH(type, expression)                                                                 \
    type r;                                                                                        \
    for (int i = 0; i < 16; i++) r.at[i] = (expression);                                           \
    return r

static inline v16 v16_set(float x) { V16_EACH(v16, x); }
static inline v16 v16_load(const float *p) { V16_EACH(v16, p[i]); }
static inline void v16_store(float *p, v16 a) { memcpy(p, a.at, sizeof a.at); }
static inline v16 v16_add(v16 a, v16 b) { V16_EACH(v16, a.at[i] + b.at[i]); }
static inline v16 v16_sub(v16 a, v16 b) { V16_EACH(v16, a.at[i] - b.at[i]); }
static inline v16 v16_mul(v16 a, v16 b) { V16_EACH(v16, a.at[i] * b.at[i]); }
static inline v16 v16_div(v16 a, v16 b) { V16_EACH(v16, a.at[i] / b.at[i]); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { V16_EACH(v16, fmaf(a.at[i], b.at[i], c.at[i])); }
static inline v16 v16_max(v16 a, v16 b) { V16_EACH(v16, a.at[i] > b.at[i] ? a.at[i] : b.at[i]); }
static inline v16 v16_min(v16 a, v16 b) { V16_EACH(v16, a.at[i] < b.at[i] ? a.at[i] : b.at[i]); }
static inline v16 v16_f16(const uint8_t *p) {
    V16_EACH(v16, kf16_to_f32((uint16_t)(p[2 * i] | p[2 * i + 1] << 8)));
}
static inline v16i v16i_set(int x) { V16_EACH(v16i, (uint32_t)x); }
static inline v16i v16i_u8(const uint8_t *p) { V16_EACH(v16i, p[i]); }
static inline v16i v16i_i8(const uint8_t *p) { V16_EACH(v16i, (uint32_t)(int8_t)p[i]); }
static inline v16i v16i_u16(const uint8_t *p) {
    V16_EACH(v16i, (uint32_t)(p[2 * i] | p[2 * i + 1] << 8));
}
static inline v16i v16i_and(v16i a, v16i b) { V16_EACH(v16i, a.at[i] & b.at[i]); }
static inline v16i v16i_or(v16i a, v16i b) { V16_EACH(v16i, a.at[i] | b.at[i]); }
static inline v16i v16i_add(v16i a, v16i b) { V16_EACH(v16i, a.at[i] + b.at[i]); }
static inline v16i v16i_sub(v16i a, v16i b) { V16_EACH(v16i, a.at[i] - b.at[i]); }
static inline v16i v16i_shl(v16i a, int n) { V16_EACH(v16i, a.at[i] << n); }
static inline v16i v16i_shr(v16i a, int n) { V16_EACH(v16i, a.at[i] >> n); }
static inline v16i v16i_sra(v16i a, int n) { V16_EACH(v16i, (uint32_t)((int32_t)a.at[i] >> n)); }
static inline v16i v16i_or_bits(v16i a, unsigned bits, int value) {
    V16_EACH(v16i, a.at[i] | (bits >> i & 1 ? (uint32_t)value : 0));
}
static inline v16 v16_of_int(v16i a) { V16_EACH(v16, (float)(int32_t)a.at[i]); }
static inline v16 v16_of_bits(v16i a) {
    v16 r;
    memcpy(&r, &a, sizeof r);
    return r;
}
static inline v16i v16_bits(v16 a) {
    v16i r;
    memcpy(&r, &a, sizeof r);
    return r;
}
/* Element index & 15 of the table. */
static inline v16 v16_pick(v16 table, v16i index) { V16_EACH(v16, table.at[index.at[i] & 15]); }

static inline float v16_sum(v16 a) { return dot_combine(a.at); }

static inline void v16_sum4(float *y, v16 a, v16 b, v16 c, v16 d) {
    y[0] = v16_sum(a), y[1] = v16_sum(b), y[2] = v16_sum(c), y[3] = v16_sum(d);
}

#endif

#if SIMD_PER_V16 < 4
/* y[0..4) = the sums of a, b, c and d: v16_sum's tree, the last two steps for all four at once. */
static inline void v16_sum4(float *y, v16 a, v16 b, v16 c, v16 d) {
    __m128 p = v16_fold(a), q = v16_fold(b), r = v16_fold(c), s = v16_fold(d);
    __m128 u = _mm_add_ps(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
    __m128 v = _mm_add_ps(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
    _mm_storeu_ps(y, _mm_add_ps(_mm_movelh_ps(u, v), _mm_movehl_ps(v, u)));
}

static inline float v16_sum(v16 a) {
    __m128 c = v16_fold(a);
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
#endif
/* clang-format on */

/* The first n < 16 elements, the rest `fill`. */
static inline v16 v16_load_part(const float *p, int64_t n, float fill) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = i < n ? p[i] : fill;
    return v16_load(t);
}

static inline void v16_store_part(float *p, v16 a, int64_t n) {
    float t[16];
    v16_store(t, a);
    for (int i = 0; i < 16; i++)
        if (i < n) p[i] = t[i];
}

#endif
