/* worker/coll_open.h: which collectives a worker uses: --collective auto|shm|ipc|nccl.
 *
 * Owns: what outlives the generations: the slab that peers map, the NCCL library, the choice.
 * Called by: main.c.  Implemented twice, as the kernel table is: coll_open_cpu.c,
 * coll_open_cuda.cu. Fails how: ERR_SETUP with a sentence when what was asked for cannot be had;
 * auto refuses only for want of memory.
 */
#ifndef OCTAVO_WORKER_COLL_OPEN_H
#define OCTAVO_WORKER_COLL_OPEN_H

#include "worker/coll.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLL_CHOICES "auto|shm|ipc|nccl"

struct coll_maker;

/* After the device is open and before its free memory is counted: takes what the collectives need
 * of it. collective is one of COLL_CHOICES, the same on all ranks. */
int coll_maker_new(struct coll_maker **out, const struct kernels *k, struct kctx *ctx, int rank,
                   int world, const char *collective, struct err_text *err);
void coll_maker_free(struct coll_maker *m); /* after the last generation is closed; NULL is fine */

/* A generation. shm comes from coll_open_shm (NULL for a world of one, where `generation` counts)
 * and belongs to the new coll, on failure to the caller still. The control thread should know shm
 * before this call, since peers may die during it: an abort of shm ends it with ERR_ABORTED, and
 * one of shm or of the new coll is the same afterwards. All ranks come to the same collective. */
int coll_maker_open(struct coll **out, struct coll_maker *m, struct coll *shm, uint32_t generation,
                    struct err_text *err);

#ifdef __cplusplus
}
#endif
#endif
