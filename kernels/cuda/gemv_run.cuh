/* kernels/cuda/gemv_run.cuh: sixteen weight rows times one to eight rows of x, over 256 columns.
 *
 * Owns: nothing.  Called by: gemv.cu, experts_few.cu, experts_one.cu.
 * Tested by: tests/gpu/check_ops.c
 *
 * Arithmetic is in whole numbers: the codes of weights are bytes already, and unpacking them to
 * anything wider costs more instructions than the memory leaves time for. Tensor-core tiles are
 * used even for one row of x: sixteen rows of weights need no shuffles to be summed.
 *
 * A product of the tensor core has eight columns. A row of x takes two of them, hi and lo, so one
 * row leaves six empty; these hold other columns of the same row. B is x in the two columns that
 * belong to a 32-column group and zero elsewhere, so that four products, one per group, add up to
 * one accumulator which has the groups side by side, and each lane is left with one group's sum of
 * two weight rows, to be scaled: a quarter of the work of scaling each product. Two rows of x: two
 * groups side by side. Three or four: all columns are taken. Five to eight: hi and lo are two
 * products. Counted in SASS, sm_90: see tests/bench/NOTES.md.
 */
#ifndef OCTAVO_KERNELS_CUDA_GEMV_RUN_H
#define OCTAVO_KERNELS_CUDA_GEMV_RUN_H

#include "kernels/cuda/gemv.cuh"

/* c[16, 8] += a[16, 32] b[32, 8], signed bytes */
static __device__ __forceinline__ void mma_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* c[16, 8] += a[16, 16] b[16, 8] */
static __device__ __forceinline__ void mma_bytes_half(int (&c)[4], uint32_t a0, uint32_t a1,
                                                      uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
        "{%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/* The width of the code for `rows` rows of x. */
static __host__ __device__ inline int gv_width(int rows) {
    return rows <= 2 ? rows : rows <= 4 ? 4 : 8;
}

/* One to four rows of x (WIDTH 1, 2, 4). Lane 4g + t: acc[0] row g, acc[1] row g + 8, row t % WIDTH
 * of x, its share of the columns. groups: 8, or fewer at the end of a row of a 32-column type; what
 * lies beyond in the slot is multiplied with a scale of zero. x: row 0's record of this run. */
template <int TYPE, int WIDTH>
static __device__ __forceinline__ void gv_run_few(float (&acc)[4], const uint8_t *slot,
                                                  const uint8_t *x, int x_row, int rows,
                                                  int groups) {
    using S = scales<TYPE>;
    constexpr bool wide = quant<TYPE>::cols == 256, fine = S::fine;
    constexpr int SIDE = 4 / WIDTH, SETS = (fine ? 16 : 8) / SIDE; /* groups side by side */
    constexpr int offset = code_offset<TYPE>();
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int b_row = g / 2 % WIDTH, b_side = g / 2 / WIDTH, c_row = t % WIDTH, c_side = t / WIDTH;
    bool have = WIDTH < 4 || b_row < rows;
    if (WIDTH == 4) b_row = min(b_row, rows - 1), c_row = min(c_row, rows - 1);
    const uint8_t *xb = x + b_row * x_row + g % 2 * GV_LO + t * 8;
    const uint8_t *xc = x + c_row * x_row;
    if constexpr (!fine)
        xb += b_side * 32;
    else
        xb += b_side / 2 * 32 + b_side % 2 * 4;
    const int *sums = (const int *)(xc + GV_SUMS) + (fine ? 1 : 2) * c_side;
    S sc;
    if constexpr (wide) sc.load(slot, lane);
    float part[2] = {0, 0}, low[2] = {0, 0};
    uint32_t a[4];
#pragma unroll
    for (int q = 0; q < SETS; q++) {
        int c[4] = {0, 0, 0, 0};
        if constexpr (!fine) {
            uint2 v = *(const uint2 *)(xb + q * SIDE * 32);
            if (!have) v = make_uint2(0, 0);
#pragma unroll
            for (int i = 0; i < SIDE; i++) {
                int b = q * SIDE + i;
                bool mine = SIDE == 1 || b_side == i;
                code_bytes<TYPE>(wide ? slot : slot + b * quant<TYPE>::bytes, wide ? b : 0, lane,
                                 a);
                mma_bytes(c, a, mine ? v.x : 0, mine ? v.y : 0);
            }
        } else if constexpr (SIDE > 1) { /* sixteens side by side, two to a group */
            uint32_t v = *(const uint32_t *)(xb + q * SIDE / 2 * 32);
#pragma unroll
            for (int i = 0; i < SIDE / 2; i++) {
                code_bytes<TYPE>(slot, q * SIDE / 2 + i, lane, a);
                mma_bytes(c, a, b_side == 2 * i ? v : 0, b_side == 2 * i + 1 ? v : 0);
            }
        } else {
            uint32_t v = *(const uint32_t *)(xb + q / 2 * 32 + q % 2 * 4);
            if (!have) v = 0;
            if (q % 2 == 0) code_bytes<TYPE>(slot, q / 2, lane, a);
            mma_bytes_half(c, a[q % 2 * 2], a[q % 2 * 2 + 1], v);
        }
        int sum = 0;
        if constexpr (S::corrects) {
            if constexpr (fine)
                sum = sums[q * SIDE];
            else
                sum = sums[2 * q * SIDE] + sums[2 * q * SIDE + 1];
        }
        if constexpr (!wide) {
            sc.load(slot + (q * SIDE + c_side) * quant<TYPE>::bytes, lane);
            if (q * SIDE + c_side >= groups) sc.d[0] = sc.d[1] = sc.m[0] = sc.m[1] = 0;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int p = c[2 * r] * 256 + c[2 * r + 1];
            if constexpr (offset != 0) p -= offset * sum;
            part[r] += sc.unit(r, q * SIDE, c_side) * (float)p;
            if constexpr (S::has_low) low[r] += sc.low_unit(r, q * SIDE, c_side) * (float)sum;
        }
    }
    float scale = *(const float *)(xc + GV_SCALE);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (wide) part[r] *= sc.d[r];
        if constexpr (S::has_low) part[r] -= wide ? sc.m[r] * low[r] : low[r];
        acc[r] += scale * part[r];
    }
}

/* part += (s0, s0, s1, s1) * products of `a` with hi and lo of x. HALF: 0, 1 the first or second
 * sixteen columns, 2 all 32. */
template <int HALF>
static __device__ __forceinline__ void gv_products(float (&part)[4], const uint32_t (&a)[4],
                                                   uint2 hi, uint2 lo, float s0, float s1) {
    int c[4] = {0, 0, 0, 0}, l[4] = {0, 0, 0, 0};
    if constexpr (HALF == 2) {
        mma_bytes(c, a, hi.x, hi.y);
        mma_bytes(l, a, lo.x, lo.y);
    } else {
        mma_bytes_half(c, a[2 * HALF], a[2 * HALF + 1], HALF ? hi.y : hi.x);
        mma_bytes_half(l, a[2 * HALF], a[2 * HALF + 1], HALF ? lo.y : lo.x);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) part[i] += (i < 2 ? s0 : s1) * (float)(c[i] * 256 + l[i]);
}

/* Five to eight rows of x. Lane 4g + t: acc[0], acc[1] row g and acc[2], acc[3] row g + 8, rows 2t,
 * 2t + 1 of x. What is subtracted is a product of half-precision numbers, exact, once per run. */
template <int TYPE>
static __device__ __forceinline__ void gv_run_eight(float (&acc)[4], const uint8_t *slot,
                                                    const uint8_t *x, int x_row, int rows,
                                                    int groups) {
    using S = scales<TYPE>;
    constexpr bool wide = quant<TYPE>::cols == 256;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    bool have = g < rows;
    const uint8_t *xr = x + (have ? g : 0) * x_row, *xs = xr + t * 8;
    uint2 sum_hi = make_uint2(0, 0), sum_lo = make_uint2(0, 0);
    if constexpr (S::corrects) {
        sum_hi = *(const uint2 *)(xr + GV_HALVES + 8 * t);
        sum_lo = *(const uint2 *)(xr + GV_HALVES + 32 + 8 * t);
        if (!have) sum_hi = sum_lo = make_uint2(0, 0);
    }
    S sc;
    if constexpr (wide) sc.load(slot, lane);
    float part[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0}, low_l[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int b0 = 0; b0 < 8; b0 += 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int b = b0 + i;
            const uint8_t *cell = wide ? slot : slot + b * quant<TYPE>::bytes;
            uint32_t a[4];
            if constexpr (!wide) sc.load(cell, lane);
            code_bytes<TYPE>(cell, wide ? b : 0, lane, a);
            uint2 hi = *(const uint2 *)(xs + b * 32), lo = *(const uint2 *)(xs + GV_LO + b * 32);
            if (!have) hi = lo = make_uint2(0, 0);
            if constexpr (S::fine) {
                gv_products<0>(part, a, hi, lo, sc.scale(0, b, 0), sc.scale(1, b, 0));
                gv_products<1>(part, a, hi, lo, sc.scale(0, b, 1), sc.scale(1, b, 1));
            } else {
                bool valid = wide || b < groups;
                gv_products<2>(part, a, hi, lo, valid ? sc.scale(0, b, 0) : 0.f,
                               valid ? sc.scale(1, b, 0) : 0.f);
            }
            if constexpr (S::corrects && !wide) {
                bool mine = t == i && b < groups;
                uint32_t p0 = mine ? sc.low_pair(0) : 0, p1 = mine ? sc.low_pair(1) : 0;
                bool front = b0 == 0;
                mma16816(low, front ? p0 : 0, front ? p1 : 0, front ? 0 : p0, front ? 0 : p1,
                         sum_hi.x, sum_hi.y);
                mma16816(low_l, front ? p0 : 0, front ? p1 : 0, front ? 0 : p0, front ? 0 : p1,
                         sum_lo.x, sum_lo.y);
            }
        }
    }
    if constexpr (S::corrects) {
        float f0 = S::low_pair_factor(), f1 = f0;
        if constexpr (wide) {
            uint32_t a[4];
            sc.low_operand(t, a);
            mma16816(low, a[0], a[1], a[2], a[3], sum_hi.x, sum_hi.y);
            mma16816(low_l, a[0], a[1], a[2], a[3], sum_lo.x, sum_lo.y);
            f0 = sc.low_factor(0), f1 = sc.low_factor(1);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) part[i] -= (i < 2 ? f0 : f1) * (low[i] * 256.f + low_l[i]);
    }
    float x0 = *(const float *)(x + min(2 * t, rows - 1) * x_row + GV_SCALE);
    float x1 = *(const float *)(x + min(2 * t + 1, rows - 1) * x_row + GV_SCALE);
    acc[0] += x0 * part[0], acc[1] += x1 * part[1], acc[2] += x0 * part[2], acc[3] += x1 * part[3];
}

/* acc += one run of the tile (in slot) times x (row 0's record of that run). MOST: no more rows
 * than that, so that a kernel for one row holds no other code. */
template <int MOST>
static __device__ __forceinline__ void gv_run(int type, float (&acc)[4], const uint8_t *slot,
                                              const uint8_t *x, int x_row, int rows, int groups) {
#define X1(t)                                                                                      \
    case t:                                                                                        \
        gv_run_few<t, 1>(acc, slot, x, x_row, rows, groups);                                       \
        break;
#define X2(t)                                                                                      \
    case t:                                                                                        \
        gv_run_few<t, 2>(acc, slot, x, x_row, rows, groups);                                       \
        break;
#define X4(t)                                                                                      \
    case t:                                                                                        \
        gv_run_few<t, 4>(acc, slot, x, x_row, rows, groups);                                       \
        break;
#define X8(t)                                                                                      \
    case t:                                                                                        \
        gv_run_eight<t>(acc, slot, x, x_row, rows, groups);                                        \
        break;
    if (MOST == 1 || rows == 1) {
        switch (type) { QUANT_TYPES(X1) }
    } else if (rows == 2) {
        switch (type) { QUANT_TYPES(X2) }
    } else if (rows <= 4) {
        switch (type) { QUANT_TYPES(X4) }
    } else {
        switch (type) { QUANT_TYPES(X8) }
    }
#undef X1
#undef X2
#undef X4
#undef X8
}

/* Calls f(row 0..15, row of x, value) for this lane's results; the whole warp calls it. */
template <typename F>
static __device__ __forceinline__ void gv_results(float (&acc)[4], int width, int rows, F f) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    if (width <= 4) {
        for (int o = width; o < 4; o <<= 1) { /* the shares of the columns */
            acc[0] += __shfl_xor_sync(~0u, acc[0], o);
            acc[1] += __shfl_xor_sync(~0u, acc[1], o);
        }
        if (t < rows && t < width) {
            f(g, t, acc[0]);
            f(g + 8, t, acc[1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (2 * t + i < rows) {
                f(g, 2 * t + i, acc[i]);
                f(g + 8, 2 * t + i, acc[2 + i]);
            }
    }
}

#endif
