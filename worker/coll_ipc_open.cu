/* worker/coll_ipc_open.cu: a generation of coll_ipc.cu begins: handles, mappings, the choice.
 *
 * Owns: the mappings of the peers' slabs.  Called by: coll_open_cuda.cu, benchmarks, tests.
 * Fails how: ERR_SETUP or ERR_SYS with a sentence, on all ranks or on none; ERR_SETUP too when the
 * first sums over a link do not end, which aborts the generation; ERR_ABORTED.
 * Limits: IPC_RANKS ranks, one host; IPC_STUCK_US for a few sums.
 * Tested by: tests/gpu/test_coll_gpu.cu
 *
 * Ranks that are threads of one process (tests) use each other's pointers; processes map by handle.
 *
 * A generation starts clean: every rank waits for its own stream, all meet, each clears its flags
 * and packets and sets its epochs, all meet again. Before the first meeting a straggler might still
 * write into a peer's slab, after the second nobody clears.
 *
 * Kernels that wait for each other must be on their devices together. Where ranks share one, as
 * threads, or as processes under a sharing daemon, each gets so few blocks that all ranks' fit, and
 * those of the kernel after as well, which come early and wait.
 */
#include <cerrno>
#include <cstring>
#include <ctime>
#include <sys/random.h>
#include <unistd.h>

#include "worker/coll_ipc_state.cuh"

extern "C" {
#include "proto/log.h"
}

#define IPC_PROBE_TURNS 15
#define IPC_PROBE_CHAIN 4

/* What the ranks tell each other at the start of a generation. */
struct ipc_card {
    cudaIpcMemHandle_t handle;
    uint64_t process; /* equal: threads of one process */
    void *mem;
    unsigned char device[16];
    int sms;
    struct ipc_choice choice;
    struct ipc_options options;
};

/* ---- the probe ------------------------------------------------------------------------------- */

struct stopwatch {
    struct coll_ipc *c;
    int stuck; /* the algorithm that did not end; IPC_AUTO: none */
    int64_t bytes;
};

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static uint64_t stuck_us(const struct coll_ipc *c) {
    const int ms = c->slab->options.stuck_ms;
    return ms > 0 ? (uint64_t)ms * 1000 : IPC_STUCK_US;
}

/* The first sums over these links: if they hang, the start must not. */
static bool ended(struct stopwatch *w, enum ipc_algorithm algorithm, int64_t bytes) {
    struct coll_ipc *c = w->c;
    if (ipc_wait(c, stuck_us(c))) return true;
    bool first = !(__atomic_load_n(c->word, __ATOMIC_ACQUIRE) & 1);
    if (first) w->stuck = algorithm, w->bytes = bytes;
    coll_abort(&c->base);
    if (!ipc_wait(c, IPC_STUCK_US))
        cuda_fatal("the start-up probe", "a kernel that does not hear its abort", __FILE__,
                   __LINE__);
    return false;
}

/* Median microseconds of a sum on this rank. */
static float time_sum(void *user, enum ipc_algorithm algorithm, int64_t bytes) {
    struct stopwatch *w = (struct stopwatch *)user;
    const struct ipc_slab *s = w->c->slab;
    float ms[IPC_PROBE_TURNS];
    for (int i = 0; i < IPC_PROBE_TURNS; i++) {
        CU(cudaEventRecord(s->from, s->ctx->stream));
        for (int k = 0; k < IPC_PROBE_CHAIN; k++)
            ipc_reduce_by(w->c, algorithm, s->scratch, bytes / 4);
        CU(cudaEventRecord(s->to, s->ctx->stream));
        if (!ended(w, algorithm, bytes)) return 0;
        CU(cudaEventElapsedTime(&ms[i], s->from, s->to));
    }
    qsort(ms, IPC_PROBE_TURNS, sizeof ms[0], compare_floats);
    return ms[IPC_PROBE_TURNS / 2] * 1000.f / IPC_PROBE_CHAIN;
}

/* Makes nothing and destroys nothing, not even an event: where ranks share a process, freeing waits
 * for the whole device and destroying for every call in the context, and by then either may be
 * waiting for the rank that frees. */
static int run_probe(struct coll_ipc *c, struct err_text *err) {
    struct stopwatch w = {c, IPC_AUTO, 0};
    cudaStream_t stream = ctx_of(c)->stream;
    CU(cudaMemsetAsync(c->slab->scratch, 0, IPC_SCRATCH_BYTES, stream));
    int rc = coll_barrier(c->shm);
    if (rc == OK) rc = ipc_probe(&c->slab->choice, c->shm, time_sum, &w);
    CU(cudaStreamSynchronize(stream));
    if (w.stuck == IPC_AUTO) return rc;
    return err_set(err, ERR_SETUP,
                   "collective ipc: rank %d: expected a sum of %lld bytes by %s to end within %d "
                   "ms, found it waiting for its peers: octavo doctor looks at the links, and "
                   "--collective nccl or shm takes other ways",
                   c->base.rank, (long long)w.bytes,
                   ipc_algorithm_name((enum ipc_algorithm)w.stuck), (int)(stuck_us(c) / 1000));
}

/* ---- a generation ---------------------------------------------------------------------------- */

/* One number per process, drawn once; process ids repeat between containers. */
static uint64_t process_number(void) {
    static uint64_t number;
    static bool drawn;
    if (!__atomic_load_n(&drawn, __ATOMIC_ACQUIRE)) {
        uint64_t n = 0, none = 0;
        if (getrandom(&n, sizeof n, 0) != (ssize_t)sizeof n)
            n = (uint64_t)time(NULL) ^ (uint64_t)getpid() << 40;
        __atomic_compare_exchange_n(&number, &none, n | 1, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE);
        __atomic_store_n(&drawn, true, __ATOMIC_RELEASE);
    }
    return __atomic_load_n(&number, __ATOMIC_ACQUIRE);
}

static int register_word(struct coll_ipc *c, struct ipc_table *t, struct err_text *err) {
    c->word = coll_shm_word(c->shm);
    uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)c->word & ~(size - 1);
    void *device = NULL;
    cudaError_t e =
        cudaHostRegister((void *)at, size, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (e == cudaSuccess) {
        c->page = (void *)at;
        e = cudaHostGetDevicePointer(&device, (void *)at, 0);
    }
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return err_set(
            err, ERR_SETUP,
            "collective ipc: expected the abort word to be visible to the device, found: "
            "%s",
            cudaGetErrorString(e));
    }
    t->abort_word = (const uint32_t *)((char *)device + ((uintptr_t)c->word - at));
    return OK;
}

static int map_peers(struct coll_ipc *c, const struct ipc_card *cards, struct ipc_table *t,
                     struct err_text *err) {
    const struct ipc_slab *s = c->slab;
    for (int r = 0; r < s->world; r++) {
        t->from[r] = s->rank;
        if (memcmp(&cards[r].options, &s->options, sizeof s->options) != 0)
            return err_set(err, ERR_SETUP,
                           "collective ipc: expected rank %d to have rank %d's "
                           "options, found others",
                           r, s->rank);
        if (cards[r].process == cards[s->rank].process) {
            t->slab[r] = (char *)cards[r].mem;
            continue;
        }
        cudaError_t e =
            cudaIpcOpenMemHandle(&c->mapped[r], cards[r].handle, cudaIpcMemLazyEnablePeerAccess);
        if (e != cudaSuccess) {
            (void)cudaGetLastError();
            c->mapped[r] = NULL;
            return err_set(err, ERR_SETUP,
                           "collective ipc: rank %d: expected to map the memory of rank %d, found: "
                           "%s",
                           s->rank, r, cudaGetErrorString(e));
        }
        t->slab[r] = (char *)c->mapped[r];
    }
    return OK;
}

/* All ranks fail, or none. */
static int agree(struct coll_ipc *c, int rc, struct err_text *err) {
    int32_t mine = rc, all[IPC_RANKS];
    TRY(coll_all_gather(c->shm, &mine, all, sizeof mine));
    for (int r = 0; rc == OK && r < c->base.world; r++)
        if (all[r] < 0)
            rc = err_set(err, all[r],
                         "collective ipc: rank %d: expected its peers' memory, found: %s", r,
                         err_name(all[r]));
    return rc;
}

static void fill_card(const struct ipc_slab *s, struct ipc_card *card, int *rc,
                      struct err_text *err) {
    memset(card, 0, sizeof *card);
    cudaError_t e = cudaIpcGetMemHandle(&card->handle, s->mem);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        *rc = err_set(err, ERR_SETUP, "collective ipc: expected a handle of the slab, found: %s",
                      cudaGetErrorString(e));
    }
    card->process = process_number();
    card->mem = s->mem;
    memcpy(card->device, &s->ctx->prop.uuid, sizeof card->device);
    card->sms = s->ctx->prop.multiProcessorCount;
    card->choice = s->choice;
    card->options = s->options;
}

/* The most ranks that share a device, and the smallest device's processors. */
static int sharing(const struct ipc_card *cards, int world, int *sms) {
    int most = 1;
    *sms = cards[0].sms;
    for (int r = 0; r < world; r++) {
        int n = 0;
        for (int q = 0; q < world; q++)
            n += memcmp(cards[q].device, cards[r].device, sizeof cards[r].device) == 0;
        most = MAX(most, n);
        *sms = MIN(*sms, cards[r].sms);
    }
    return most;
}

/* Push or pull, one shot or two: what a rank of an earlier generation knows, for its graphs hold
 * it; else what the probe finds; else, on a shared device where times mean nothing, the default. */
static int settle_choice(struct coll_ipc *c, const struct ipc_card *cards, struct err_text *err) {
    struct ipc_slab *s = c->slab;
    int known = -1, sms;
    const int shared = sharing(cards, s->world, &sms);
    for (int r = s->world - 1; r >= 0; r--)
        if (cards[r].choice.known) known = r;
    s->blocks = ipc_blocks(s->options.blocks, shared, sms);
    bool measure = s->options.algorithm == IPC_AUTO && (shared == 1 || s->options.probe_shared);
    if (known >= 0)
        s->choice = cards[known].choice;
    else if (measure)
        TRY(run_probe(c, err));
    s->choice.known = 1;
    if (s->rank == 0)
        log_info("collective",
                 "name=ipc generation=%u wire=f32 packets_max_bytes=%lld one_shot_max_bytes=%lld "
                 "one_shot=%s two_shot=%s blocks=%d ranks_a_device=%d from=%s",
                 c->base.generation, (long long)s->choice.packets_max,
                 (long long)s->choice.one_shot_max,
                 ipc_algorithm_name((enum ipc_algorithm)s->choice.one_shot),
                 ipc_algorithm_name((enum ipc_algorithm)s->choice.two_shot), s->blocks, shared,
                 known >= 0 ? "survivor"
                 : measure  ? "probe"
                            : "default");
    return OK;
}

static int start_generation(struct coll_ipc *c, struct err_text *err) {
    struct ipc_slab *s = c->slab;
    struct ipc_card card, cards[IPC_RANKS];
    struct ipc_table t;
    int rc = OK;
    memset(&t, 0, sizeof t);
    t.rank = s->rank, t.world = s->world;
    ipc_words_show(s, &t);
    CU(cudaStreamSynchronize(s->ctx->stream));
    fill_card(s, &card, &rc, err);
    TRY(coll_all_gather(c->shm, &card, cards, sizeof card));
    if (rc == OK) rc = register_word(c, &t, err);
    if (rc == OK) rc = map_peers(c, cards, &t, err);
    TRY(agree(c, rc, err));
    CU(cudaMemcpyAsync(s->table, &t, sizeof t, cudaMemcpyHostToDevice, s->ctx->stream));
    ipc_slab_clear(s);
    TRY(coll_barrier(c->shm));
    return settle_choice(c, cards, err);
}

int coll_open_ipc(struct coll **out, struct ipc_slab *slab, struct coll *shm,
                  struct err_text *err) {
    assert(shm->rank == slab->rank && shm->world == slab->world);
    struct coll_ipc *c = (struct coll_ipc *)calloc(1, sizeof *c);
    if (!c) return err_set(err, ERR_NOMEM, "collective ipc: expected memory, found none");
    c->base.ops = ipc_ops(false);
    c->base.rank = slab->rank, c->base.world = slab->world;
    c->base.generation = shm->generation;
    c->shm = shm, c->slab = slab;
    c->word = coll_shm_word(shm);
    int rc = start_generation(c, err);
    if (rc < 0) {
        if (rc == ERR_ABORTED) err_set(err, rc, "collective ipc: aborted while starting");
        ipc_drop(c);
        free(c);
        return rc;
    }
    *out = &c->base;
    return OK;
}

int coll_open_loopback(struct coll **out, struct kctx *ctx, int world,
                       const struct ipc_options *options, struct err_text *err) {
    struct coll_ipc *c = (struct coll_ipc *)calloc(1, sizeof *c);
    if (!c) return err_set(err, ERR_NOMEM, "collective loopback: expected memory, found none");
    int rc = ipc_slab_new(&c->slab, ctx, 0, world, options, err);
    if (rc < 0) {
        free(c);
        return rc;
    }
    struct ipc_table t;
    memset(&t, 0, sizeof t);
    c->base.ops = ipc_ops(true);
    c->base.world = world;
    c->owns_slab = true;
    t.world = world;
    ipc_words_show(c->slab, &t);
    for (int r = 0; r < world; r++) t.slab[r] = c->slab->mem, t.from[r] = r;
    CU(cudaHostAlloc(&c->page, sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable));
    memset(c->page, 0, sizeof(uint32_t));
    c->word = (const uint32_t *)c->page;
    CU(cudaHostGetDevicePointer((void **)&t.abort_word, c->page, 0));
    CU(cudaMemcpyAsync(c->slab->table, &t, sizeof t, cudaMemcpyHostToDevice, ctx->stream));
    ipc_slab_clear(c->slab);
    *out = &c->base;
    return OK;
}
