/* worker/nccl_api.h: the few declarations of NCCL that coll_nccl.c needs, written out, since its
 * header is often not installed where its library is. Binary interface of NCCL 2.14 and later.
 */
#ifndef OCTAVO_WORKER_NCCL_API_H
#define OCTAVO_WORKER_NCCL_API_H

#include <stddef.h>

#define NCCL_SUCCESS     0
#define NCCL_IN_PROGRESS 7 /* a non-blocking communicator is still at it */
#define NCCL_INT8        0
#define NCCL_FLOAT32     7
#define NCCL_SUM         0
#define NCCL_ID_BYTES    128
#define NCCL_MAGIC       0xcafebeefu
#define NCCL_CONFIG_OF   21400 /* the version whose configuration struct this is */

struct nccl_id {
    char bytes[NCCL_ID_BYTES];
};

/* Later versions fill in their defaults for what this one does not have. */
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct nccl_comm; /* opaque */

struct nccl_api {
    int (*get_version)(int *version); /* major * 10000 + minor * 100 + patch */
    int (*get_unique_id)(struct nccl_id *);
    int (*comm_init)(struct nccl_comm **, int world, struct nccl_id, int rank,
                     struct nccl_config *);
    int (*comm_error)(struct nccl_comm *, int *state);
    int (*comm_abort)(struct nccl_comm *);
    int (*all_reduce)(const void *send, void *recv, size_t count, int type, int op,
                      struct nccl_comm *, void *stream);
    int (*all_gather)(const void *send, void *recv, size_t send_count, int type, struct nccl_comm *,
                      void *stream);
    int (*broadcast)(const void *send, void *recv, size_t count, int type, int root,
                     struct nccl_comm *, void *stream);
    const char *(*error_string)(int);
};

#endif
