/* worker/coll_host.h: collectives of a device through host memory, the way that always works. */
#ifndef OCTAVO_WORKER_COLL_HOST_H
#define OCTAVO_WORKER_COLL_HOST_H

#include "worker/coll.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Device memory of (k, ctx) travels to the host, through shm (from coll_open_shm), and back. Every
 * operation waits for the device: nothing may be captured. shm belongs to the new coll; on failure
 * (ERR_NOMEM) still to the caller. Of k only get and put are used. */
int coll_open_host(struct coll **out, const struct kernels *k, struct kctx *ctx, struct coll *shm,
                   struct err_text *err);

#ifdef __cplusplus
}
#endif
#endif
