/* worker/coll_ipc.h: collectives between the devices of one host, over CUDA IPC.
 *
 * The operations are queued on the context's stream and may be captured: nothing of theirs changes
 * on the host from call to call. Wire type float32; sums in rank order.
 *
 * Owns: struct ipc_slab, the memory that the peers map; it outlives the generations.
 * Called by: coll_open_cuda.cu, benchmarks, tests.
 * Fails how: ERR_SETUP or ERR_SYS with a sentence at open, when peers cannot map each other's
 * memory: all ranks then get an error, so that all can agree on another way. Tested by:
 * tests/gpu/test_coll_gpu.cu
 */
#ifndef OCTAVO_WORKER_COLL_IPC_H
#define OCTAVO_WORKER_COLL_IPC_H

#include "worker/coll.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ipc_slab;

enum ipc_algorithm {
    IPC_AUTO,
    IPC_PACKETS, /* one-shot, data and flag in one store; pushes */
    IPC_ONE_PUSH,
    IPC_ONE_PULL,
    IPC_TWO_PUSH,
    IPC_TWO_PULL,
    IPC_ALGORITHMS
};

/* Zeros are the defaults. The same on all ranks. */
struct ipc_options {
    int blocks; /* at most this many per kernel; fewer where ranks share a device */
    enum ipc_algorithm algorithm; /* for every all-reduce; IPC_AUTO: by size, as the probe found */
    uint32_t first_epoch;         /* tests start near the wrap */
    bool probe_shared;            /* measure also when ranks share a device */
    int stuck_ms;                 /* a probe's sum that takes longer does not end; 0: IPC_STUCK_US */
};

/* Allocates the slab, world * 2.5 + 4 MiB of device memory, once. ERR_NOMEM or ERR_SETUP. */
int ipc_slab_new(struct ipc_slab **out, struct kctx *ctx, int rank, int world,
                 const struct ipc_options *options, struct err_text *err);

/* After every peer has closed its generation (or is exiting). */
void ipc_slab_free(struct ipc_slab *s);

/* A new generation. shm (from coll_open_shm, of the same ranks) exchanges the handles, carries the
 * abort word and the barrier, and belongs to the new coll, on failure to the caller still. No
 * kernel of an older generation may be queued by any rank that is not going to call this. The first
 * generation measures push against pull and one shot against two, and later ones keep what was
 * found: captured graphs hold it. */
int coll_open_ipc(struct coll **out, struct ipc_slab *slab, struct coll *shm, struct err_text *err);

/* One rank plays `world` ranks against the slots of its own slab: the real kernels, flags and bytes
 * of one rank, without anybody to wait for. One-shot sums are world * x, two-shot ones rubbish.
 * For benchmarks. options may be NULL. */
int coll_open_loopback(struct coll **out, struct kctx *ctx, int world,
                       const struct ipc_options *options, struct err_text *err);

const char *ipc_algorithm_name(enum ipc_algorithm a);

#ifdef __cplusplus
}
#endif
#endif
