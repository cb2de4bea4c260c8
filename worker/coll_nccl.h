/* worker/coll_nccl.h: collectives through NCCL, loaded at run time. */
#ifndef OCTAVO_WORKER_COLL_NCCL_H
#define OCTAVO_WORKER_COLL_NCCL_H

#include "worker/coll.h"

#ifdef __cplusplus
extern "C" {
#endif

struct nccl;

/* What of the device NCCL and its graphs need. */
struct nccl_device {
    void *stream;                /* cudaStream_t */
    const bool *capturing;       /* NULL: never */
    void (*drop_graphs)(void *); /* destroys every captured graph, from the thread that closes, if
                                  * one holds an operation of NCCL's; NULL: the caller has done so
                                  * before coll_close */
    void *user;
    bool shm_stays; /* shm belongs to another collective, which is closed after this one */
    int patience_s; /* for a communicator to come about; 0: NCCL_START_SECONDS */
};

/* Loads $OCTAVO_NCCL_LIBRARY, else libnccl.so.2, once per worker, after giving NCCL's environment
 * the defaults below wherever the operator has not set the variable. ERR_NOT_FOUND with a sentence.
 */
int nccl_load(struct nccl **out, struct err_text *err);
void nccl_unload(struct nccl *lib);
const char *nccl_version(const struct nccl *lib); /* "2.28.9" */

/* The operator has forbidden that devices reach each other: NCCL_P2P_DISABLE. */
bool nccl_peers_disabled(void);

/* The ways of its messages as NCCL calls them: "P2P/IPC", "SHM/direct/direct". */
const char *coll_nccl_transport(const struct coll *c);

/* A new generation: rank 0 makes the identity and shm carries it to the others, together with the
 * abort word and the barrier; it belongs to the new coll, on failure to the caller still. world 1
 * needs no shm. ERR_SETUP, also when it takes too long, or ERR_ABORTED. */
int coll_open_nccl(struct coll **out, const struct nccl *lib, const struct nccl_device *device,
                   struct coll *shm, int rank, int world, uint32_t generation,
                   struct err_text *err);

/* shm belongs to it after all. */
void coll_nccl_take_shm(struct coll *c);

#define NCCL_START_SECONDS 50

#ifdef __cplusplus
}
#endif
#endif
