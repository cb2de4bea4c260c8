/* worker/coll_nccl.c: collectives through NCCL: large messages, devices that only it can connect.
 *
 * Owns: the library handle; per generation a communicator and the thread that watches for its
 * abort. Called by: coll_open; forward.c and step.c through struct coll; nccl_abort by any thread.
 * Fails how: ERR_ABORTED once the generation is aborted; an error of NCCL's own is logged once and
 * aborts the generation.  Limits: one host (shm carries the identity).
 * Tested by: tests/unit/test_coll_nccl.c (a stand-in library), tests/gpu/test_coll_gpu.cu
 *
 * Sums are not in rank order here: NCCL adds along its ring or tree. Every element is still summed
 * once, by one path, and handed out, so all ranks hold the same bits; they are not the bits of the
 * other collectives.
 *
 * The communicator is non-blocking, so no call into NCCL can hang. A kernel waiting for a dead peer
 * can, and only ncclCommAbort frees it; that call waits for the graphs that captured the
 * communicator, which the step thread can destroy only once it is free. Hence a thread per
 * communicator: it watches the generation's abort word, aborts, and is joined at close after the
 * graphs are gone. So an abort by any rank frees the kernels of all, and whoever aborts never
 * waits.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/log.h"
#include "worker/coll_nccl.h"
#include "worker/nccl_api.h"

#define WATCH_NS    2000000 /* between two looks at the abort word */
#define EAGER_LOOKS 200     /* at the state of a call, before naps between them */
#define TOLD_BYTES  (1 << 20)

struct nccl {
    void *handle;
    struct nccl_api api;
    char version[24];
    int told; /* file that NCCL tells its story to; -1: the operator has it told elsewhere */
};

struct coll_nccl {
    struct coll base;
    const struct nccl_api *api;
    struct nccl_device device;
    struct coll *shm;     /* NULL for one rank */
    const uint32_t *word; /* bit 0: aborted; the shared memory's or `alone` */
    uint32_t alone;
    pthread_mutex_t mutex;  /* calls on comm; abort takes it from them */
    struct nccl_comm *comm; /* NULL once aborted */
    bool captured;          /* graphs hold it */
    char transport[96];
    atomic_bool closing;
    pthread_t watcher;
};

/* Sensible on boxes whose devices meet on PCIe; elsewhere they do no harm. Multicast over NVLink
 * can take a whole box down with one process, so it stays off. Connections are made at the start,
 * where a link that hangs is noticed, and not by the first sum that takes that way. */
static const struct {
    const char *name, *value;
} defaults[] = {
    {"NCCL_P2P_LEVEL", "SYS"}, {"NCCL_PROTO", "LL,LL128,Simple"}, {"NCCL_NVLS_ENABLE", "0"},
    {"NCCL_IB_DISABLE", "1"},  {"NCCL_MIN_NCHANNELS", "8"},       {"NCCL_RUNTIME_CONNECT", "0"},
};

/* ---- the library ------------------------------------------------------------------------- */

bool nccl_peers_disabled(void) {
    const char *off = getenv("NCCL_P2P_DISABLE");
    return off && *off && strcmp(off, "0") != 0;
}

/* Which way its messages go NCCL says only in its log: unless the operator reads that, we do. */
static int listen_to(void) {
    char path[64];
    if (getenv("NCCL_DEBUG") || getenv("NCCL_DEBUG_FILE")) return -1;
    int fd = memfd_create("octavo-nccl-log", MFD_CLOEXEC);
    if (fd < 0) return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), fd);
    setenv("NCCL_DEBUG", "INFO", 1);
    setenv("NCCL_DEBUG_FILE", path, 1);
    return fd;
}

int nccl_load(struct nccl **out, struct err_text *err) {
    const char *name = getenv("OCTAVO_NCCL_LIBRARY");
    if (!name) name = "libnccl.so.2";
    for (size_t i = 0; i < ARRAY_LEN(defaults); i++)
        if (i > 0 || !nccl_peers_disabled()) setenv(defaults[i].name, defaults[i].value, 0);
    struct nccl *lib = calloc(1, sizeof *lib);
    if (!lib) return err_set(err, ERR_NOMEM, "collective nccl: expected memory, found none");
    lib->told = listen_to();
    lib->handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *missing = lib->handle ? NULL : dlerror();
    struct {
        const char *symbol;
        void *to;
    } want[] = {
        {"ncclGetVersion", &lib->api.get_version},
        {"ncclGetUniqueId", &lib->api.get_unique_id},
        {"ncclCommInitRankConfig", &lib->api.comm_init},
        {"ncclCommGetAsyncError", &lib->api.comm_error},
        {"ncclCommAbort", &lib->api.comm_abort},
        {"ncclAllReduce", &lib->api.all_reduce},
        {"ncclAllGather", &lib->api.all_gather},
        {"ncclBroadcast", &lib->api.broadcast},
        {"ncclGetErrorString", &lib->api.error_string},
    };
    for (size_t i = 0; !missing && i < ARRAY_LEN(want); i++) {
        void *p = dlsym(lib->handle, want[i].symbol);
        memcpy(want[i].to, &p, sizeof p);
        if (!p) missing = want[i].symbol;
    }
    if (missing) {
        err_set(err, ERR_NOT_FOUND, "collective nccl: %s: expected NCCL 2.14 or later, found: %s",
                name, missing);
        nccl_unload(lib);
        return ERR_NOT_FOUND;
    }
    int v = 0;
    lib->api.get_version(&v);
    snprintf(lib->version, sizeof lib->version, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    *out = lib;
    return OK;
}

void nccl_unload(struct nccl *lib) {
    if (!lib) return;
    if (lib->handle) dlclose(lib->handle);
    if (lib->told >= 0) {
        unsetenv("NCCL_DEBUG");
        unsetenv("NCCL_DEBUG_FILE");
        close(lib->told);
    }
    free(lib);
}

const char *nccl_version(const struct nccl *lib) {
    return lib->version;
}

/* ---- what it tells ----------------------------------------------------------------------- */

static off_t told_bytes(const struct nccl *lib) {
    struct stat st;
    return lib->told >= 0 && fstat(lib->told, &st) == 0 ? st.st_size : 0;
}

/* What follows each " via " of the log from `from` on, each word once: "P2P/IPC SHM/direct". */
static void read_transport(const struct nccl *lib, off_t from, char *out, size_t n) {
    static const char mark[] = " via ";
    char *text = lib->told >= 0 ? malloc(TOLD_BYTES + 1) : NULL;
    ssize_t got = text ? pread(lib->told, text, TOLD_BYTES, from) : -1;
    out[0] = 0;
    if (got > 0) text[got] = 0;
    for (const char *p = got > 0 ? text : NULL; p && (p = strstr(p, mark));) {
        char word[40];
        p += sizeof mark - 1;
        snprintf(word, sizeof word, "%.*s", (int)MIN(39, strcspn(p, " \n")), p);
        if (!strstr(out, word) && strlen(out) + strlen(word) + 2 < n)
            sprintf(out + strlen(out), "%s%s", out[0] ? " " : "", word);
    }
    free(text);
    if (!out[0]) snprintf(out, n, "%s", lib->told < 0 ? "see NCCL_DEBUG" : "none");
}

void coll_nccl_take_shm(struct coll *c) {
    ((struct coll_nccl *)c)->device.shm_stays = false;
}

const char *coll_nccl_transport(const struct coll *c) {
    return ((const struct coll_nccl *)c)->transport;
}

/* ---- operations -------------------------------------------------------------------------- */

static struct coll_nccl *nccl_of(struct coll *c) {
    return (struct coll_nccl *)c;
}

static bool aborted(const struct coll_nccl *c) {
    return (__atomic_load_n(c->word, __ATOMIC_ACQUIRE) & 1) != 0;
}

static void nap(long ns) {
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static void nccl_abort(struct coll *base) {
    struct coll_nccl *c = nccl_of(base);
    if (c->shm)
        coll_abort(c->shm);
    else
        __atomic_store_n(&c->alone, 1, __ATOMIC_RELEASE);
}

/* Looks at NCCL's state until it is done with what it was given, or the generation is aborted. */
static int settle(struct coll_nccl *c, int rc, int64_t patience_ns) {
    const long step = 100000;
    for (int looks = 0; rc == NCCL_IN_PROGRESS; looks++) {
        if (aborted(c)) return ERR_ABORTED;
        if (patience_ns <= 0) return ERR_TIMEOUT;
        if (looks < EAGER_LOOKS) {
            sched_yield(); /* to be queued takes microseconds, and every sum of a prompt waits here
                            */
        } else {
            nap(step);
            patience_ns -= step;
        }
        pthread_mutex_lock(&c->mutex);
        int state = NCCL_SUCCESS;
        rc = c->comm ? c->api->comm_error(c->comm, &state) : NCCL_SUCCESS;
        if (rc == NCCL_SUCCESS) rc = state;
        pthread_mutex_unlock(&c->mutex);
    }
    if (rc == NCCL_SUCCESS) return aborted(c) ? ERR_ABORTED : OK;
    if (!aborted(c))
        log_error("nccl", "generation=%u error=\"%s\"", c->base.generation,
                  c->api->error_string(rc));
    return ERR_SYS;
}

enum { RUN_SUM, RUN_GATHER, RUN_BROADCAST };

static int queue(struct coll_nccl *c, int what, const void *src, void *dst, int64_t count,
                 int root) {
    void *s = c->device.stream;
    switch (what) {
    case RUN_SUM:
        return c->api->all_reduce(src, dst, (size_t)count, NCCL_FLOAT32, NCCL_SUM, c->comm, s);
    case RUN_GATHER:
        return c->api->all_gather(src, dst, (size_t)count, NCCL_INT8, c->comm, s);
    default:
        return c->api->broadcast(src, dst, (size_t)count, NCCL_INT8, root, c->comm, s);
    }
}

/* Within a capture nothing may fail half way: an aborted generation leaves the operation out, and
 * its graphs are dropped with it. */
static int run(struct coll_nccl *c, int what, const void *src, void *dst, int64_t count, int root) {
    const bool capturing = c->device.capturing && *c->device.capturing;
    if (count <= 0 || (aborted(c) && capturing)) return OK;
    pthread_mutex_lock(&c->mutex);
    c->captured |= capturing;
    bool gone = aborted(c) || !c->comm;
    int rc = gone ? NCCL_SUCCESS : queue(c, what, src, dst, count, root);
    pthread_mutex_unlock(&c->mutex);
    rc = gone ? ERR_ABORTED : settle(c, rc, NCCL_START_SECONDS * INT64_C(1000000000));
    if (rc == OK) return OK;
    nccl_abort(&c->base);
    return capturing ? OK : ERR_ABORTED;
}

static int nccl_all_reduce(struct coll *c, float *x, int64_t n) {
    return run(nccl_of(c), RUN_SUM, x, x, n, 0);
}

static int nccl_all_gather(struct coll *c, const void *src, void *dst, int64_t bytes) {
    return run(nccl_of(c), RUN_GATHER, src, dst, bytes, 0);
}

static int nccl_broadcast(struct coll *c, void *x, int64_t bytes, int root) {
    return run(nccl_of(c), RUN_BROADCAST, x, x, bytes, root);
}

/* Of the hosts; what is queued on the devices is not waited for. */
static int nccl_barrier(struct coll *base) {
    struct coll_nccl *c = nccl_of(base);
    if (aborted(c)) return ERR_ABORTED;
    return c->shm ? coll_barrier(c->shm) : OK;
}

static int nccl_check(struct coll *base) {
    return aborted(nccl_of(base)) ? ERR_ABORTED : OK;
}

/* ---- life -------------------------------------------------------------------------------- */

static void abort_comm(struct coll_nccl *c) {
    pthread_mutex_lock(&c->mutex);
    struct nccl_comm *comm = c->comm;
    c->comm = NULL;
    pthread_mutex_unlock(&c->mutex);
    if (comm) c->api->comm_abort(comm);
}

static void *watch(void *arg) {
    struct coll_nccl *c = arg;
    while (!aborted(c) && !atomic_load(&c->closing)) nap(WATCH_NS);
    abort_comm(c);
    return NULL;
}

/* The graphs that hold it go first, or the abort waits for them. Closing without a preceding abort
 * uses abort as well: nothing is queued any more, and unlike destroy it never waits for a peer. */
static void nccl_close(struct coll *base) {
    struct coll_nccl *c = nccl_of(base);
    if (c->captured && c->device.drop_graphs) c->device.drop_graphs(c->device.user);
    atomic_store(&c->closing, true);
    pthread_join(c->watcher, NULL);
    pthread_mutex_destroy(&c->mutex);
    if (c->shm && !c->device.shm_stays) coll_close(c->shm);
    free(c);
}

static const struct coll_ops nccl_ops = {
    .name = "nccl",
    .in_graphs = true,
    .all_reduce = nccl_all_reduce,
    .all_gather = nccl_all_gather,
    .broadcast = nccl_broadcast,
    .barrier = nccl_barrier,
    .abort = nccl_abort,
    .close = nccl_close,
    .check = nccl_check,
};

/* Rank 0's identity for everybody, or everybody's refusal. */
static int share_identity(struct coll_nccl *c, struct nccl_id *id, struct err_text *err) {
    struct {
        struct nccl_id id;
        int rc;
    } mine, all[LIMIT_RANKS];
    memset(&mine, 0, sizeof mine);
    if (c->base.rank == 0) mine.rc = c->api->get_unique_id(&mine.id);
    if (c->shm)
        TRY(coll_all_gather(c->shm, &mine, all, sizeof mine));
    else
        all[0] = mine;
    *id = all[0].id;
    if (all[0].rc == NCCL_SUCCESS) return OK;
    return err_set(err, ERR_SETUP, "collective nccl: expected an identity from rank 0, found: %s",
                   c->api->error_string(all[0].rc));
}

static int start(struct coll_nccl *c, struct err_text *err) {
    struct nccl_id id;
    struct nccl_config config = {sizeof config, NCCL_MAGIC, NCCL_CONFIG_OF, 0};
    TRY(share_identity(c, &id, err));
    int rc = c->api->comm_init(&c->comm, c->base.world, id, c->base.rank, &config);
    const int patience_s = c->device.patience_s ? c->device.patience_s : NCCL_START_SECONDS;
    rc = settle(c, rc, patience_s * INT64_C(1000000000));
    /* all or none: a rank that failed must not leave the others waiting in their first sum */
    int32_t mine = rc, all[LIMIT_RANKS];
    if (c->shm && rc != ERR_ABORTED) TRY(coll_all_gather(c->shm, &mine, all, sizeof mine));
    for (int r = 0; c->shm && rc == OK && r < c->base.world; r++)
        if (all[r] < 0) rc = all[r];
    if (rc < 0 && rc != ERR_ABORTED)
        err_set(err, rc = ERR_SETUP,
                "collective nccl: rank %d of %d: expected a communicator, found an error or none "
                "within %d s",
                c->base.rank, c->base.world, patience_s);
    return rc;
}

int coll_open_nccl(struct coll **out, const struct nccl *lib, const struct nccl_device *device,
                   struct coll *shm, int rank, int world, uint32_t generation,
                   struct err_text *err) {
    assert((world == 1) == !shm && world <= LIMIT_RANKS);
    struct coll_nccl *c = calloc(1, sizeof *c);
    if (!c) return err_set(err, ERR_NOMEM, "collective nccl: expected memory, found none");
    c->base =
        (struct coll){.ops = &nccl_ops, .rank = rank, .world = world, .generation = generation};
    c->api = &lib->api;
    c->device = *device;
    c->shm = shm;
    c->word = shm ? coll_shm_word(shm) : &c->alone;
    pthread_mutex_init(&c->mutex, NULL);
    const off_t from = told_bytes(lib);
    int rc = start(c, err);
    read_transport(lib, from, c->transport, sizeof c->transport);
    if (rc == ERR_ABORTED) err_set(err, rc, "collective nccl: aborted while starting");
    if (rc == OK && pthread_create(&c->watcher, NULL, watch, c) != 0)
        rc = err_set(err, ERR_SYS, "collective nccl: expected a thread, found none");
    if (rc < 0) {
        abort_comm(c);
        pthread_mutex_destroy(&c->mutex);
        free(c);
        return rc;
    }
    if (rank == 0)
        log_info("collective",
                 "name=nccl generation=%u wire=f32 version=%s order=ring_or_tree transport=\"%s\"",
                 generation, lib->version, c->transport);
    *out = &c->base;
    return OK;
}
