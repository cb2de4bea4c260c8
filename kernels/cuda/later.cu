/* kernels/cuda/later.cu: launches what was put off.
 *
 * Owns: nothing.  Called by: every operation of the table, and whatever lets the host look.
 * Fails how: a CUDA error ends the process.  Limits: none.  Tested by: tests/gpu/check_ops.c
 *
 * The order is that in which a forward pass puts them off; nothing put off reads another's result.
 */
#include "kernels/cuda/later.cuh"

void cuda_settle(struct kctx *c) {
    struct later *l = c->later;
    if (l->prep_due) l->prep_due = false, cuda_prep_launch(c, &l->prep, LATER_ROWS);
    if (l->rope_due) l->rope_due = false, cuda_rope_launch(c, &l->rope);
    if (l->merge_due) l->merge_due = false, cuda_merge_launch(c, &l->merge);
    if (l->swiglu_due) l->swiglu_due = false, cuda_swiglu_launch(c, &l->swiglu);
}
