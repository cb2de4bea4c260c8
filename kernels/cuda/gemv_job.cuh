/* kernels/cuda/gemv_job.cuh: products with few rows of x, as one launch is told about them.
 *
 * Owns: nothing.  Called by: matmul.cu, gemv.cu.  Tested by: tests/gpu/check_ops.c
 */
#ifndef OCTAVO_KERNELS_CUDA_GEMV_JOB_H
#define OCTAVO_KERNELS_CUDA_GEMV_JOB_H

#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/later.cuh"

#define GV_JOBS 8

/* Where a block finds x. All but the first: one row of x, made into records by each block. */
enum gv_from {
    GV_IMAGE,  /* records in global memory */
    GV_FLOATS, /* x as it is */
    GV_NORMED, /* x * x2 / rms(x): attn_prep's query latent */
    GV_SWIGLU, /* silu(x) * x2 */
    GV_MERGED, /* the splits of an attention */
};

struct gv_job {
    const uint8_t *w;
    const float *x, *x2;
    const uint8_t *image; /* x as records */
    float *y;
    int64_t w_head, x_head, y_head, x_row, y_row;
    struct gv_mat mat;
    int type, rows, cols, heads;
    enum gv_from from;
    bool aligned;       /* float32, good for wide loads */
    bool tiles;         /* sixteen weight rows at a time; else unquantised rows */
    int wk, team, span; /* warps of a tile; tiles (rows) of a block at once; how often */
    int first_block, head_blocks;
};

struct gv_args {
    int n_jobs, n_rows;
    int x_groups;    /* of GV_ROWS rows of x */
    int ring, stage; /* bytes of a warp's ring; runs of x that a buffer holds */
    int prep_blocks; /* the last blocks of the grid write prep's cache rows */
    float eps;
    struct gv_job job[GV_JOBS];
    struct prep_args prep;
    struct merge_args merge;
};

/* One launch for all jobs, which are complete but for image, from, tiles and the last two lines.
 * Takes over what was put off and makes x of one of them. gemv.cu */
void gv_launch(struct kctx *c, struct gv_args *a);

#endif
