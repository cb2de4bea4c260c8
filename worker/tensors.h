/* worker/tensors.h: which tensors a model of the family has, of which shape, and how ranks cut
 * them.
 *
 * Owns: nothing; pure.  Called by: hparams.c (shape checks), load.c (plan, loading).
 * Fails how: ERR_FORMAT with tensor, expected, found.
 * Tested by: tests/unit/test_worker.c, tests/kernels/test_model.c
 */
#ifndef OCTAVO_WORKER_TENSORS_H
#define OCTAVO_WORKER_TENSORS_H

#include "worker/model.h"

enum cut {
    CUT_NONE,  /* every rank holds it whole */
    CUT_ROWS,  /* rows of each matrix */
    CUT_COLS,  /* columns of each matrix: a short run of every row in the file */
    CUT_STACK, /* whole matrices: heads */
};

/* One tensor of the file and its place in struct model (block < 0) or struct layer. */
struct tensor_need {
    const struct gguf_tensor *tensor;
    int block;
    enum cut cut;
    enum plan_group group;
    bool vector;               /* float *, else struct kmat */
    bool scale;                /* a vector: the factors of the kmat at `offset`, visited before */
    int64_t cols, rows, count; /* whole, as in the file */
    int64_t grain;             /* columns, or rows, that must stay together when cut */
    size_t offset;
};

/* Calls visit for every tensor that the forward pass needs, in the order of the table, after
 * checking presence, type and every dimension. Stops at the first negative result. Tensors of the
 * file that are not needed (indexers on layers that share one, MTP blocks) are not visited. */
int tensors_each(const struct hparams *hp, const struct gguf *g,
                 int (*visit)(void *user, const struct tensor_need *, struct err_text *),
                 void *user, struct err_text *err);

#endif
