/* kernels/cuda/repack.cu: matrices from file order to the device's order and back.
 *
 * Owns: nothing.  Called by: the table (mat_bytes, mat_pack, mat_unpack); loading, and checks.
 * Fails how: a CUDA error ends the process.
 * Limits: none.  Tested by: tests/gpu/check_ops.c (unpack of pack is the identity, bit by bit)
 *
 * The layout is described in quant.cuh. Rows travel through a staging buffer of the context in runs
 * of whole tiles, so the largest matrix needs no second copy of itself. Unquantised matrices and
 * those of plain.cuh keep file order (layout 0).
 */
#include <algorithm>
#include <cstring>

#include "kernels/cuda/file_block.cuh"

#define LAYOUT_TILES 1
#define STAGE_BYTES  ((size_t)64 << 20)

size_t cuda_mat_bytes(int type, int64_t count, int64_t rows, int64_t cols) {
    size_t one = type_in_file_order(type) ? (size_t)(rows * ktype_row_bytes(type, cols))
                                     : packed_bytes(type, rows, cols);
    return (size_t)count * ((one + 255) / 256 * 256);
}

/* Element k = 0..7 of a lane's share of a 32-column group: its column. Pair k / 2 of quant.cuh. */
static __device__ inline int lane_col(int lane, int k) {
    return k / 4 * 16 + 4 * (lane % 4) + k % 4;
}

/* One warp per cell; src: rows [first, first + n) of the matrix, first a multiple of 16. */
__global__ static void pack_kernel(int type, const uint8_t *src, uint8_t *dst, int n, int cells) {
    struct cell_shape s = cell_shape(type);
    int64_t at = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32, tiles = (n + 15) / 16;
    if (at >= (int64_t)tiles * cells) return;
    int tile = (int)(at / cells), cell = (int)(at % cells), block_bytes = s.bytes / 16;
    uint8_t *out = dst + at * s.bytes;
    const uint8_t *rows[2];
    bool have[2];
    for (int r = 0; r < 2; r++) {
        int row = tile * 16 + lane / 4 + 8 * r;
        have[r] = row < n;
        rows[r] = src + ((int64_t)row * cells + cell) * block_bytes;
    }
    uint32_t w1 = 0;
    for (int b = 0; b < s.cols / 32; b++) {
        uint32_t w4[2] = {0, 0}, w2 = 0, w8[4] = {0, 0, 0, 0};
        if (s.cols == 32 || b % 2 == 0) w1 = 0;
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 8; k++) {
                uint32_t v = have[r] ? code_get(type, rows[r], 32 * b + lane_col(lane, k)) : 0;
                w8[four_of(r, k)] |= (v & 255) << 8 * (k % 4);
                if (s.planes & PLANE_4) {
                    w4[r] |= (v & 15) << bit4(k);
                    v >>= 4;
                }
                if (s.planes & PLANE_2) {
                    w2 |= (v & 3) << bit2(r, k);
                    v >>= 2;
                }
                w1 |= (v & 1) << bit1(s.cols, b, r, k);
            }
        if (s.planes & PLANE_8)
            *(uint4 *)(out + plane_offset(s, PLANE_8, b) + 16 * lane) =
                make_uint4(w8[0], w8[1], w8[2], w8[3]);
        if (s.planes & PLANE_4)
            *(uint2 *)(out + plane_offset(s, PLANE_4, b) + 8 * lane) = make_uint2(w4[0], w4[1]);
        if (s.planes & PLANE_2) *(uint32_t *)(out + plane_offset(s, PLANE_2, b) + 4 * lane) = w2;
        if ((s.planes & PLANE_1) && s.cols == 32)
            *(uint16_t *)(out + bits_offset(s, b, lane)) = (uint16_t)w1;
        else if ((s.planes & PLANE_1) && b % 2)
            *(uint32_t *)(out + bits_offset(s, b, lane)) = w1;
    }
    if (lane < 16) {
        int row = tile * 16 + lane;
        const uint8_t *in = src + ((int64_t)row * cells + cell) * block_bytes;
        for (int k = 0; k < scale_bytes(type); k++)
            out[scale_cell_byte(type, s.code_bytes, lane, k)] =
                row < n ? in[scale_file_byte(type, k)] : 0;
    }
}

/* One thread per block of the file. */
__global__ static void unpack_kernel(int type, const uint8_t *src, uint8_t *dst, int n, int cells) {
    struct cell_shape s = cell_shape(type);
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (int64_t)n * cells) return;
    int row = (int)(at / cells), cell = (int)(at % cells), r16 = row % 16;
    const uint8_t *in = src + ((int64_t)(row / 16) * cells + cell) * s.bytes;
    uint8_t *out = dst + at * (s.bytes / 16);
    for (int k = 0; k < s.bytes / 16; k++) out[k] = 0;
    for (int b = 0; b < s.cols / 32; b++)
        for (int i = 0; i < 32; i++)
            code_put(type, out, 32 * b + i, cell_code(s, in, r16, b, i));
    for (int k = 0; k < scale_bytes(type); k++)
        out[scale_file_byte(type, k)] = in[scale_cell_byte(type, s.code_bytes, r16, k)];
}

/* Rows per pass through the staging buffer: whole tiles. */
static int64_t rows_per_pass(size_t row_bytes) {
    int64_t n = (int64_t)(STAGE_BYTES / row_bytes) / 16 * 16;
    return n < 16 ? 16 : n;
}

static uint8_t *stage(struct kctx *c, size_t bytes) {
    if (bytes < STAGE_BYTES) bytes = STAGE_BYTES;
    if (c->stage_bytes < bytes) {
        CU(cudaStreamSynchronize(c->stream));
        CU(cudaFree(c->stage));
        CU(cudaMalloc(&c->stage, bytes));
        c->stage_bytes = bytes;
    }
    return (uint8_t *)c->stage;
}

void cuda_mat_pack(struct kctx *c, struct kmat *m, int64_t at, const void *src) {
    size_t row_bytes = (size_t)ktype_row_bytes(m->type, m->cols);
    uint8_t *dst = (uint8_t *)m->data + (size_t)at * cuda_mat_bytes(m->type, 1, m->rows, m->cols);
    CU_REQUIRE(at >= 0 && at < m->count && !c->capturing);
    m->layout = type_in_file_order(m->type) ? 0 : LAYOUT_TILES;
    if (m->layout == 0) {
        CU(cudaMemcpyAsync(dst, src, row_bytes * (size_t)m->rows, cudaMemcpyHostToDevice,
                           c->stream));
        CU(cudaStreamSynchronize(c->stream)); /* src is the caller's again */
        return;
    }
    struct cell_shape s = cell_shape(m->type);
    int cells = (int)(m->cols / s.cols);
    int64_t step = rows_per_pass(row_bytes);
    uint8_t *buf = stage(c, (size_t)std::min(step, ceil_div(m->rows, 16) * 16) * row_bytes);
    for (int64_t r = 0; r < m->rows; r += step) {
        int n = (int)std::min(step, m->rows - r);
        CU(cudaMemcpyAsync(buf, (const uint8_t *)src + (size_t)r * row_bytes,
                           (size_t)n * row_bytes, cudaMemcpyHostToDevice, c->stream));
        int64_t warps = ceil_div(n, 16) * cells;
        pack_kernel<<<(unsigned)ceil_div(warps, 8), 256, 0, c->stream>>>(
            m->type, buf, dst + (size_t)(r / 16) * (size_t)cells * (size_t)s.bytes, n, cells);
        CU(cudaGetLastError());
    }
    CU(cudaStreamSynchronize(c->stream)); /* src is the caller's again */
}

void cuda_mat_unpack(struct kctx *c, const struct kmat *m, int64_t at, void *dst) {
    size_t row_bytes = (size_t)ktype_row_bytes(m->type, m->cols);
    const uint8_t *src =
        (const uint8_t *)m->data + (size_t)at * cuda_mat_bytes(m->type, 1, m->rows, m->cols);
    CU_REQUIRE(at >= 0 && at < m->count && !c->capturing);
    if (m->layout == 0) {
        CU(cudaMemcpyAsync(dst, src, row_bytes * (size_t)m->rows, cudaMemcpyDeviceToHost,
                           c->stream));
        CU(cudaStreamSynchronize(c->stream));
        return;
    }
    struct cell_shape s = cell_shape(m->type);
    int cells = (int)(m->cols / s.cols);
    int64_t step = rows_per_pass(row_bytes);
    uint8_t *buf = stage(c, (size_t)std::min(step, ceil_div(m->rows, 16) * 16) * row_bytes);
    for (int64_t r = 0; r < m->rows; r += step) {
        int n = (int)std::min(step, m->rows - r);
        unpack_kernel<<<(unsigned)ceil_div((int64_t)n * cells, 128), 128, 0, c->stream>>>(
            m->type, src + (size_t)(r / 16) * (size_t)cells * (size_t)s.bytes, buf, n, cells);
        CU(cudaGetLastError());
        CU(cudaMemcpyAsync((uint8_t *)dst + (size_t)r * row_bytes, buf, (size_t)n * row_bytes,
                           cudaMemcpyDeviceToHost, c->stream));
        CU(cudaStreamSynchronize(c->stream));
    }
}
