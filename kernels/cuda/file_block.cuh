/* kernels/cuda/file_block.cuh: quantised blocks in file order, element by element.
 *
 * Owns: nothing.  Called by: repack.cu, rows.cu.  Fails how: cannot.
 * Tested by: tests/gpu/check_ops.c
 *
 * Slow on purpose: one element at a time, straight from the format's definition. It runs while
 * weights are loaded, where the link to the host is the limit, and for the rows of an embedding.
 */
#ifndef OCTAVO_KERNELS_CUDA_FILE_BLOCK_H
#define OCTAVO_KERNELS_CUDA_FILE_BLOCK_H

#include "kernels/cuda/quant.cuh"

/* Where the bits of element i of a block stand: up to three runs of `n` bits at bit `at` of byte
 * `byte`, the first run being the low bits of the code. */
struct code_bits {
    int n_runs;
    struct {
        int byte, at, n;
    } run[2];
};

static __device__ inline struct code_bits code_bits(int type, int i) {
    struct code_bits c = {1, {{0, 0, 4}, {0, 0, 0}}};
    int half = i % 32 / 16, n = i / 128, j = i % 128 / 32, l = i % 32;
    switch (type) {
    case KT_Q4_0:
    case KT_IQ4_NL: c.run[0] = {2 + i % 16, 4 * half, 4}; break;
    case KT_Q4_1: c.run[0] = {4 + i % 16, 4 * half, 4}; break;
    case KT_Q5_0:
        c = {2, {{6 + i % 16, 4 * half, 4}, {2 + i / 8, i % 8, 1}}};
        break;
    case KT_Q5_1:
        c = {2, {{8 + i % 16, 4 * half, 4}, {4 + i / 8, i % 8, 1}}};
        break;
    case KT_Q8_0: c.run[0] = {2 + i, 0, 8}; break;
    case KT_Q2_K: c.run[0] = {16 + 32 * n + l, 2 * j, 2}; break;
    case KT_Q3_K:
        c = {2, {{32 + 32 * n + l, 2 * j, 2}, {l, 4 * n + j, 1}}};
        break;
    case KT_Q4_K: c.run[0] = {16 + 32 * (i / 64) + l, 4 * (i / 32 % 2), 4}; break;
    case KT_Q5_K:
        c = {2, {{48 + 32 * (i / 64) + l, 4 * (i / 32 % 2), 4}, {16 + l, i / 32, 1}}};
        break;
    case KT_Q6_K:
        c = {2, {{64 * n + 32 * (j % 2) + l, 4 * (j / 2), 4}, {128 + 32 * n + l, 2 * j, 2}}};
        break;
    case KT_IQ4_XS: c.run[0] = {8 + 16 * (i / 32) + i % 16, 4 * half, 4}; break;
    }
    return c;
}

static __device__ inline uint32_t code_get(int type, const uint8_t *block, int i) {
    struct code_bits c = code_bits(type, i);
    uint32_t v = 0;
    for (int r = 0, at = 0; r < c.n_runs; at += c.run[r].n, r++)
        v |= (block[c.run[r].byte] >> c.run[r].at & ((1u << c.run[r].n) - 1)) << at;
    return v;
}

/* The block starts as zeros. */
static __device__ inline void code_put(int type, uint8_t *block, int i, uint32_t v) {
    struct code_bits c = code_bits(type, i);
    for (int r = 0; r < c.n_runs; v >>= c.run[r].n, r++)
        block[c.run[r].byte] |= (v & ((1u << c.run[r].n) - 1)) << c.run[r].at;
}

/* Byte k of the scale part of a row (32-column types: d then m; others as row_scale_bytes) in a
 * file block. */
static __device__ inline int scale_file_byte(int type, int k) {
    switch (type) {
    case KT_Q2_K: return k < 16 ? k : 64 + k;                  /* scales, then d dmin at 80 */
    case KT_Q3_K: return 96 + k;                               /* scales, d */
    case KT_Q6_K: return 192 + k;                              /* scales, d */
    default: return k;                                         /* at the front */
    }
}

/* Scale bytes of one row of a cell. */
static __device__ inline int scale_bytes(int type) {
    switch (type) {
    case KT_Q4_1:
    case KT_Q5_1: return 4;
    case KT_Q2_K: return 20;
    case KT_Q3_K: return 14;
    case KT_Q4_K:
    case KT_Q5_K: return 16;
    case KT_Q6_K: return 18;
    case KT_IQ4_XS: return 8;
    default: return 2;
    }
}

/* Offset in a cell of byte k of the scale part of `row`: see quant.cuh, struct scales. */
static __device__ inline int scale_cell_byte(int type, int code_bytes, int row, int k) {
    switch (type) {
    case KT_Q2_K: return code_bytes + (k < 16 ? 16 * row + k : 256 + 4 * row + k - 16);
    case KT_Q3_K: return code_bytes + (k < 12 ? 12 * row + k : 192 + 2 * row + k - 12);
    case KT_Q4_K:
    case KT_Q5_K: return code_bytes + 16 * row + k;
    case KT_Q6_K: return code_bytes + (k < 16 ? 16 * row + k : 256 + 2 * row + k - 16);
    case KT_IQ4_XS: return code_bytes + 8 * row + k;
    default: return code_bytes + 32 * (k / 2) + 4 * (row % 8) + 2 * (row / 8) + k % 2;
    }
}

/* Offset of a plane's 32-column group b; quant.cuh's plane_at for a type known at run time. */
static __device__ inline int plane_offset(const struct cell_shape &s, int plane, int b) {
    int groups = s.cols / 32, at = 0;
    if (plane < PLANE_8 && (s.planes & PLANE_8)) at += groups * 512;
    if (plane < PLANE_4 && (s.planes & PLANE_4)) at += groups * 256;
    if (plane < PLANE_2 && (s.planes & PLANE_2)) at += groups * 128;
    return at + b * 64 * plane;
}

/* Where element k = 0..7 of a lane's share of a 32-column group stands, row half r: number q of its
 * four (code_bytes' a[q]), and its bit in the words of the planes with 4, 2 and 1 bits. */
static __device__ inline int four_of(int r, int k) { return k / 4 * 2 + r; }
static __device__ inline int bit4(int k) { return 8 * (k % 4) + 4 * (k / 4); }
static __device__ inline int bit2(int r, int k) { return 8 * (k % 4) + 2 * four_of(r, k); }
static __device__ inline int bit1(int cols, int b, int r, int k) {
    return cols == 256 ? 8 * (k % 4) + 4 * (b % 2) + four_of(r, k) : 4 * four_of(r, k) + k % 4;
}

/* Address of a lane's word of single bits: 32 bits for two groups, 16 for a group of its own. */
static __device__ inline int bits_offset(const struct cell_shape &s, int b, int lane) {
    return s.cols == 256 ? plane_offset(s, PLANE_1, b / 2 * 2) + 4 * lane
                         : plane_offset(s, PLANE_1, b) + 2 * lane;
}

/* Code of column i of 32-column group b, row r16 of a cell, as it stands in the file. */
static __device__ inline uint32_t cell_code(const struct cell_shape &s, const uint8_t *cell,
                                            int r16, int b, int i) {
    int lane = r16 % 8 * 4 + i % 16 / 4, k = i / 16 * 4 + i % 4, r = r16 / 8, at = 0;
    uint32_t v = 0;
    if (s.planes & PLANE_8)
        return cell[plane_offset(s, PLANE_8, b) + 16 * lane + 4 * four_of(r, k) + k % 4];
    if (s.planes & PLANE_4) {
        const uint8_t *p = cell + plane_offset(s, PLANE_4, b) + 8 * lane + 4 * r;
        v = *(const uint32_t *)p >> bit4(k) & 15;
        at = 4;
    }
    if (s.planes & PLANE_2) {
        const uint8_t *p = cell + plane_offset(s, PLANE_2, b) + 4 * lane;
        v |= (*(const uint32_t *)p >> bit2(r, k) & 3) << at;
        at += 2;
    }
    if (s.planes & PLANE_1) {
        const uint8_t *p = cell + bits_offset(s, b, lane);
        uint32_t w = s.cols == 256 ? *(const uint32_t *)p : *(const uint16_t *)p;
        v |= (w >> bit1(s.cols, b, r, k) & 1) << at;
    }
    return v;
}

#endif
