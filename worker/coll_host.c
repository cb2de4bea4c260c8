/* worker/coll_host.c: collectives of a device through host memory.
 *
 * Owns: a staging buffer and the shared-memory coll beneath.
 * Called by: coll_open_cuda.cu; forward.c through struct coll.
 * Fails how: as the coll beneath: ERR_ABORTED once the generation is aborted.
 * Limits: HOST_PIECE_BYTES travel at once; not for graphs.
 * Tested by: tests/unit/test_coll_nccl.c (on the CPU backend), tests/gpu/test_coll_gpu.cu
 *
 * It is the fallback where devices cannot reach each other, so it is plain: device to host, sum
 * there in rank order, host to device. Its bits equal those of the other ways.
 */
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"
#include "worker/coll_host.h"

#define HOST_PIECE_BYTES (1 << 20)

struct coll_host {
    struct coll base;
    const struct kernels *k;
    struct kctx *ctx;
    struct coll *shm;
    char *stage; /* [HOST_PIECE_BYTES], then [world, HOST_PIECE_BYTES] for what is gathered */
};

static struct coll_host *host_of(struct coll *c) {
    return (struct coll_host *)c;
}

/* What the coll beneath waited is what this one waited. */
static int host_waited(struct coll_host *h, int rc) {
    h->base.wait_us += h->shm->wait_us;
    h->shm->wait_us = 0;
    return rc;
}

static int host_all_reduce(struct coll *c, float *x, int64_t n) {
    struct coll_host *h = host_of(c);
    const int64_t most = HOST_PIECE_BYTES / (int64_t)sizeof *x;
    for (int64_t at = 0; at < n; at += most) {
        int64_t part = MIN(most, n - at);
        h->k->get(h->ctx, h->stage, x + at, (size_t)part * sizeof *x);
        TRY(host_waited(h, coll_all_reduce(h->shm, (float *)(void *)h->stage, part)));
        h->k->put(h->ctx, x + at, h->stage, (size_t)part * sizeof *x);
    }
    return OK;
}

static int host_all_gather(struct coll *c, const void *src, void *dst, int64_t bytes) {
    struct coll_host *h = host_of(c);
    char *all = h->stage + HOST_PIECE_BYTES;
    for (int64_t at = 0; at < bytes; at += HOST_PIECE_BYTES) {
        int64_t part = MIN(HOST_PIECE_BYTES, bytes - at);
        h->k->get(h->ctx, h->stage, (const char *)src + at, (size_t)part);
        TRY(host_waited(h, coll_all_gather(h->shm, h->stage, all, part)));
        for (int r = 0; r < c->world; r++)
            h->k->put(h->ctx, (char *)dst + r * bytes + at, all + r * part, (size_t)part);
    }
    return OK;
}

static int host_broadcast(struct coll *c, void *x, int64_t bytes, int root) {
    struct coll_host *h = host_of(c);
    for (int64_t at = 0; at < bytes; at += HOST_PIECE_BYTES) {
        int64_t part = MIN(HOST_PIECE_BYTES, bytes - at);
        char *piece = (char *)x + at;
        if (c->rank == root) h->k->get(h->ctx, h->stage, piece, (size_t)part);
        TRY(host_waited(h, coll_broadcast(h->shm, h->stage, part, root)));
        if (c->rank != root) h->k->put(h->ctx, piece, h->stage, (size_t)part);
    }
    return OK;
}

/* get waits for all that is queued. */
static int host_barrier(struct coll *c) {
    struct coll_host *h = host_of(c);
    h->k->get(h->ctx, h->stage, h->stage, 0);
    return coll_barrier(h->shm);
}

static void host_abort(struct coll *c) {
    coll_abort(host_of(c)->shm);
}

static void host_close(struct coll *c) {
    struct coll_host *h = host_of(c);
    h->k->get(h->ctx, h->stage, h->stage, 0); /* puts still read the staging buffer */
    coll_close(h->shm);
    free(h->stage);
    free(h);
}

static const struct coll_ops host_ops = {
    .name = "shm",
    .all_reduce = host_all_reduce,
    .all_gather = host_all_gather,
    .broadcast = host_broadcast,
    .barrier = host_barrier,
    .abort = host_abort,
    .close = host_close,
};

int coll_open_host(struct coll **out, const struct kernels *k, struct kctx *ctx, struct coll *shm,
                   struct err_text *err) {
    size_t bytes = (size_t)HOST_PIECE_BYTES * (size_t)(1 + shm->world);
    struct coll_host *h = calloc(1, sizeof *h);
    if (h) h->stage = malloc(bytes);
    if (!h || !h->stage) {
        free(h);
        return err_set(err, ERR_NOMEM, "collective shm: expected %zu bytes to stage in, found none",
                       bytes);
    }
    h->base = (struct coll){
        .ops = &host_ops, .rank = shm->rank, .world = shm->world, .generation = shm->generation};
    h->k = k;
    h->ctx = ctx;
    h->shm = shm;
    *out = &h->base;
    return OK;
}
