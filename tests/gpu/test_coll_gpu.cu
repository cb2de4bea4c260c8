/* tests/gpu/test_coll_gpu.cu: the device collectives with 1, 2, 4 and 8 ranks on one GPU.
 *
 * Ranks as threads of one process run truly side by side and meet every interleaving; ranks as
 * processes take turns on the device, slowly, but map each other's memory as production does. The
 * parent never touches CUDA: each scenario runs in children of its own, watched by a clock.
 *
 *   test_coll_gpu [--only TEXT] [--ranks N] [--ranks-as threads|processes]
 *                 [--seconds N] [--limit N]
 *
 * N seconds for the replays of one scenario (6), and for a whole one until it is killed (60).
 *
 * Exit 0: all passed, 1: something failed, 77: no GPU. Each line names its scenario; a failure
 * prints expected, found and the seed.
 */
#include <csignal>
#include <dirent.h>
#include <execinfo.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "tests/gpu/coll_rank.cuh"
#include "worker/coll_host.h"
#include "worker/coll_mix.h"
#include "worker/coll_nccl.h"
#include "worker/coll_open.h"

extern "C" {
#include "proto/log.h"
}

void cuda_fatal(const char *what, const char *error, const char *file, int line) {
    fprintf(stderr, "cuda: %s: %s (%s:%d)\n", what, error, file, line);
    fflush(stderr);
    _exit(1);
}

static double replay_seconds = 6, limit_seconds = 60;

/* ---- scenarios ------------------------------------------------------------------------------- */

static bool random_operations(struct rank *k) {
    if (!open_generation(k, 0)) return false;
    for (int round = 0; round < 200; round++)
        if (!some_operation(k, round, FLOATS_MAX)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    close_rank(k);
    return true;
}

/* A short stretch, for the counter near its ends. */
static bool some_operations(struct rank *k) {
    if (!open_generation(k, 0)) return false;
    for (int round = 0; round < 120; round++)
        if (!some_operation(k, round, 30000)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    close_rank(k);
    return true;
}

/* Up to 1000 replays in batches, until rank 0 says that the time is up: processes take turns. */
static bool graph_replays(struct rank *k) {
    if (!open_generation(k, 0)) return false;
    cudaGraphExec_t exec = capture_chain(k);
    double start = now();
    int replays = 0;
    for (bool more = true; more;) {
        for (int i = 0; i < (k->s->threads ? 50 : 10); i++, replays++)
            CU(cudaGraphLaunch(exec, k->ctx.stream));
        if (k->rank == 0) k->board->go = replays < 1000 && now() - start < replay_seconds;
        EXPECT(k, coll_barrier(k->c) == OK);
        more = k->board->go;
        EXPECT(k, coll_barrier(k->c) == OK);
    }
    if (!sync_and_count(k, "graph replays", (uint64_t)replays, 0)) return false;
    if (k->rank == 0)
        snprintf(k->board->note, sizeof k->board->note, "%d replays of %zu sums", replays,
                 sizeof chain_sizes / sizeof chain_sizes[0]);
    CU(cudaGraphExecDestroy(exec));
    close_rank(k);
    return true;
}

/* A rank comes late to each first sum of a replay, by far more than sums take; another each time.
 */
static bool late_ranks(struct rank *k) {
    if (!open_generation(k, 0)) return false;
    cudaGraphExec_t exec = capture_chain(k);
    for (int i = 0; i < 3 * k->world; i++) {
        const bool late = i % k->world == k->rank;
        if (late && i % 2) usleep(20000);
        if (late && !(i % 2)) launch(&k->ctx, occupy, 1, 32, 0, (uint64_t)20000000);
        CU(cudaGraphLaunch(exec, k->ctx.stream));
        /* threads share a context, which a launch into a full queue locks for the late one too */
        CU(cudaStreamSynchronize(k->ctx.stream));
    }
    if (!sync_and_count(k, "late ranks", (uint64_t)(3 * k->world), 0)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    CU(cudaGraphExecDestroy(exec));
    close_rank(k);
    return true;
}

struct occupier {
    const uint32_t *word;
    cudaStream_t stream;
    int blocks;
};

/* Takes the device away for seconds as soon as the probe has begun, which the barriers counted in
 * the abort word tell: cards, mappings, clean flags, and the probe's own. */
static void *occupy_probe(void *arg) {
    struct occupier *o = (struct occupier *)arg;
    CU(cudaSetDevice(0));
    while (__atomic_load_n(o->word, __ATOMIC_ACQUIRE) >> 1 < 4) usleep(20);
    occupy<<<o->blocks, 1024, 0, o->stream>>>(UINT64_C(4000000000));
    return NULL;
}

/* One rank's device does other work for seconds, as if its link hung: the first start says so and
 * ends, and the next one finds a device that is free. */
static bool stuck_start(struct rank *k) {
    struct err_text err = {};
    struct coll *shm;
    struct occupier o = {NULL, NULL, 2 * k->ctx.prop.multiProcessorCount};
    pthread_t thread;
    const bool last = k->rank == k->world - 1;
    double begin = now();
    CU(cudaStreamCreateWithFlags(&o.stream, cudaStreamNonBlocking));
    if (open_shm(k, 0, &shm, &err) < 0 ||
        ipc_slab_new(&k->slab, &k->ctx, k->rank, k->world, &k->s->options, &err) < 0)
        return failed(k, "expected to open, found: %s", err.text);
    o.word = coll_shm_word(shm);
    if (last) pthread_create(&thread, NULL, occupy_probe, &o);
    int rc = coll_open_ipc(&k->c, k->slab, shm, &err);
    if (last) pthread_join(thread, NULL);
    if (rc != ERR_ABORTED && !(rc == ERR_SETUP && strstr(err.text, "octavo doctor")))
        return failed(k, "expected to be told of it, found %s: %s", err_name(rc), err.text);
    if (rc == ERR_SETUP) k->board->ready++;
    EXPECT(k, (*coll_shm_word(shm) & 1) != 0);
    coll_close(shm);
    CU(cudaStreamSynchronize(o.stream));
    if (!open_generation(k, 1)) return false;
    EXPECT(k, k->board->ready > 0);
    for (int round = 0; round < 5; round++)
        if (!some_operation(k, round, 30000)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    if (k->rank == 0)
        snprintf(k->board->note, sizeof k->board->note, "given up and begun again in %.1f s",
                 now() - begin);
    close_rank(k);
    return true;
}

/* Captured on one stream, replayed on two, with direct calls on either between them. */
static bool two_streams(struct rank *k) {
    if (!open_generation(k, 0)) return false;
    cudaGraphExec_t exec = capture_chain(k);
    cudaStream_t stream[2] = {k->ctx.stream};
    cudaEvent_t done;
    CU(cudaStreamCreateWithFlags(&stream[1], cudaStreamNonBlocking));
    CU(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    for (int i = 0; i < 40; i++) {
        cudaStream_t s = stream[mix(k->seed + (uint64_t)i) % 2];
        if (i) CU(cudaStreamWaitEvent(s, done, 0));
        k->ctx.stream = s;
        if (i % 3 == 2)
            queue_chain(k, false, (uint64_t)(100000 + 10 * i));
        else
            CU(cudaGraphLaunch(exec, s));
        CU(cudaEventRecord(done, s));
    }
    CU(cudaDeviceSynchronize());
    k->ctx.stream = stream[0];
    if (!sync_and_count(k, "two streams", 40, 0)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    CU(cudaGraphExecDestroy(exec));
    close_rank(k);
    return true;
}

/* The last rank stays away; its "control thread" aborts. */
static bool abort_while_a_peer_is_missing(struct rank *k) {
    if (!open_generation(k, 0)) return false;
    if (!some_operation(k, 1, 1000)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    if (k->rank == k->world - 1) {
        while (k->board->ready < k->world - 1) usleep(1000);
        usleep(200000);
        k->board->seconds = now();
        coll_abort(k->c);
    } else {
        for (int i = 0; i < 20; i++) queue_chain(k, false, 0);
        k->board->ready++;
        CU(cudaStreamSynchronize(k->ctx.stream));
        double took = now() - k->board->seconds;
        EXPECT(k, k->board->seconds > 0);
        if (took > 10) return failed(k, "expected to be free within 10 s, found %.2f", took);
        if (k->rank == 0)
            snprintf(k->board->note, sizeof k->board->note, "%.0f ms to drain 140 sums",
                     took * 1e3);
    }
    EXPECT(k, coll_check(k->c) == (k->rank == k->world - 1 ? OK : ERR_ABORTED));
    EXPECT(k, coll_all_reduce(k->c, k->x, 100) == ERR_ABORTED);
    EXPECT(k, coll_all_gather(k->c, k->x, k->all, 16) == ERR_ABORTED);
    EXPECT(k, coll_broadcast(k->c, k->x, 16, 0) == ERR_ABORTED);
    EXPECT(k, coll_barrier(k->c) == ERR_ABORTED);
    CU(cudaMemsetAsync(k->bad, 0, 4, k->ctx.stream)); /* what was interrupted is rubbish */
    coll_close(k->c);
    k->c = NULL;
    if (!open_generation(k, 1)) return false;
    for (int round = 0; round < 10; round++)
        if (!some_operation(k, round, 30000)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    close_rank(k);
    return true;
}

/* One process dies in the middle of a chain; the others abort, open the next generation with a new
 * process in its place, and go on with the graphs they have. */
static bool rejoin_after_kill(struct rank *k) {
    bool victim = k->rank == k->s->kill_rank - 1;
    cudaGraphExec_t exec = NULL;
    if (!k->newborn) {
        if (!open_generation(k, 0)) return false;
        exec = capture_chain(k);
        CU(cudaGraphLaunch(exec, k->ctx.stream));
        CU(cudaStreamSynchronize(k->ctx.stream));
        EXPECT(k, coll_barrier(k->c) == OK);
        CU(cudaGraphLaunch(exec, k->ctx.stream));
        if (victim) raise(SIGKILL);
        CU(cudaGraphLaunch(exec, k->ctx.stream));
        while (!k->board->phase) usleep(1000); /* the parent has seen the death */
        if (k->rank == 0) coll_abort(k->c);
        CU(cudaStreamSynchronize(k->ctx.stream));
        EXPECT(k, coll_check(k->c) == ERR_ABORTED);
        coll_close(k->c);
        k->c = NULL;
    }
    uint32_t clean[2] = {0, 0};
    CU(cudaMemcpyAsync(k->bad, clean, sizeof clean, cudaMemcpyHostToDevice, k->ctx.stream));
    if (!open_generation(k, 1)) return false;
    for (int i = 0; i < 5; i++) {
        if (exec)
            CU(cudaGraphLaunch(exec, k->ctx.stream));
        else
            queue_chain(k, true, 0);
    }
    if (!sync_and_count(k, "after the rejoin", 5, 0)) return false;
    for (int round = 0; round < 10; round++)
        if (!some_operation(k, round, 30000)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    close_rank(k);
    return true;
}

/* A new generation keeps the slab: same address, no memory lost. */
static bool generations(struct rank *k) {
    size_t before = 0, after = 0, total;
    for (int g = 0; g < GENERATIONS; g++) {
        if (!open_generation(k, g)) return false;
        for (int round = 0; round < 5; round++)
            if (!some_operation(k, round, 10000)) return false;
        EXPECT(k, coll_barrier(k->c) == OK);
        coll_close(k->c);
        k->c = NULL;
        CU(cudaMemGetInfo(&after, &total));
        if (g == 1) before = after;
    }
    EXPECT(k, after + (4 << 20) > before); /* a slab a generation would be more */
    close_rank(k);
    return true;
}

/* ---- through the host, and NCCL alone -------------------------------------------------------- */

static void table_get(struct kctx *c, void *dst, const void *src, size_t bytes) {
    CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, c->stream));
    CU(cudaStreamSynchronize(c->stream));
}
static void table_put(struct kctx *c, dptr dst, const void *src, size_t bytes) {
    CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, c->stream));
}

static bool through_the_host(struct rank *k) {
    struct err_text err = {};
    struct coll *shm;
    struct kernels table = {};
    table.get = table_get, table.put = table_put;
    if (open_shm(k, 0, &shm, &err) < 0 || coll_open_host(&k->c, &table, &k->ctx, shm, &err) < 0)
        return failed(k, "expected to open, found: %s", err.text);
    for (int round = 0; round < 60; round++)
        if (!some_operation(k, round, 1 << 20)) return false;
    EXPECT(k, coll_barrier(k->c) == OK);
    close_rank(k);
    return true;
}

/* Two ways at once on one stream: a large one that waits on the host, with a barrier of its own. */
static bool small_and_large_ways(struct rank *k) {
    struct err_text err = {};
    struct coll *shm, *host, *ipc;
    struct kernels table = {};
    table.get = table_get, table.put = table_put;
    if (!open_generation(k, 0)) return false;
    ipc = k->c;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", k->fd[1]);
    if (coll_open_shm(&shm, path, k->shm_bytes, k->rank, k->world, ipc->generation, &err) < 0 ||
        coll_open_host(&host, &table, &k->ctx, shm, &err) < 0 ||
        coll_open_mix(&k->c, ipc, host, 64 << 10, &k->ctx.capturing, &err) < 0)
        return failed(k, "expected to open, found: %s", err.text);
    EXPECT(k, strcmp(k->c->ops->name, "ipc+shm") == 0 && !k->c->ops->in_graphs);
    for (int round = 0; round < 60; round++)
        if (!some_operation(k, round, 300000)) return false;
    EXPECT(k, coll_barrier(k->c) == OK && coll_check(k->c) == OK);
    close_rank(k);
    return true;
}

/* --collective, as a worker uses it. */
static bool names(struct rank *k) {
    static const char *const asked[] = {"ipc", "shm", "auto"}, *const given[] = {"ipc", "shm",
                                                                                 "ipc"};
    struct kernels table = {};
    table.get = table_get, table.put = table_put;
    for (int g = 0; g < 3; g++) {
        struct err_text err = {};
        struct coll_maker *maker;
        struct coll *shm;
        if (coll_maker_new(&maker, &table, &k->ctx, k->rank, k->world, asked[g], &err) < 0 ||
            open_shm(k, g, &shm, &err) < 0 ||
            coll_maker_open(&k->c, maker, shm, (uint32_t)g + 1, &err) < 0)
            return failed(k, "%s: expected to open, found: %s", asked[g], err.text);
        EXPECT(k, strcmp(k->c->ops->name, given[g]) == 0);
        EXPECT(k, k->c->generation == (uint32_t)g + 1);
        for (int round = 0; round < 10; round++)
            if (!some_operation(k, round, 30000)) return false;
        EXPECT(k, coll_barrier(k->c) == OK);
        coll_close(k->c);
        k->c = NULL;
        coll_maker_free(maker);
    }
    return true;
}

static bool nccl_alone(struct rank *k) {
    struct err_text err = {};
    struct nccl *lib;
    if (nccl_load(&lib, &err) < 0) return failed(k, "%s", err.text);
    for (uint32_t g = 1; g <= 3; g++) {
        const struct nccl_device device = {k->ctx.stream, &k->ctx.capturing, NULL, NULL, false, 0};
        if (coll_open_nccl(&k->c, lib, &device, NULL, 0, 1, g, &err) < 0)
            return failed(k, "generation %u: %s", g, err.text);
        cudaGraphExec_t exec = capture_chain(k);
        for (int i = 0; i < 20; i++) CU(cudaGraphLaunch(exec, k->ctx.stream));
        if (!sync_and_count(k, "nccl", g, 0)) return false;
        CU(cudaGraphExecDestroy(exec));
        EXPECT(k, coll_all_gather(k->c, k->x, k->all, 4000) == OK);
        EXPECT(k, coll_broadcast(k->c, k->x, 4000, 0) == OK);
        CU(cudaStreamSynchronize(k->ctx.stream));
        EXPECT(k, coll_check(k->c) == OK);
        if (g > 1) {
            coll_abort(k->c);
            EXPECT(k, coll_check(k->c) == ERR_ABORTED);
            EXPECT(k, coll_all_reduce(k->c, k->x, 10) == ERR_ABORTED);
        }
        coll_close(k->c);
        k->c = NULL;
    }
    snprintf(k->board->note, sizeof k->board->note, "NCCL %s, three generations, two aborted",
             nccl_version(lib));
    return true;
}

/* ---- times ----------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median microseconds of one sum in a graph of 50. */
static double time_sums(struct rank *k, int64_t n, int replays) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    std::vector<double> us;
    CU(cudaStreamBeginCapture(k->ctx.stream, cudaStreamCaptureModeThreadLocal));
    k->ctx.capturing = true;
    for (int i = 0; i < 50; i++) coll_all_reduce(k->c, k->x, n);
    k->ctx.capturing = false;
    CU(cudaStreamEndCapture(k->ctx.stream, &graph));
    CU(cudaGraphInstantiate(&exec, graph, 0));
    CU(cudaGraphDestroy(graph));
    CU(cudaEventCreate(&from));
    CU(cudaEventCreate(&to));
    for (int i = 0; i < replays + 3; i++) {
        float ms;
        CU(cudaMemsetAsync(k->x, 0, (size_t)n * 4, k->ctx.stream));
        CU(cudaEventRecord(from, k->ctx.stream));
        CU(cudaGraphLaunch(exec, k->ctx.stream));
        CU(cudaEventRecord(to, k->ctx.stream));
        CU(cudaStreamSynchronize(k->ctx.stream));
        CU(cudaEventElapsedTime(&ms, from, to));
        if (i >= 3) us.push_back((double)ms * 1000 / 50);
    }
    qsort(us.data(), us.size(), sizeof us[0], by_value);
    CU(cudaEventDestroy(from));
    CU(cudaEventDestroy(to));
    CU(cudaGraphExecDestroy(exec));
    return us[us.size() / 2];
}

static const int64_t table_bytes[] = {4 << 10,  8 << 10,   16 << 10,  24 << 10,  48 << 10,
                                      96 << 10, 192 << 10, 384 << 10, 768 << 10, 1 << 20};

static bool loopback_table(struct rank *k) {
    struct err_text err = {};
    printf("loop-back, one rank as 8, microseconds per all-reduce in a graph of 50\n%10s", "bytes");
    for (int a = IPC_PACKETS; a < IPC_ALGORITHMS; a++)
        printf("%10s", ipc_algorithm_name((enum ipc_algorithm)a));
    printf("\n");
    for (size_t s = 0; s < sizeof table_bytes / sizeof table_bytes[0]; s++) {
        printf("%10lld", (long long)table_bytes[s]);
        for (int a = IPC_PACKETS; a < IPC_ALGORITHMS; a++) {
            struct ipc_options o = {};
            o.algorithm = (enum ipc_algorithm)a;
            if (coll_open_loopback(&k->c, &k->ctx, 8, &o, &err) < 0)
                return failed(k, "%s", err.text);
            printf("%10.2f", time_sums(k, table_bytes[s] / 4, 20));
            EXPECT(k, coll_check(k->c) == OK);
            coll_close(k->c);
            k->c = NULL;
        }
        printf("\n");
        fflush(stdout);
    }
    return true;
}

/* One-shot sums of a rank that plays eight are eight times its own. */
static bool loopback_sums(struct rank *k) {
    struct err_text err = {};
    for (int a = IPC_PACKETS; a <= IPC_ONE_PULL; a++) {
        struct ipc_options o = {};
        o.algorithm = (enum ipc_algorithm)a;
        if (coll_open_loopback(&k->c, &k->ctx, 8, &o, &err) < 0) return failed(k, "%s", err.text);
        for (int64_t n = 1; n < 200000; n = n * 7 + 3) {
            std::vector<float> h((size_t)n);
            fill<<<16, 256, 0, k->ctx.stream>>>(k->x, n, k->seed, 5, NULL, 0);
            EXPECT(k, coll_all_reduce(k->c, k->x, n) == OK);
            CU(cudaMemcpyAsync(h.data(), k->x, (size_t)n * 4, cudaMemcpyDeviceToHost,
                               k->ctx.stream));
            CU(cudaStreamSynchronize(k->ctx.stream));
            for (int64_t i = 0; i < n; i++) {
                float v = value(k->seed, 5, 0, i), want = v;
                for (int r = 1; r < 8; r++) want += v;
                if (want != h[(size_t)i])
                    return failed(k, "%s element %lld of %lld: expected %a, found %a",
                                  ipc_algorithm_name(o.algorithm), (long long)i, (long long)n, want,
                                  h[(size_t)i]);
            }
        }
        coll_close(k->c);
        k->c = NULL;
    }
    return true;
}

/* Eight ranks as threads on one device: every flag crosses streams, but not a wire. */
static bool threads_table(struct rank *k) {
    if (!open_generation(k, 0)) return false;
    for (size_t s = 2; s < sizeof table_bytes / sizeof table_bytes[0]; s++) {
        EXPECT(k, coll_barrier(k->c) == OK);
        double us = time_sums(k, table_bytes[s] / 4, 20);
        if (k->rank == 0)
            printf("  %d ranks on one device, %s: %8lld bytes %8.2f us\n", k->world,
                   ipc_algorithm_name(k->s->options.algorithm), (long long)table_bytes[s], us);
    }
    EXPECT(k, coll_barrier(k->c) == OK);
    close_rank(k);
    return true;
}

/* ---- running --------------------------------------------------------------------------------- */

static void *thread_main(void *arg) {
    struct rank *k = (struct rank *)arg;
    CU(cudaSetDevice(0));
    if (!k->s->body(k) && !k->board->failure[k->rank][0]) failed(k, "failed");
    if (k->board->failure[k->rank][0] && k->c) coll_abort(k->c);
    return NULL;
}

static void child_threads(struct rank *ranks, int world) {
    pthread_t thread[RANKS_MAX];
    for (int r = 0; r < world; r++) open_device(&ranks[r]);
    for (int r = 0; r < world; r++) pthread_create(&thread[r], NULL, thread_main, &ranks[r]);
    for (int r = 0; r < world; r++) pthread_join(thread[r], NULL);
}

/* Where every thread of a process that is to be killed stands; addresses are the program's. */
static void say_where(int) {
    void *at[24];
    int n = backtrace(at, 24);
    backtrace_symbols_fd(at, n, 2);
    if (write(2, "\n", 1) < 0) return;
}

static void ask_where(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        fprintf(stderr, "thread %s:\n", e->d_name);
        syscall(SYS_tgkill, pid, atoi(e->d_name), SIGUSR1);
        usleep(20000);
    }
    if (d) closedir(d);
}

static pid_t start(struct rank *ranks, int world, bool threads) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid) return pid;
    char who[32];
    snprintf(who, sizeof who, "worker/%d", ranks->rank);
    log_init(who, ranks->s->talks ? LOG_INFO : LOG_WARN, NULL);
    signal(SIGUSR1, say_where);
    if (threads) {
        child_threads(ranks, world);
    } else {
        open_device(ranks);
        thread_main(ranks);
    }
    bool bad = false;
    for (int r = 0; r < world; r++) bad |= ranks[r].board->failure[ranks[r].rank][0] != 0;
    fflush(stdout);
    _exit(bad);
}

/* Waits for one child; a scenario that takes too long is killed and has failed. */
static int wait_for(pid_t pid, double until, bool *late) {
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (now() > until) {
            *late = true;
            ask_where(pid);
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            break;
        }
        usleep(2000);
    }
    return status;
}

static bool run(const struct scenario *s, uint64_t seed) {
    struct rank ranks[RANKS_MAX] = {};
    struct board *board = (struct board *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pid[RANKS_MAX] = {};
    uint64_t bytes = coll_shm_bytes(MAX(s->world, 2), 1 << 20);
    bool ok = true, late = false;
    double begin = now(), until = begin + limit_seconds;
    for (int g = 0; g < GENERATIONS; g++) {
        int fd = memfd_create("coll", 0);
        if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) abort();
        for (int r = 0; r < s->world; r++) ranks[r].fd[g] = fd;
    }
    for (int r = 0; r < s->world; r++) {
        ranks[r].s = s, ranks[r].board = board, ranks[r].rank = r, ranks[r].world = s->world;
        ranks[r].shm_bytes = bytes, ranks[r].seed = seed;
    }
    int children = s->threads ? 1 : s->world;
    for (int r = 0; r < children; r++)
        pid[r] = start(&ranks[r], s->threads ? s->world : 1, s->threads);
    if (s->kill_rank) {
        int v = s->kill_rank - 1, status = wait_for(pid[v], until, &late);
        ok &= WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        board->phase = 1;
        ranks[v].newborn = true;
        pid[v] = start(&ranks[v], 1, false);
    }
    for (int r = 0; r < children; r++) ok &= wait_for(pid[r], until, &late) == 0;
    for (int r = 0; r < s->world; r++) ok &= !board->failure[r][0];
    for (int g = 0; g < GENERATIONS; g++) close(ranks[0].fd[g]);
    printf("%s %-40s %d %s %s %5.1f s %s%s\n", ok ? "PASS" : "FAIL", s->name, s->world,
           s->threads ? "threads  " : "processes", ipc_algorithm_name(s->options.algorithm),
           now() - begin, board->note, late ? " (killed: too late)" : "");
    for (int r = 0; r < s->world; r++) {
        if (board->failure[r][0]) printf("     %s\n", board->failure[r]);
        if (late) printf("     rank %d was in round %d\n", r, (int)board->at[r]);
    }
    fflush(stdout);
    munmap(board, sizeof *board);
    return ok;
}

static struct scenario plain(const char *name, bool (*body)(struct rank *), int world, bool threads,
                             enum ipc_algorithm a, uint32_t first_epoch) {
    struct scenario s = {};
    s.name = name, s.body = body, s.world = world, s.threads = threads;
    s.options.algorithm = a;
    s.options.first_epoch = first_epoch;
    return s;
}

/* Each hazard that others met has a scenario of its name. */
static std::vector<struct scenario> all_scenarios(void) {
    std::vector<struct scenario> v;
    v.push_back(plain("loopback_sums", loopback_sums, 1, true, IPC_AUTO, 0));
    for (int w = 2; w <= 8; w *= 2)
        v.push_back(plain("random_operations", random_operations, w, true, IPC_AUTO, 0));
    for (int a = IPC_PACKETS; a < IPC_ALGORITHMS; a++)
        v.push_back(
            plain("same_bits_on_all_ranks", random_operations, 8, true, (enum ipc_algorithm)a, 0));
    v.push_back(plain("random_operations", random_operations, 3, true, IPC_AUTO, 0));
    for (int a : {IPC_AUTO, IPC_PACKETS, IPC_TWO_PULL}) {
        v.push_back(plain("epochs_roll_over", some_operations, 4, true, (enum ipc_algorithm)a,
                          0xffffffffu - 60));
        v.push_back(plain("epochs_turn_negative", some_operations, 4, true, (enum ipc_algorithm)a,
                          0x7fffffffu - 60));
    }
    for (int w = 2; w <= 8; w *= 2)
        v.push_back(plain("graph_replays_reuse_buffers", graph_replays, w, true, IPC_AUTO,
                          0xffffffffu - 1000));
    v.push_back(plain("graph_replays_reuse_buffers", graph_replays, 8, true, IPC_ONE_PULL, 0));
    v.push_back(plain("graph_replays_reuse_buffers", graph_replays, 8, true, IPC_TWO_PULL, 0));
    v.push_back(plain("captured_on_one_stream_replayed_on_two", two_streams, 4, true, IPC_AUTO, 0));
    v.push_back(plain("slabs_stay_when_generations_change", generations, 4, true, IPC_AUTO, 0));
    v.push_back(plain("late_ranks_in_the_first_sum", late_ranks, 8, true, IPC_AUTO, 0));
    v.push_back(plain("probe_then_operations", some_operations, 8, true, IPC_AUTO, 0));
    v.back().options.probe_shared = v.back().talks = true;
    v.push_back(plain("probe_of_a_stuck_link_ends", stuck_start, 2, false, IPC_AUTO, 0));
    v.back().options.probe_shared = true;
    v.back().options.stuck_ms = 1500;
    v.push_back(plain("abort_while_a_peer_is_missing", abort_while_a_peer_is_missing, 4, true,
                      IPC_AUTO, 0));
    v.push_back(plain("through_the_host", through_the_host, 4, true, IPC_AUTO, 0));
    v.push_back(
        plain("small_sums_by_ipc_large_by_host", small_and_large_ways, 4, true, IPC_AUTO, 0));
    for (int w = 2; w <= 8; w *= 2) {
        v.push_back(plain("random_operations", random_operations, w, false, IPC_AUTO, 0));
        v.push_back(plain("graph_replays_reuse_buffers", graph_replays, w, false, IPC_AUTO, 0));
    }
    v.push_back(plain("late_ranks_in_the_first_sum", late_ranks, 4, false, IPC_AUTO, 0));
    v.push_back(plain("random_operations", random_operations, 4, false, IPC_ONE_PULL, 0));
    v.push_back(plain("random_operations", random_operations, 4, false, IPC_TWO_PULL, 0));
    v.push_back(plain("slabs_stay_when_generations_change", generations, 2, false, IPC_AUTO, 0));
    v.push_back(plain("names", names, 2, false, IPC_AUTO, 0));
    v.push_back(plain("through_the_host", through_the_host, 2, false, IPC_AUTO, 0));
    v.push_back(plain("abort_while_a_peer_is_missing", abort_while_a_peer_is_missing, 4, false,
                      IPC_AUTO, 0));
    for (int w = 2; w <= 8; w *= 2) {
        v.push_back(plain("rejoin_after_kill", rejoin_after_kill, w, false, IPC_AUTO, 0));
        v.back().kill_rank = w / 2 + 1;
    }
    v.push_back(plain("nccl_alone", nccl_alone, 1, true, IPC_AUTO, 0));
    v.push_back(plain("loopback_table", loopback_table, 1, true, IPC_AUTO, 0));
    for (int a = IPC_PACKETS; a < IPC_ALGORITHMS; a += a == IPC_PACKETS ? 1 : 2)
        v.push_back(plain("threads_table", threads_table, 8, true, (enum ipc_algorithm)a, 0));
    return v;
}

static bool have_gpu(void) {
    pid_t pid = fork();
    int status, n = 0;
    if (!pid) _exit(cudaGetDeviceCount(&n) == cudaSuccess && n > 0 ? 0 : 1);
    waitpid(pid, &status, 0);
    return status == 0;
}

int main(int argc, char **argv) {
    const char *only = "", *as = "";
    int bad = 0, ran = 0, ranks = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--only")) only = argv[i + 1];
        if (!strcmp(argv[i], "--ranks-as")) as = argv[i + 1];
        if (!strcmp(argv[i], "--ranks")) ranks = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--limit")) limit_seconds = atof(argv[i + 1]);
        if (!strcmp(argv[i], "--seconds")) replay_seconds = atof(argv[i + 1]);
    }
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    if (!have_gpu()) {
        printf("SKIP: no GPU\n");
        return 77;
    }
    for (const struct scenario &s : all_scenarios()) {
        if (ranks && s.world != ranks) continue;
        if (!strstr(s.name, only) || !strstr(s.threads ? "threads" : "processes", as)) continue;
        ran++;
        bad += !run(&s, 20261201);
    }
    printf("%s: %d scenarios, %d failed\n", bad ? "FAIL" : "PASS", ran, bad);
    return bad != 0;
}
