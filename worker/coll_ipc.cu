/* worker/coll_ipc.cu: collectives over CUDA IPC: handles, generations, the choice of algorithm.
 *
 * Owns: the slab, its table, the mappings of the peers' slabs.
 * Called by: coll_open.c; forward.c and step.c through struct coll; ipc_abort by any thread.
 * Fails how: ERR_ABORTED once the generation is aborted: by the call, or by check after a wait.
 * At open ERR_SETUP or ERR_SYS with a sentence, on all ranks or on none.
 * Limits: IPC_RANKS ranks, one host.  Tested by: tests/gpu/test_coll_gpu.cu
 *
 * The slab is allocated once with plain cudaMalloc, since a mapping of memory that an allocator may
 * move breaks. Ranks that are threads of one process (tests) use each other's pointers; processes
 * map by handle.
 *
 * A generation starts clean: every rank waits for its own stream, all meet, each clears its flags
 * and packets and sets its epochs, all meet again. Before the first meeting a straggler might still
 * write into a peer's slab, after the second nobody clears.
 *
 * The abort word is the host barrier's own, whose page is registered with the device, so that
 * whoever aborts the one aborts the other, dead devices or not.
 */
#include <cerrno>
#include <cstring>
#include <ctime>
#include <sys/random.h>
#include <unistd.h>

#include "worker/coll_ipc.h"
#include "worker/coll_ipc_device.cuh"
#include "worker/coll_ipc_probe.h"

extern "C" {
#include "proto/log.h"
}

#define IPC_CLOSE_US    2000000 /* patience with queued work at close, then it is aborted */
#define IPC_PROBE_TURNS 15
#define IPC_PROBE_CHAIN 4

struct ipc_slab {
    struct kctx *ctx;
    int rank, world;
    struct ipc_options options;
    char *mem;
    struct ipc_table *table;
    uint32_t *left; /* host memory that the device writes: a kernel left without its result */
    struct ipc_choice choice;
};

struct coll_ipc {
    struct coll base;
    struct coll *shm; /* NULL in loop-back */
    struct ipc_slab *slab;
    bool owns_slab;
    void *mapped[IPC_RANKS]; /* by handle, to be unmapped */
    void *page;              /* registered: of the shared memory; or ours, in loop-back */
    const uint32_t *word;    /* its host address */
};

/* What the ranks tell each other at the start of a generation. */
struct ipc_card {
    cudaIpcMemHandle_t handle;
    uint64_t process; /* equal: threads of one process */
    void *mem;
    unsigned char device[16];
    struct ipc_choice choice;
    struct ipc_options options;
};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ---- slab ------------------------------------------------------------------------------------ */

typedef void (*reduce_kernel)(const struct ipc_table *, float *, int64_t);

template <int W> static reduce_kernel pick_width(int algorithm) {
    static const reduce_kernel kernels[IPC_ALGORITHMS] = {
        NULL,
        all_reduce_packets<W>,
        all_reduce_one_shot<W, true>,
        all_reduce_one_shot<W, false>,
        all_reduce_two_shot<W, true>,
        all_reduce_two_shot<W, false>,
    };
    return kernels[algorithm];
}

static reduce_kernel pick_kernel(int world, int algorithm) {
    return world <= 2   ? pick_width<2>(algorithm)
           : world <= 4 ? pick_width<4>(algorithm)
           : world <= 8 ? pick_width<8>(algorithm)
                        : pick_width<16>(algorithm);
}

/* Neighbouring kernels overlap only if they divide an SM's memory alike, and the heavy ones take
 * all of it as shared. Naming the kernels also loads them, before anything waits on the device. */
static void prepare_kernels(int world) {
    for (int a = IPC_PACKETS; a < IPC_ALGORITHMS; a++)
        CU(cudaFuncSetAttribute((const void *)pick_kernel(world, a),
                                cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared));
}

int ipc_slab_new(struct ipc_slab **out, struct kctx *ctx, int rank, int world,
                 const struct ipc_options *options, struct err_text *err) {
    if (world < 2 || world > IPC_RANKS)
        return err_set(err, ERR_SETUP, "collective ipc: expected 2 to %d ranks, found %d",
                       IPC_RANKS, world);
    struct ipc_slab *s = (struct ipc_slab *)calloc(1, sizeof *s);
    size_t bytes = ipc_slab_bytes(world);
    cudaError_t e = s ? cudaMalloc((void **)&s->mem, bytes) : cudaErrorMemoryAllocation;
    if (e == cudaSuccess) e = cudaMalloc((void **)&s->table, sizeof *s->table);
    if (e == cudaSuccess)
        e = cudaHostAlloc((void **)&s->left, sizeof *s->left, cudaHostAllocMapped);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        if (s && s->mem) CU(cudaFree(s->mem));
        if (s && s->table) CU(cudaFree(s->table));
        free(s);
        return err_set(err, ERR_NOMEM,
                       "collective ipc: expected %zu bytes of the device, found: %s", bytes,
                       cudaGetErrorString(e));
    }
    s->ctx = ctx, s->rank = rank, s->world = world;
    if (options) s->options = *options;
    if (s->options.blocks < 1 || s->options.blocks > IPC_BLOCKS) s->options.blocks = IPC_BLOCKS;
    s->choice = ipc_choice_default();
    prepare_kernels(world);
    *out = s;
    return OK;
}

void ipc_slab_free(struct ipc_slab *s) {
    if (!s) return;
    CU(cudaStreamSynchronize(s->ctx->stream));
    CU(cudaFree(s->mem));
    CU(cudaFree(s->table));
    CU(cudaFreeHost(s->left));
    free(s);
}

/* Flags and packets as if exchange first_epoch had just been done. */
static void slab_clear(struct ipc_slab *s) {
    cudaStream_t stream = s->ctx->stream;
    __atomic_store_n(s->left, 0, __ATOMIC_RELEASE);
    size_t packets = (size_t)IPC_BLOCKS * 2 * s->world * IPC_LL_BYTES;
    uint32_t head[2 * IPC_BLOCKS * IPC_LINE];
    for (size_t i = 0; i < sizeof head / sizeof head[0]; i++) head[i] = s->options.first_epoch;
    CU(cudaMemsetAsync(s->mem + IPC_HEAD_BYTES, 0, packets, stream));
    CU(cudaMemcpyAsync(s->mem, head, sizeof head, cudaMemcpyHostToDevice, stream));
    CU(cudaStreamSynchronize(stream));
}

/* ---- launches -------------------------------------------------------------------------------- */

static struct kctx *ctx_of(const struct coll_ipc *c) {
    return c->slab->ctx;
}

static bool aborted(const struct coll_ipc *c) {
    return (__atomic_load_n(c->word, __ATOMIC_ACQUIRE) & 1) != 0;
}

/* A call inside a capture must not fail half way: its kernels will find the word themselves. */
static int ipc_state(const struct coll_ipc *c) {
    return aborted(c) && !ctx_of(c)->capturing ? ERR_ABORTED : OK;
}

/* Blocks and threads for so many items of one thread each; a function of the size alone, since all
 * ranks must come to the same. */
static void shape(const struct ipc_slab *s, int64_t items, int threads_max, int *grid, int *block) {
    *grid = (int)ceil_div(items, 128);
    if (*grid > s->options.blocks) *grid = s->options.blocks;
    int64_t each = ceil_div(ceil_div(items, *grid), 32) * 32;
    *block = (int)(each > threads_max ? threads_max : each);
}

static void reduce_by(struct coll_ipc *c, int algorithm, float *x, int64_t n) {
    const struct ipc_slab *s = c->slab;
    int grid, block;
    if (algorithm == IPC_PACKETS)
        shape(s, ceil_div(n, 2), IPC_LL_THREADS, &grid, &block);
    else
        shape(s, ceil_div(n, 4), IPC_THREADS, &grid, &block);
    launch(s->ctx, pick_kernel(s->world, algorithm), dim3((unsigned)grid), dim3((unsigned)block), 0,
           s->table, x, n);
}

static int choose(const struct ipc_slab *s, int64_t bytes) {
    bool asked = s->options.algorithm != IPC_AUTO;
    return asked ? s->options.algorithm : ipc_choose(&s->choice, bytes);
}

static int ipc_all_reduce(struct coll *base, float *x, int64_t n) {
    struct coll_ipc *c = (struct coll_ipc *)base;
    TRY(ipc_state(c));
    if (n > 0) reduce_by(c, choose(c->slab, n * (int64_t)sizeof *x), x, n);
    return OK;
}

static bool pushes(const struct ipc_slab *s) {
    int a = s->options.algorithm != IPC_AUTO ? (int)s->options.algorithm : s->choice.one_shot;
    return a != IPC_ONE_PULL && a != IPC_TWO_PULL;
}

template <typename T>
static void gather_as(struct coll_ipc *c, const void *src, void *dst, int64_t bytes) {
    const struct ipc_slab *s = c->slab;
    int64_t n = bytes / (int64_t)sizeof(T);
    int grid, block;
    shape(s, n, IPC_THREADS, &grid, &block);
    launch(s->ctx, pushes(s) ? gather_parts<T, true> : gather_parts<T, false>, dim3((unsigned)grid),
           dim3((unsigned)block), 0, s->table, (const T *)src, (T *)dst, n);
}

template <typename T>
static void broadcast_as(struct coll_ipc *c, void *x, int64_t bytes, int root) {
    const struct ipc_slab *s = c->slab;
    int64_t n = bytes / (int64_t)sizeof(T);
    int grid, block;
    shape(s, n, IPC_THREADS, &grid, &block);
    launch(s->ctx, pushes(s) ? broadcast_from<T, true> : broadcast_from<T, false>,
           dim3((unsigned)grid), dim3((unsigned)block), 0, s->table, (T *)x, n, root);
}

/* The widest item that addresses and length allow: 16, 4 or 1 bytes. */
static int item_bytes(const void *a, const void *b, int64_t bytes) {
    uintptr_t all = (uintptr_t)a | (uintptr_t)b | (uintptr_t)bytes;
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

static int ipc_all_gather(struct coll *base, const void *src, void *dst, int64_t bytes) {
    struct coll_ipc *c = (struct coll_ipc *)base;
    TRY(ipc_state(c));
    if (bytes <= 0) return OK;
    switch (item_bytes(src, dst, bytes)) {
    case 16:
        gather_as<uint4>(c, src, dst, bytes);
        break;
    case 4:
        gather_as<uint32_t>(c, src, dst, bytes);
        break;
    default:
        gather_as<uint8_t>(c, src, dst, bytes);
    }
    return OK;
}

static int ipc_broadcast(struct coll *base, void *x, int64_t bytes, int root) {
    struct coll_ipc *c = (struct coll_ipc *)base;
    assert(root >= 0 && root < base->world);
    TRY(ipc_state(c));
    if (bytes <= 0) return OK;
    switch (item_bytes(x, x, bytes)) {
    case 16:
        broadcast_as<uint4>(c, x, bytes, root);
        break;
    case 4:
        broadcast_as<uint32_t>(c, x, bytes, root);
        break;
    default:
        broadcast_as<uint8_t>(c, x, bytes, root);
    }
    return OK;
}

/* Not the abort word: a step that was through before the abort is a good one. */
static int ipc_check(struct coll *base) {
    const struct coll_ipc *c = (const struct coll_ipc *)base;
    return __atomic_load_n(c->slab->left, __ATOMIC_ACQUIRE) ? ERR_ABORTED : OK;
}

/* Everything queued before it, on any rank, is done. Not for captures. */
static int ipc_barrier(struct coll *base) {
    struct coll_ipc *c = (struct coll_ipc *)base;
    TRY(ipc_state(c));
    CU(cudaStreamSynchronize(ctx_of(c)->stream));
    TRY(ipc_check(base));
    return c->shm ? coll_barrier(c->shm) : OK;
}

/* ---- end ------------------------------------------------------------------------------------- */

static void ipc_abort(struct coll *base) {
    struct coll_ipc *c = (struct coll_ipc *)base;
    if (c->shm)
        coll_abort(c->shm);
    else
        __atomic_store_n((uint32_t *)c->word, 1, __ATOMIC_RELEASE);
}

/* A peer that died without an abort would keep a kernel waiting. */
static void wait_or_abort(struct coll_ipc *c) {
    uint64_t start = now_us();
    cudaError_t e;
    while ((e = cudaStreamQuery(ctx_of(c)->stream)) == cudaErrorNotReady &&
           now_us() - start < IPC_CLOSE_US)
        usleep(100);
    if (e == cudaErrorNotReady) {
        log_warn("collective_stuck", "generation=%u waited_us=%d", c->base.generation,
                 IPC_CLOSE_US);
        ipc_abort(&c->base);
    }
    CU(cudaStreamSynchronize(ctx_of(c)->stream));
}

static void unmap(struct coll_ipc *c) {
    for (int r = 0; r < IPC_RANKS; r++) {
        if (!c->mapped[r]) continue;
        cudaError_t e = cudaIpcCloseMemHandle(c->mapped[r]);
        if (e != cudaSuccess) {
            (void)cudaGetLastError();
            log_warn("unmap_failed", "peer=%d error=\"%s\"", r, cudaGetErrorString(e));
        }
        c->mapped[r] = NULL;
    }
}

/* Leaves shm to the caller. */
static void drop(struct coll_ipc *c) {
    wait_or_abort(c);
    unmap(c);
    if (!c->shm)
        CU(cudaFreeHost(c->page));
    else if (c->page)
        CU(cudaHostUnregister(c->page));
    if (c->owns_slab) ipc_slab_free(c->slab);
}

static void ipc_close(struct coll *base) {
    struct coll_ipc *c = (struct coll_ipc *)base;
    struct coll *shm = c->shm;
    drop(c);
    if (shm) coll_close(shm);
    free(c);
}

static const struct coll_ops *ipc_ops(bool loopback) {
    static struct coll_ops ops[2];
    struct coll_ops *o = &ops[loopback];
    o->name = loopback ? "loopback" : "ipc";
    o->in_graphs = true;
    o->all_reduce = ipc_all_reduce;
    o->all_gather = ipc_all_gather;
    o->broadcast = ipc_broadcast;
    o->barrier = ipc_barrier;
    o->abort = ipc_abort;
    o->close = ipc_close;
    o->check = ipc_check;
    return o;
}

/* ---- the probe ------------------------------------------------------------------------------- */

struct stopwatch {
    struct coll_ipc *c;
    float *x;
    cudaEvent_t from, to;
};

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median microseconds of a sum on this rank. */
static float time_sum(void *user, enum ipc_algorithm algorithm, int64_t bytes) {
    struct stopwatch *w = (struct stopwatch *)user;
    cudaStream_t stream = ctx_of(w->c)->stream;
    float ms[IPC_PROBE_TURNS];
    for (int i = 0; i < IPC_PROBE_TURNS; i++) {
        CU(cudaEventRecord(w->from, stream));
        for (int k = 0; k < IPC_PROBE_CHAIN; k++) reduce_by(w->c, algorithm, w->x, bytes / 4);
        CU(cudaEventRecord(w->to, stream));
        CU(cudaStreamSynchronize(stream));
        CU(cudaEventElapsedTime(&ms[i], w->from, w->to));
    }
    qsort(ms, IPC_PROBE_TURNS, sizeof ms[0], compare_floats);
    return ms[IPC_PROBE_TURNS / 2] * 1000.f / IPC_PROBE_CHAIN;
}

static int run_probe(struct coll_ipc *c) {
    struct stopwatch w = {c, NULL, NULL, NULL};
    cudaStream_t stream = ctx_of(c)->stream;
    CU(cudaMalloc((void **)&w.x, IPC_PROBE_BYTES));
    CU(cudaMemsetAsync(w.x, 0, IPC_PROBE_BYTES, stream));
    CU(cudaEventCreate(&w.from));
    CU(cudaEventCreate(&w.to));
    /* allocating may wait for the device, which must not be waiting for us already */
    int rc = coll_barrier(c->shm);
    if (rc == OK) rc = ipc_probe(&c->slab->choice, c->shm, time_sum, &w);
    CU(cudaStreamSynchronize(stream));
    CU(cudaEventDestroy(w.from));
    CU(cudaEventDestroy(w.to));
    CU(cudaFree(w.x));
    return rc;
}

/* ---- a generation ---------------------------------------------------------------------------- */

/* One number per process, drawn once; process ids repeat between containers. */
static uint64_t process_number(void) {
    static uint64_t number;
    static bool drawn;
    if (!__atomic_load_n(&drawn, __ATOMIC_ACQUIRE)) {
        uint64_t n = 0, none = 0;
        if (getrandom(&n, sizeof n, 0) != (ssize_t)sizeof n)
            n = now_us() ^ (uint64_t)getpid() << 40;
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
    card->choice = s->choice;
    card->options = s->options;
}

/* Push or pull, one shot or two: what a rank of an earlier generation knows, for its graphs hold
 * it; else what the probe finds; else, on a shared device where times mean nothing, the default. */
static int settle_choice(struct coll_ipc *c, const struct ipc_card *cards) {
    struct ipc_slab *s = c->slab;
    bool shared = false;
    int known = -1;
    for (int r = s->world - 1; r >= 0; r--) {
        if (cards[r].choice.known) known = r;
        for (int q = 0; q < r; q++)
            shared |= memcmp(cards[q].device, cards[r].device, sizeof cards[r].device) == 0;
    }
    bool measure = s->options.algorithm == IPC_AUTO && (!shared || s->options.probe_shared);
    if (known >= 0)
        s->choice = cards[known].choice;
    else if (measure)
        TRY(run_probe(c));
    s->choice.known = 1;
    if (s->rank == 0)
        log_info("collective",
                 "name=ipc generation=%u wire=f32 packets_max_bytes=%lld one_shot_max_bytes=%lld "
                 "one_shot=%s two_shot=%s from=%s",
                 c->base.generation, (long long)s->choice.packets_max,
                 (long long)s->choice.one_shot_max,
                 ipc_algorithm_name((enum ipc_algorithm)s->choice.one_shot),
                 ipc_algorithm_name((enum ipc_algorithm)s->choice.two_shot),
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
    CU(cudaHostGetDevicePointer((void **)&t.left, s->left, 0));
    CU(cudaStreamSynchronize(s->ctx->stream));
    fill_card(s, &card, &rc, err);
    TRY(coll_all_gather(c->shm, &card, cards, sizeof card));
    if (rc == OK) rc = register_word(c, &t, err);
    if (rc == OK) rc = map_peers(c, cards, &t, err);
    TRY(agree(c, rc, err));
    CU(cudaMemcpyAsync(s->table, &t, sizeof t, cudaMemcpyHostToDevice, s->ctx->stream));
    slab_clear(s);
    TRY(coll_barrier(c->shm));
    return settle_choice(c, cards);
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
        drop(c);
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
    CU(cudaHostGetDevicePointer((void **)&t.left, c->slab->left, 0));
    for (int r = 0; r < world; r++) t.slab[r] = c->slab->mem, t.from[r] = r;
    CU(cudaHostAlloc(&c->page, sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable));
    memset(c->page, 0, sizeof(uint32_t));
    c->word = (const uint32_t *)c->page;
    CU(cudaHostGetDevicePointer((void **)&t.abort_word, c->page, 0));
    CU(cudaMemcpyAsync(c->slab->table, &t, sizeof t, cudaMemcpyHostToDevice, ctx->stream));
    slab_clear(c->slab);
    *out = &c->base;
    return OK;
}
