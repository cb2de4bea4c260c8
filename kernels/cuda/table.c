/* kernels/cuda/table.c: the name by which a worker finds the backend it was linked with.
 *
 * Apart from context.cu so that a program may hold both backends and compare them.
 */
#include "kernels/kernels.h"

const struct kernels *kernels_cuda_table(void);

const struct kernels *kernels_table(void) {
    return kernels_cuda_table();
}
