/* worker/coll_mix.h: two collectives as one: small messages over the first, large over the second.
 *
 * No device in here: coll_open_cuda.cu brings the stopwatch, tests bring numbers.
 */
#ifndef OCTAVO_WORKER_COLL_MIX_H
#define OCTAVO_WORKER_COLL_MIX_H

#include "worker/coll.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MIX_NEVER     INT64_MAX /* for large_from: nothing is large */
#define MIX_BYTES_MAX (4 << 20) /* the largest size measured */
#define MIX_PROBE_US  300000    /* after so long, what is not measured keeps its default */

/* Both of the same generation and ranks. They belong to the new coll, which closes `large` first
 * and aborts both through `small`: one abort word must serve them. What moves at least large_from
 * bytes (of all ranks together, when gathering) goes over `large`; the same on all ranks.
 * capturing: as in struct nccl_device. ERR_NOMEM: both stay the caller's. */
int coll_open_mix(struct coll **out, struct coll *small, struct coll *large, int64_t large_from,
                  const bool *capturing, struct err_text *err);

/* From which size on `large` is faster on the slowest rank, and at every larger size measured. All
 * ranks of shm measure the same and come to the same. time_sum: microseconds on this rank, negative
 * when the sum did not end, which all ranks then learn as ERR_TIMEOUT. ERR_ABORTED or OK. */
int mix_probe(int64_t *large_from, struct coll *shm,
              float (*time_sum)(void *user, bool large, int64_t bytes), void *user);

#ifdef __cplusplus
}
#endif
#endif
