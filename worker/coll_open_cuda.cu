/* worker/coll_open_cuda.cu: the collectives of the CUDA worker: which one, and for how long.
 *
 * Owns: the slab of coll_ipc.cu, the NCCL library.  Called by: main.c of octavo-worker-cuda.
 * Fails how: ERR_SETUP with a sentence when the collective asked for cannot be had, or when the
 * links of the one chosen hang; auto takes what there is: ipc for small and nccl for large
 * messages, one of the two, or shm.  Limits: one host.  Tested by: tests/gpu/test_coll_gpu.cu
 *
 * The ranks agree at every fork of the way, for a rank that chose alone would wait for ever. Graphs
 * hold the kernels of the collective they captured: they stay while it stays ipc, whose tables keep
 * their addresses, and are dropped when it changes and with every NCCL communicator they hold.
 *
 * Over CUDA IPC devices reach each other's memory. An operator who forbids that to NCCL has a box
 * where it hangs, so NCCL_P2P_DISABLE keeps auto from ipc as well.
 */
#include <cstring>

#include "worker/coll_host.h"
#include "worker/coll_ipc_state.cuh"
#include "worker/coll_mix.h"
#include "worker/coll_nccl.h"
#include "worker/coll_open.h"

extern "C" {
#include "proto/limits.h"
#include "proto/log.h"
}

#define AUTO_NCCL_SECONDS 20 /* for NCCL to start; longer, and auto does without */

struct coll_maker {
    const struct kernels *k;
    struct kctx *ctx;
    int rank, world;
    char asked[8];
    char last[8]; /* what the graphs of the context hold */
    struct ipc_slab *slab;
    struct nccl *nccl;
    int64_t large_from; /* of a mix, found in its first generation; 0: not yet */
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
    const bool any = wants(m, "auto");
    const struct nccl_device device = {
        m->ctx->stream, &m->ctx->capturing, drop_graphs, m->ctx, any, any ? AUTO_NCCL_SECONDS : 0};
    int rc = m->nccl ? OK : nccl_load(&m->nccl, err);
    if (shm) rc = agree(shm, rc);
    TRY(rc);
    return coll_open_nccl(out, m->nccl, &device, shm, m->rank, m->world, generation, err);
}

/* ---- auto ------------------------------------------------------------------------------------ */

static bool is_aborted(const struct coll *shm) {
    return (__atomic_load_n(coll_shm_word(shm), __ATOMIC_ACQUIRE) & 1) != 0;
}

/* What the ranks have in common, and what they must know of each other to choose alike. */
struct fork {
    unsigned char device[16];
    int32_t peers_disabled;
    int64_t large_from;
};

static int meet(struct coll_maker *m, struct coll *shm, bool *alone, bool *peers) {
    struct fork mine, all[LIMIT_RANKS];
    memset(&mine, 0, sizeof mine);
    memcpy(mine.device, &m->ctx->prop.uuid, sizeof mine.device);
    mine.peers_disabled = nccl_peers_disabled();
    mine.large_from = m->large_from;
    TRY(coll_all_gather(shm, &mine, all, sizeof mine));
    *alone = *peers = true;
    for (int r = 0; r < m->world; r++) {
        if (all[r].peers_disabled) *peers = false;
        if (!m->large_from) m->large_from = all[r].large_from;
        for (int q = 0; q < r; q++)
            if (memcmp(all[q].device, all[r].device, sizeof all[r].device) == 0) *alone = false;
    }
    return OK;
}

#define CHAIN 4

struct race {
    struct coll *way[2]; /* small, large */
    struct coll_ipc *ipc;
};

/* Microseconds of one sum of a chain on this rank, the best of some; the first warms the way up. */
static float time_sum(void *user, bool large, int64_t bytes) {
    struct race *r = (struct race *)user;
    struct coll *c = r->way[large];
    const struct ipc_slab *s = r->ipc->slab;
    float best = 1e9f, ms;
    for (int i = 0; i < 6; i++) {
        CU(cudaEventRecord(s->from, s->ctx->stream));
        int rc = OK;
        for (int k = 0; k < CHAIN && rc == OK; k++) rc = coll_all_reduce(c, s->scratch, bytes / 4);
        CU(cudaEventRecord(s->to, s->ctx->stream));
        if (!ipc_wait(r->ipc, IPC_STUCK_US) || rc < 0) return -1;
        CU(cudaEventElapsedTime(&ms, s->from, s->to));
        if (i > 0 && ms < best) best = ms;
    }
    return best * 1000.f / CHAIN;
}

/* ERR_TIMEOUT, on all ranks: NCCL's sums do not end here. */
static int find_crossover(struct coll_maker *m, struct coll *ipc, struct coll *nccl,
                          struct coll *shm) {
    struct race r = {{ipc, nccl}, (struct coll_ipc *)ipc};
    static_assert(IPC_SCRATCH_BYTES >= MIX_BYTES_MAX, "what is measured fits the scratch memory");
    if (m->large_from) return OK; /* graphs of survivors hold it */
    int rc = mix_probe(&m->large_from, shm, time_sum, &r);
    if (rc < 0) m->large_from = 0;
    return rc;
}

/* nccl is closed if it is not to be used, which frees its kernels where they hang. */
static int mix(struct coll **out, struct coll_maker *m, struct coll *ipc, struct coll *nccl,
               struct coll *shm, struct err_text *err) {
    int rc = find_crossover(m, ipc, nccl, shm);
    *out = ipc;
    if (rc < 0 || m->large_from == MIX_NEVER) {
        if (m->rank == 0 && rc != ERR_ABORTED)
            log_info("collective", "name=ipc large=ipc reason=\"%s\"",
                     rc < 0 ? "sums of NCCL do not end" : "NCCL is nowhere faster");
        coll_close(nccl);
        return OK; /* if aborted, ipc says so at its first use */
    }
    if (m->rank == 0)
        log_info("collective",
                 "name=ipc+nccl generation=%u wire=f32 small=ipc large=nccl "
                 "large_from_bytes=%lld transport=\"%s\"",
                 ipc->generation, (long long)m->large_from, coll_nccl_transport(nccl));
    if (coll_open_mix(out, ipc, nccl, m->large_from, &m->ctx->capturing, err) < 0)
        cuda_fatal("coll_open_mix", "no memory", __FILE__, __LINE__); /* the others do mix */
    return OK;
}

static void refused(const char *name, const struct err_text *err) {
    log_warn("collective_refused", "name=%s reason=\"%s\"", name, err ? err->text : "");
}

/* NCCL first, since its communicator outlives a refusal of the other and not the other way round.
 */
static int open_auto(struct coll **out, struct coll_maker *m, struct coll *shm, uint32_t generation,
                     struct err_text *err) {
    struct coll *nccl = NULL, *ipc = NULL;
    bool alone, peers;
    int rc;
    TRY(meet(m, shm, &alone, &peers));
    if (alone && (rc = open_nccl(&nccl, m, shm, generation, err)) < 0) {
        if (rc == ERR_ABORTED) return rc;
        refused("nccl", err);
    }
    if (peers) {
        rc = coll_open_ipc(&ipc, m->slab, shm, err);
        if (rc == OK && !nccl) return *out = ipc, OK;
        if (rc == OK) return mix(out, m, ipc, nccl, shm, err);
        if (is_aborted(shm)) {
            if (nccl) coll_close(nccl);
            return rc; /* by us, with a sentence, when links hang */
        }
        refused("ipc", err);
    } else if (m->rank == 0) {
        log_info("collective_refused", "name=ipc reason=\"NCCL_P2P_DISABLE is set\"");
    }
    if (!nccl) return ERR_NOT_FOUND;
    coll_nccl_take_shm(nccl);
    *out = nccl;
    return OK;
}

static int open_first(struct coll **out, struct coll_maker *m, struct coll *shm,
                      uint32_t generation, struct err_text *err) {
    if (wants(m, "ipc")) return coll_open_ipc(out, m->slab, shm, err);
    if (wants(m, "nccl")) return open_nccl(out, m, shm, generation, err);
    if (wants(m, "auto")) {
        int rc = open_auto(out, m, shm, generation, err);
        if (rc != ERR_NOT_FOUND) return rc;
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
