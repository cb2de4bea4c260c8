/* worker/coll_ipc_state.cuh: what coll_ipc.cu and coll_ipc_open.cu share.
 *
 * Called by: those two, coll_open_cuda.cu.  Tested by: tests/gpu/test_coll_gpu.cu
 */
#ifndef OCTAVO_WORKER_COLL_IPC_STATE_H
#define OCTAVO_WORKER_COLL_IPC_STATE_H

#include "worker/coll_ipc.h"
#include "worker/coll_ipc_device.cuh"
#include "worker/coll_ipc_probe.h"

#define IPC_STUCK_US      10000000 /* a few sums of the probe; longer, and a link does not work */
#define IPC_SCRATCH_BYTES (4 << 20)

struct ipc_slab {
    struct kctx *ctx;
    int rank, world;
    struct ipc_options options;
    int blocks; /* at most so many per kernel: what was asked for, or what fits */
    char *mem;
    float *scratch; /* [IPC_SCRATCH_BYTES / 4] behind it, and two events: for probes */
    cudaEvent_t from, to;
    struct ipc_table *table;
    struct ipc_words { /* host memory that the device writes: see struct ipc_table */
        uint64_t waited;
        uint32_t left;
    } * words;
    struct ipc_choice choice;
};

struct coll_ipc {
    struct coll base;
    struct coll *shm; /* NULL in loop-back */
    struct ipc_slab *slab;
    bool owns_slab;
    void *mapped[IPC_RANKS]; /* by handle, to be unmapped */
    void *page;              /* registered: of the shared memory; or ours, in loop-back */
    const uint32_t *word;    /* its host address */
    uint64_t told_ns;        /* of waiting, as wait_us */
};

static inline struct kctx *ctx_of(const struct coll_ipc *c) {
    return c->slab->ctx;
}

const struct coll_ops *ipc_ops(bool loopback);
void ipc_slab_clear(
    struct ipc_slab *s); /* flags and packets as if first_epoch had just been done */
void ipc_reduce_by(struct coll_ipc *c, int algorithm, float *x, int64_t n);
void ipc_words_show(const struct ipc_slab *s, struct ipc_table *t); /* as the device sees them */
bool ipc_wait(struct coll_ipc *c, uint64_t limit_us); /* false: queued work did not end */
void ipc_drop(struct coll_ipc *c);                    /* all but shm and c itself */

#endif
