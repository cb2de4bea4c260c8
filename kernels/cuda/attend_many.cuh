/* kernels/cuda/attend_many.cuh: attention of many rows, where a chip and a shape allow its kernel.
 *
 * Owns: nothing.  Called by: attend.cu.  Tested by: tests/gpu/check_ops.c
 */
#ifndef OCTAVO_KERNELS_CUDA_ATTEND_MANY_H
#define OCTAVO_KERNELS_CUDA_ATTEND_MANY_H

#include "kernels/cuda/cuda.cuh"

/* false: not for this chip, shape or number of rows, and nothing was done. */
bool cuda_attend_many(struct kctx *c, const struct kop_attend *o);
void cuda_attend_many_init(struct kctx *c);

#endif
