/* kernels/cuda/context.cu: the CUDA backend as a table: its life, its memory, its graphs.
 *
 * Owns: struct kctx, its stream, its workspace and its captured graphs.
 * Called by: worker/ through kernels_table().
 * Fails how: open returns NULL with a sentence; alloc returns NULL; any other CUDA error prints
 * expression, file and line and ends the process with status 1.
 * Limits: GRAPHS_MAX captured graphs, K_GRAPHS_LATER of them not prepared at the start; further keys
 * run uncaptured.  Tested by: tests/gpu/check_ops.c
 *
 * open looks for a kernel image before anything else is done with the device: a build for another
 * generation of cards is the likeliest mistake, and it should be told before weights are read.
 */
#include <cstring>
#include <unistd.h>

#include "kernels/cuda/later.cuh"

void cuda_fatal(const char *what, const char *error, const char *file, int line) {
    fprintf(stderr, "cuda: %s: %s (%s:%d)\n", what, error, file, line);
    fflush(stderr);
    _exit(1);
}

enum { SWITCH_CACHE, SWITCH_PDL, SWITCHES };

static struct kswitch switches[SWITCHES] = {
    {"cuda-cache", "Element type of the latent and index caches.", {"f16", "f32"}, 0},
    {"cuda-pdl", "Each kernel may start while the one before it ends.", {"on", "off"}, 0},
};

bool cuda_cache_f32(void) { return switches[SWITCH_CACHE].chosen == 1; }

static __global__ void probe_kernel(int *x) { *x = 1; }

/* A workspace that has become too small is kept until close: captured graphs point at it. */
void *cuda_work(struct kctx *c, size_t bytes) {
    if (c->measuring) {
        if (bytes > c->work_need) c->work_need = bytes;
        return c->work;
    }
    if (bytes > c->work_bytes) {
        CU_REQUIRE(!c->capturing && c->n_outgrown < OUTGROWN_MAX);
        c->outgrown[c->n_outgrown++] = c->work;
        if (bytes < 2 * c->work_bytes) bytes = 2 * c->work_bytes;
        CU(cudaMalloc(&c->work, bytes));
        c->work_bytes = bytes;
    }
    return c->work;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Activations of a decode step as bytes: 64 rows of 64 heads of 512 values, and some. */
#define WORK_BYTES ((size_t)8 << 20)

static bool set_up(struct kctx *c, int device, char *err, size_t err_bytes) {
    cudaFuncAttributes attr;
    cudaError_t e = cudaSetDevice(device);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&c->prop, device);
    if (e != cudaSuccess) {
        snprintf(err, err_bytes, "cuda: expected a usable device %d, found: %s", device,
                 cudaGetErrorString(e));
        return false;
    }
    e = cudaFuncGetAttributes(&attr, probe_kernel);
    if (e != cudaSuccess) {
        snprintf(err, err_bytes,
                 "cuda: device %d (%s): expected kernels for compute capability %d.%d in this "
                 "build, found none (%s)",
                 device, c->prop.name, c->prop.major, c->prop.minor, cudaGetErrorString(e));
        return false;
    }
    c->device = device;
    c->sms = c->prop.multiProcessorCount;
    c->smem_block = (int)c->prop.sharedMemPerBlockOptin;
    c->pdl = switches[SWITCH_PDL].chosen == 0;
    c->work_bytes = WORK_BYTES;
    c->later = new struct later();
    e = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaMalloc(&c->work, c->work_bytes);
    for (int i = 0; i < K_MARKS && e == cudaSuccess; i++) e = cudaEventCreate(&c->marks[i]);
    if (e != cudaSuccess) {
        snprintf(err, err_bytes, "cuda: device %d (%s): expected a stream and %zu bytes, found: %s",
                 device, c->prop.name, c->work_bytes, cudaGetErrorString(e));
        return false;
    }
    cuda_gemv_init(c);
    cuda_gemm_init(c);
    cuda_experts_init(c);
    cuda_plain_init(c);
    cuda_attend_init(c);
    cuda_select_init(c);
    return true;
}

static struct kctx *cuda_open(int device, char *err, size_t err_bytes) {
    struct kctx *c = (struct kctx *)calloc(1, sizeof *c);
    if (!c) {
        snprintf(err, err_bytes, "cuda: no memory for the context of %zu bytes", sizeof *c);
        return NULL;
    }
    if (!set_up(c, device, err, err_bytes)) {
        free(c);
        return NULL;
    }
    return c;
}

static void cuda_close(struct kctx *c) {
    if (!c) return;
    CU(cudaStreamSynchronize(c->stream));
    for (int i = 0; i < c->n_graphs; i++) CU(cudaGraphExecDestroy(c->graphs[i].exec));
    for (int i = 0; i < K_MARKS; i++) CU(cudaEventDestroy(c->marks[i]));
    for (int i = 0; i < c->n_outgrown; i++) CU(cudaFree(c->outgrown[i]));
    CU(cudaFree(c->work));
    CU(cudaFree(c->stage));
    CU(cudaStreamDestroy(c->stream));
    delete c->later;
    free(c);
}

static void cuda_info(struct kctx *c, struct kdevice_info *out) {
    size_t free_bytes, total;
    const unsigned char *u = (const unsigned char *)c->prop.uuid.bytes;
    char uuid[40];
    CU(cudaMemGetInfo(&free_bytes, &total));
    int at = 0;
    for (int i = 0; i < 16; i++)
        at += snprintf(uuid + at, sizeof uuid - (size_t)at, "%s%02x",
                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", u[i]);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%.38s GPU-%s %04x:%02x:%02x.0", c->prop.name, uuid,
             (unsigned)c->prop.pciDomainID & 0xffff, (unsigned)c->prop.pciBusID & 0xff,
             (unsigned)c->prop.pciDeviceID & 0xff);
    out->total_bytes = total;
    out->free_bytes = free_bytes;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static dptr cuda_alloc(struct kctx *c, size_t bytes) {
    void *p = NULL;
    (void)c;
    if (cudaMalloc(&p, bytes ? bytes : 256) != cudaSuccess) {
        (void)cudaGetLastError(); /* being refused is an answer, not a fault */
        return NULL;
    }
    return p;
}

static void cuda_free(struct kctx *c, dptr p) {
    cuda_settle(c);
    CU(cudaStreamSynchronize(c->stream));
    CU(cudaFree(p));
}

static void cuda_put(struct kctx *c, dptr dst, const void *src, size_t bytes) {
    cuda_settle(c);
    cuda_image_forget(c);
    if (bytes) CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, c->stream));
}

static void cuda_get(struct kctx *c, void *dst, const void *src, size_t bytes) {
    cuda_settle(c);
    if (bytes) CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, c->stream));
    CU(cudaStreamSynchronize(c->stream));
}

static void cuda_zero(struct kctx *c, dptr dst, size_t bytes) {
    cuda_settle(c);
    cuda_image_forget(c);
    if (bytes) CU(cudaMemsetAsync(dst, 0, bytes, c->stream));
}

static void cuda_sync(struct kctx *c) {
    cuda_settle(c);
    CU(cudaStreamSynchronize(c->stream));
}

/* Written and read by the device at the full rate of the bus. */
static void *cuda_host_alloc(struct kctx *c, size_t bytes) {
    void *p = NULL;
    (void)c;
    if (cudaHostAlloc(&p, bytes ? bytes : 256, cudaHostAllocDefault) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    return p;
}

static void cuda_host_free(struct kctx *c, void *p) {
    CU(cudaStreamSynchronize(c->stream));
    CU(cudaFreeHost(p));
}

static void cuda_get_later(struct kctx *c, void *dst, const void *src, size_t bytes) {
    cuda_settle(c);
    if (bytes) CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, c->stream));
}

static void cuda_mark(struct kctx *c, int which) {
    cuda_settle(c);
    CU(cudaEventRecord(c->marks[which], c->stream));
}

static bool cuda_passed(struct kctx *c, int which) {
    cudaError_t e = cudaEventQuery(c->marks[which]);
    if (e != cudaErrorNotReady) CU(e);
    return e == cudaSuccess;
}

static void cuda_wait(struct kctx *c, int which) {
    CU(cudaEventSynchronize(c->marks[which]));
}

static float cuda_span_us(struct kctx *c, int from, int to) {
    float ms = 0;
    CU(cudaEventElapsedTime(&ms, c->marks[from], c->marks[to]));
    return 1e3f * ms;
}

static void cuda_pack_end(struct kctx *c) {
    CU(cudaStreamSynchronize(c->stream));
    CU(cudaFree(c->stage));
    c->stage = NULL;
    c->stage_bytes = 0;
}

static size_t cuda_latent_bytes(const struct kdims *d) {
    return (size_t)(d->r_kv + d->d_rope) * (cuda_cache_f32() ? 4 : 2);
}

static size_t cuda_index_bytes(const struct kdims *d) {
    return (size_t)d->ix_dim * (cuda_cache_f32() ? 4 : 2);
}

static size_t cuda_scratch_bytes(const struct kdims *d, const struct kbounds *b) {
    size_t need[4] = {cuda_select_scratch(d, b), cuda_attend_scratch(d, b),
                      cuda_experts_scratch(d, b), cuda_sample_scratch(d, b)};
    size_t most = 0;
    for (int i = 0; i < 4; i++) most = need[i] > most ? need[i] : most;
    return most;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static int graph_of(const struct kctx *c, uint64_t key) {
    int i = 0;
    while (i < c->n_graphs && c->graphs[i].key != key) i++;
    return i;
}

static void capture(struct kctx *c) {
    CU_REQUIRE(!c->capturing);
    cuda_settle(c);
    cuda_image_forget(c);
    CU(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    c->capturing = true;
}

static cudaGraph_t captured(struct kctx *c) {
    cudaGraph_t graph;
    cuda_settle(c);
    CU(cudaStreamEndCapture(c->stream, &graph));
    c->capturing = false;
    cuda_image_forget(c); /* what was to stand in the workspace has not been run */
    return graph;
}

/* Keys that nobody prepared are captured when they come the second time: a prompt's odd length is
 * not worth a graph, and the first run has loaded its kernels. */
static bool cuda_graph_begin(struct kctx *c, uint64_t key) {
    CU_REQUIRE(!c->capturing);
    cuda_settle(c);
    cuda_image_forget(c);
    int i = graph_of(c, key);
    if (i < c->n_graphs) {
        CU(cudaGraphLaunch(c->graphs[i].exec, c->stream));
        return true;
    }
    for (i = 0; i < GRAPHS_MAX && c->seen[i] != key + 1; i++) {}
    if (i == GRAPHS_MAX || c->n_graphs == GRAPHS_MAX ||
        c->n_graphs - c->n_prepared >= K_GRAPHS_LATER) {
        c->seen[c->n_seen++ % GRAPHS_MAX] = key + 1;
        return false;
    }
    capture(c);
    return false;
}

static bool cuda_graph_prepare(struct kctx *c, uint64_t key) {
    if (graph_of(c, key) < c->n_graphs || c->n_graphs == GRAPHS_MAX) return false;
    capture(c);
    c->preparing = true;
    return true;
}

static void cuda_graph_end(struct kctx *c, uint64_t key) {
    cuda_settle(c);
    if (!c->capturing) return; /* ran uncaptured */
    cudaGraph_t graph = captured(c);
    cudaGraphExec_t *exec = &c->graphs[c->n_graphs].exec;
    CU(cudaGraphInstantiate(exec, graph, 0));
    CU(cudaGraphDestroy(graph));
    c->graphs[c->n_graphs++].key = key;
    if (c->preparing) {
        CU(cudaGraphUpload(*exec, c->stream));
        c->n_prepared++;
    } else {
        CU(cudaGraphLaunch(*exec, c->stream));
    }
    c->preparing = false;
}

/* Device memory of one node of an executable graph, rounded up from what was seen on an H200. */
#define NODE_BYTES 3072

static void cuda_measure_begin(struct kctx *c) {
    capture(c);
    c->measuring = true;
    c->work_need = 0;
}

static void cuda_measure_end(struct kctx *c, struct kneeds *out) {
    size_t nodes = 0;
    cudaGraph_t graph = captured(c);
    CU(cudaGraphGetNodes(graph, NULL, &nodes));
    CU(cudaGraphDestroy(graph));
    c->measuring = false;
    out->work_bytes = c->work_need;
    out->graph_bytes = nodes * NODE_BYTES;
}

static bool cuda_work_reserve(struct kctx *c, size_t bytes) {
    void *p = NULL;
    if (bytes <= c->work_bytes) return true;
    CU_REQUIRE(!c->capturing && c->n_graphs == 0);
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    CU(cudaStreamSynchronize(c->stream));
    CU(cudaFree(c->work));
    c->work = p;
    c->work_bytes = bytes;
    return true;
}

extern "C" const struct kernels *kernels_cuda_table(void);

const struct kernels *kernels_cuda_table(void) {
    static struct kernels t;
    if (t.name) return &t;
    t.switches = switches, t.n_switches = SWITCHES;
    t.open = cuda_open, t.close = cuda_close, t.info = cuda_info;
    t.alloc = cuda_alloc, t.free = cuda_free, t.put = cuda_put, t.get = cuda_get;
    t.zero = cuda_zero, t.sync = cuda_sync;
    t.mat_bytes = cuda_mat_bytes, t.latent_bytes = cuda_latent_bytes;
    t.index_bytes = cuda_index_bytes, t.scratch_bytes = cuda_scratch_bytes;
    t.mat_pack = cuda_mat_pack, t.mat_unpack = cuda_mat_unpack, t.pack_end = cuda_pack_end;
    t.takes_type = ktype_supported, t.takes_uneven = true;
    t.host_alloc = cuda_host_alloc, t.host_free = cuda_host_free, t.get_later = cuda_get_later;
    t.mark = cuda_mark, t.passed = cuda_passed, t.wait = cuda_wait, t.span_us = cuda_span_us;
    t.graph_begin = cuda_graph_begin, t.graph_prepare = cuda_graph_prepare;
    t.graph_end = cuda_graph_end, t.work_reserve = cuda_work_reserve;
    t.measure_begin = cuda_measure_begin, t.measure_end = cuda_measure_end;
    t.feed = cuda_feed, t.angles = cuda_angles, t.embed = cuda_embed, t.norm = cuda_norm;
    t.matmul = cuda_matmul, t.head_matmul = cuda_head_matmul, t.attn_prep = cuda_attn_prep;
    t.rope = cuda_rope, t.select = cuda_select, t.attend = cuda_attend, t.swiglu = cuda_swiglu;
    t.experts_up = cuda_experts_up, t.experts_down = cuda_experts_down;
    t.gather = cuda_gather, t.sample = cuda_sample;
    t.name = "cuda";
    return &t;
}
