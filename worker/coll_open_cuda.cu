/* worker/coll_open_cuda.cu: the collectives of the CUDA worker: which one, and for how long.
 *
 * Owns: the slab of coll_ipc.cu, the NCCL library.  Called by: main.c of octavo-worker-cuda.
 * Fails how: ERR_SETUP with a sentence when the collective asked for cannot be had; auto goes on to
 * the next: ipc, nccl, shm.  Limits: one host.  Tested by: tests/gpu/test_coll_gpu.cu
 *
 * The ranks agree at every fork of the way, for a rank that chose alone would wait for ever. Graphs
 * hold the kernels of the collective they captured: they stay while it stays ipc, whose tables keep
 * their addresses, and are dropped when it changes and with every NCCL communicator.
 */
#include <cstring>

#include "worker/coll_host.h"
#include "worker/coll_ipc.h"
#include "worker/coll_nccl.h"
#include "worker/coll_open.h"

#include "kernels/cuda/cuda.cuh"

extern "C" {
#include "proto/limits.h"
#include "proto/log.h"
}

struct coll_maker {
    const struct kernels *k;
    struct kctx *ctx;
    int rank, world;
    char asked[8];
    char last[8]; /* what the graphs of the context hold */
    struct ipc_slab *slab;
    struct nccl *nccl;
};

static void drop_graphs(void *user) {
    struct kctx *ctx = (struct kctx *)user;
    for (int i = 0; i < ctx->n_graphs; i++) CU(cudaGraphExecDestroy(ctx->graphs[i].exec));
    ctx->n_graphs = ctx->n_prepared = 0;
}

static bool wants(const struct coll_maker *m, const char *name) {
    return strcmp(m->asked, name) == 0;
}

int coll_maker_new(struct coll_maker **out, const struct kernels *k, struct kctx *ctx, int rank,
                   int world, const char *collective, struct err_text *err) {
    struct coll_maker *m = (struct coll_maker *)calloc(1, sizeof *m);
    if (!m) return err_set(err, ERR_NOMEM, "--collective: expected memory, found none");
    m->k = k, m->ctx = ctx, m->rank = rank, m->world = world;
    snprintf(m->asked, sizeof m->asked, "%s", collective);
    int rc = OK;
    if (world > 1 && (wants(m, "auto") || wants(m, "ipc")))
        rc = ipc_slab_new(&m->slab, ctx, rank, world, NULL, err);
    if (rc == OK && wants(m, "nccl")) rc = nccl_load(&m->nccl, err);
    if (rc < 0) {
        coll_maker_free(m);
        return rc;
    }
    *out = m;
    return OK;
}

void coll_maker_free(struct coll_maker *m) {
    if (!m) return;
    ipc_slab_free(m->slab);
    nccl_unload(m->nccl);
    free(m);
}

/* The lowest of the ranks' answers. */
static int agree(struct coll *shm, int mine) {
    int32_t all[LIMIT_RANKS], rc = mine;
    TRY(coll_all_gather(shm, &rc, all, sizeof rc));
    for (int r = 0; r < shm->world; r++) rc = MIN(rc, all[r]);
    return rc;
}

static int open_nccl(struct coll **out, struct coll_maker *m, struct coll *shm, uint32_t generation,
                     struct err_text *err) {
    const struct nccl_device device = {m->ctx->stream, &m->ctx->capturing, drop_graphs, m->ctx};
    int rc = m->nccl ? OK : nccl_load(&m->nccl, err);
    if (shm) rc = agree(shm, rc);
    TRY(rc);
    return coll_open_nccl(out, m->nccl, &device, shm, m->rank, m->world, generation, err);
}

static int open_first(struct coll **out, struct coll_maker *m, struct coll *shm,
                      uint32_t generation, struct err_text *err) {
    const bool any = wants(m, "auto");
    int rc = ERR_SETUP;
    if (any || wants(m, "ipc")) {
        rc = coll_open_ipc(out, m->slab, shm, err);
        if (rc == OK || rc == ERR_ABORTED || !any) return rc;
        log_warn("collective_refused", "name=ipc reason=\"%s\"", err ? err->text : "");
    }
    if (any || wants(m, "nccl")) {
        rc = open_nccl(out, m, shm, generation, err);
        if (rc == OK || rc == ERR_ABORTED || !any) return rc;
        log_warn("collective_refused", "name=nccl reason=\"%s\"", err ? err->text : "");
    }
    TRY(coll_open_host(out, m->k, m->ctx, shm, err));
    if (m->rank == 0)
        log_info("collective", "name=shm generation=%u wire=f32 through=host", generation);
    return OK;
}

int coll_maker_open(struct coll **out, struct coll_maker *m, struct coll *shm, uint32_t generation,
                    struct err_text *err) {
    if (m->world > 1 || wants(m, "nccl")) {
        TRY(open_first(out, m, shm, generation, err));
    } else {
        TRY(coll_open_none(out));
        (*out)->generation = generation;
    }
    if (strcmp(m->last, (*out)->ops->name) != 0) drop_graphs(m->ctx);
    snprintf(m->last, sizeof m->last, "%s", (*out)->ops->name);
    return OK;
}
