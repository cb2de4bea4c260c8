/* worker/coll_ipc.cu: collectives over CUDA IPC: the slab, the launches, the end of a generation.
 *
 * Owns: the slab, its table.
 * Called by: coll_open_cuda.cu; forward.c and step.c through struct coll; abort by any thread.
 * Fails how: ERR_ABORTED once the generation is aborted: by the call, or by check after a wait.
 * Limits: IPC_RANKS ranks, one host.  Tested by: tests/gpu/test_coll_gpu.cu
 *
 * The slab is allocated once with plain cudaMalloc, since a mapping of memory that an allocator may
 * move breaks. The abort word is the host barrier's own, whose page is registered with the device,
 * so that whoever aborts the one aborts the other, dead devices or not.
 */
#include <cerrno>
#include <cstring>
#include <ctime>
#include <unistd.h>

#include "worker/coll_ipc_state.cuh"

extern "C" {
#include "proto/log.h"
}

#define IPC_CLOSE_US 2000000 /* patience with queued work at close, then it is aborted */

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
    size_t bytes = ipc_slab_bytes(world) + IPC_SCRATCH_BYTES;
    cudaError_t e = s ? cudaMalloc((void **)&s->mem, bytes) : cudaErrorMemoryAllocation;
    if (e == cudaSuccess) e = cudaMalloc((void **)&s->table, sizeof *s->table);
    if (e == cudaSuccess)
        e = cudaHostAlloc((void **)&s->words, sizeof *s->words, cudaHostAllocMapped);
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
    s->blocks = s->options.blocks;
    s->scratch = (float *)(s->mem + ipc_slab_bytes(world));
    CU(cudaEventCreate(&s->from));
    CU(cudaEventCreate(&s->to));
    s->choice = ipc_choice_default();
    prepare_kernels(world);
    *out = s;
    return OK;
}

void ipc_slab_free(struct ipc_slab *s) {
    if (!s) return;
    CU(cudaStreamSynchronize(s->ctx->stream));
    CU(cudaEventDestroy(s->from));
    CU(cudaEventDestroy(s->to));
    CU(cudaFree(s->mem));
    CU(cudaFree(s->table));
    CU(cudaFreeHost(s->words));
    free(s);
}

void ipc_words_show(const struct ipc_slab *s, struct ipc_table *t) {
    struct ipc_slab::ipc_words *w;
    CU(cudaHostGetDevicePointer((void **)&w, s->words, 0));
    t->left = &w->left;
    t->waited = &w->waited;
}

/* Flags and packets as if exchange first_epoch had just been done. */
void ipc_slab_clear(struct ipc_slab *s) {
    cudaStream_t stream = s->ctx->stream;
    __atomic_store_n(&s->words->left, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&s->words->waited, 0, __ATOMIC_RELEASE);
    size_t packets = (size_t)IPC_BLOCKS * 2 * s->world * IPC_LL_BYTES;
    uint32_t head[2 * IPC_BLOCKS * IPC_LINE];
    for (size_t i = 0; i < sizeof head / sizeof head[0]; i++) head[i] = s->options.first_epoch;
    CU(cudaMemsetAsync(s->mem + IPC_HEAD_BYTES, 0, packets, stream));
    CU(cudaMemcpyAsync(s->mem, head, sizeof head, cudaMemcpyHostToDevice, stream));
    CU(cudaStreamSynchronize(stream));
}

/* ---- launches -------------------------------------------------------------------------------- */

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
    if (*grid > s->blocks) *grid = s->blocks;
    int64_t each = ceil_div(ceil_div(items, *grid), 32) * 32;
    *block = (int)(each > threads_max ? threads_max : each);
}

void ipc_reduce_by(struct coll_ipc *c, int algorithm, float *x, int64_t n) {
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
    if (n > 0) ipc_reduce_by(c, choose(c->slab, n * (int64_t)sizeof *x), x, n);
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
    struct coll_ipc *c = (struct coll_ipc *)base;
    const uint64_t waited_ns = __atomic_load_n(&c->slab->words->waited, __ATOMIC_ACQUIRE);
    base->wait_us += (waited_ns - c->told_ns) / 1000;
    c->told_ns += (waited_ns - c->told_ns) / 1000 * 1000;
    return __atomic_load_n(&c->slab->words->left, __ATOMIC_ACQUIRE) ? ERR_ABORTED : OK;
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

bool ipc_wait(struct coll_ipc *c, uint64_t limit_us) {
    uint64_t start = now_us();
    cudaError_t e;
    while ((e = cudaStreamQuery(ctx_of(c)->stream)) == cudaErrorNotReady &&
           now_us() - start < limit_us)
        usleep(100);
    return e != cudaErrorNotReady;
}

/* A peer that died without an abort would keep a kernel waiting. */
static void wait_or_abort(struct coll_ipc *c) {
    if (!ipc_wait(c, IPC_CLOSE_US)) {
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
void ipc_drop(struct coll_ipc *c) {
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
    ipc_drop(c);
    if (shm) coll_close(shm);
    free(c);
}

const struct coll_ops *ipc_ops(bool loopback) {
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
