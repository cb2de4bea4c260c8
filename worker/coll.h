/* worker/coll.h: what the ranks do together.
 *
 * One struct coll per communicator generation. Every rank calls the same operations in the same
 * order with the same sizes. Sums are taken in rank order 0, 1, …, N-1 in float32 by every rank, so
 * all ranks hold the same bits afterwards. No operation can hang for ever: each wait also watches
 * the generation's abort word, which coll_abort sets from any thread of any rank.
 *
 * Buffers are device memory of the backend; on the CPU backend that is plain memory.
 *
 * Owns: its mapping of the shared memory (the coordinator made it and drops the name).
 * Called by: forward.c, step.c (step thread); coll_abort by the control thread.
 * Fails how: ERR_ABORTED once the generation is aborted, for ever after.
 * Tested by: tests/unit/test_coll.c (ranks as threads, also under the thread sanitizer)
 */
#ifndef OCTAVO_WORKER_COLL_H
#define OCTAVO_WORKER_COLL_H

#include "kernels/kernels.h"
#include "proto/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct coll;

struct coll_ops {
    const char *name; /* "none", "shm", "ipc", "nccl" */
    bool in_graphs;   /* its operations are queued on the device and may be captured */
    int (*all_reduce)(struct coll *, float *x, int64_t n);
    int (*all_gather)(struct coll *, const void *src, void *dst, int64_t bytes_per_rank);
    int (*broadcast)(struct coll *, void *x, int64_t bytes, int root);
    int (*barrier)(struct coll *);
    void (*abort)(struct coll *); /* any thread */
    void (*close)(struct coll *);
    int (*check)(struct coll *);  /* NULL where the operations themselves say ERR_ABORTED */
};

struct coll {
    const struct coll_ops *ops;
    int rank, world;
    uint32_t generation;
    uint64_t wait_us; /* time spent waiting since last read; the step thread's */
};

/* world 1: every operation returns at once. */
int coll_open_none(struct coll **out);

/* For measuring steps without collectives: nothing is done, whatever the world, and what should have
 * come from other ranks is rubbish. */
extern const struct coll_ops coll_absent_ops;

/* Shared memory between processes or threads of one host. path is opened (e.g. /proc/PID/fd/N) and
 * mapped; all ranks must have opened it before the first operation. bytes >= coll_shm_bytes(). */
int coll_open_shm(struct coll **out, const char *path, uint64_t bytes, int rank, int world,
                  uint32_t generation, struct err_text *err);

/* The generation's word in that shared memory: bit 0 is set once it is aborted. For devices, which
 * watch it from their own waits; c must come from coll_open_shm. */
const uint32_t *coll_shm_word(const struct coll *c);

/* Memory one generation needs: message_bytes is the largest all_reduce or per-rank all_gather. */
uint64_t coll_shm_bytes(int world, uint64_t message_bytes);

static inline int coll_all_reduce(struct coll *c, float *x, int64_t n) {
    return c->ops->all_reduce(c, x, n);
}
static inline int coll_all_gather(struct coll *c, const void *src, void *dst, int64_t bytes) {
    return c->ops->all_gather(c, src, dst, bytes);
}
static inline int coll_broadcast(struct coll *c, void *x, int64_t bytes, int root) {
    return c->ops->broadcast(c, x, bytes, root);
}
static inline int coll_barrier(struct coll *c) { return c->ops->barrier(c); }
static inline void coll_abort(struct coll *c) { c->ops->abort(c); }
static inline void coll_close(struct coll *c) { c->ops->close(c); }

/* After waiting for queued operations: ERR_ABORTED when what they left may be rubbish. */
static inline int coll_check(struct coll *c) { return c->ops->check ? c->ops->check(c) : OK; }

#ifdef __cplusplus
}
#endif

#endif
