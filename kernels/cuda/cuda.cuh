/* kernels/cuda/cuda.cuh: what every CUDA file of the backend shares.
 *
 * Owns: struct kctx (one device, one stream).  Called by: kernels/cuda/ only.
 * Fails how: CU(x) prints expression, file and line and ends the process with status 1.
 *
 * Launches go through launch(): each kernel is a programmatic dependent of the one before it, so
 * its blocks may start early, and every kernel calls gdc_wait() in every thread before it touches
 * memory that an earlier kernel of the stream writes (weights are not such memory: they may be
 * requested before). A block that skipped the wait could let its successor start before its
 * predecessor has finished, so no kernel returns early without it.
 */
#ifndef OCTAVO_KERNELS_CUDA_H
#define OCTAVO_KERNELS_CUDA_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/kernels.h"

[[noreturn]] void cuda_fatal(const char *what, const char *error, const char *file, int line);

#define CU(x)                                                                                      \
    do {                                                                                           \
        cudaError_t cu_error_ = (x);                                                               \
        if (cu_error_ != cudaSuccess)                                                              \
            cuda_fatal(#x, cudaGetErrorString(cu_error_), __FILE__, __LINE__);                     \
    } while (0)

/* A rule of the contract broken by the caller: ends the process like a device fault. */
#define CU_REQUIRE(x)                                                                              \
    do {                                                                                           \
        if (!(x)) cuda_fatal(#x, "does not hold", __FILE__, __LINE__);                             \
    } while (0)

#define GRAPHS_MAX   256
#define OUTGROWN_MAX 32
#define CARVED_MAX   256

/* How x stands in the workspace for a product with many rows. */
enum x_form { X_NONE, X_NARROW, X_WIDE };

struct kctx {
    int device;
    cudaStream_t stream;
    cudaDeviceProp prop;
    int sms;
    int smem_block; /* largest dynamic shared memory of a block */
    bool capturing;
    bool pdl;       /* programmatic dependent launch in use */
    struct {
        uint64_t key;
        cudaGraphExec_t exec;
    } graphs[GRAPHS_MAX];
    int n_graphs, n_prepared; /* of them by graph_prepare */
    bool preparing;           /* this capture is kept, not run */
    bool measuring;           /* this one is only counted */
    size_t work_need;         /* while measuring: the largest workspace asked for */
    cudaEvent_t marks[K_MARKS];
    uint64_t seen[GRAPHS_MAX]; /* keys + 1 that came once, a ring */
    unsigned n_seen;
    void *work;     /* activations in half precision for the tensor-core product */
    size_t work_bytes;
    enum x_form x_form; /* of the converted x at its start */
    void *outgrown[OUTGROWN_MAX]; /* workspaces that were too small */
    int n_outgrown;
    struct { /* what stands as bytes at the start of work: see cuda_image_remember */
        const float *x;
        int64_t x_row, cols;
        int n_rows;
    } image;
    struct later *later; /* small operations put off until the next one is known (later.cuh) */
    const void *carved[CARVED_MAX]; /* kernels that have been told how to share a multiprocessor */
    int n_carved;
    void *stage;    /* file-order rows on their way into a packed matrix */
    size_t stage_bytes;
};

/* At least `bytes` of the context's own workspace. Grows only outside of a capture. */
void *cuda_work(struct kctx *c, size_t bytes);

/* The rows of x whose bytes (gemv.cuh) stand at the start of the workspace, so that the operation
 * after next need not make them again. Whoever uses the workspace, or may write x, forgets. */
static inline void cuda_image_remember(struct kctx *c, const float *x, int64_t x_row, int n_rows,
                                       int64_t cols) {
    c->image.x = x, c->image.x_row = x_row, c->image.n_rows = n_rows, c->image.cols = cols;
}
static inline void cuda_image_forget(struct kctx *c) { c->image.x = NULL; }
static inline bool cuda_image_is(const struct kctx *c, const float *x, int64_t x_row, int n_rows,
                                 int64_t cols) {
    return x && c->image.x == x && c->image.x_row == x_row && c->image.n_rows == n_rows &&
           c->image.cols == cols;
}

/* Launches what was put off (later.cu). Every operation that does not take it over calls this first,
 * and so does whatever lets the host or other code see memory. */
void cuda_settle(struct kctx *c);

/* Neighbouring kernels that divide a multiprocessor between cache and shared memory differently never
 * run side by side, so all of them ask for the largest share of shared memory. Once per kernel. */
static inline void carve(struct kctx *c, const void *kernel) {
    for (int i = 0; i < c->n_carved; i++)
        if (c->carved[i] == kernel) return;
    CU(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                            cudaSharedmemCarveoutMaxShared));
    if (c->n_carved < CARVED_MAX) c->carved[c->n_carved++] = kernel;
}

/* Element type of the caches: false f16 (the default), true f32 (the switch cuda-cache). */
bool cuda_cache_f32(void);

template <typename... Formal, typename... Actual>
static void launch(struct kctx *c, void (*kernel)(Formal...), dim3 grid, dim3 block, size_t smem,
                   Actual &&...args) {
    carve(c, (const void *)kernel);
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = grid;
    cfg.blockDim = block;
    cfg.dynamicSmemBytes = smem;
    cfg.stream = c->stream;
    cudaLaunchAttribute attr[1];
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    cfg.attrs = attr;
    cfg.numAttrs = c->pdl ? 1 : 0;
    CU(cudaLaunchKernelEx(&cfg, kernel, static_cast<Formal>(args)...));
}

/* Kernels with more than 48 KB of shared memory say so once: dynamic bytes, or all that the static ones
 * leave of a block's. */
template <typename K> static void allow_smem(K *kernel, size_t bytes) {
    cudaFuncAttributes attr;
    int device, most;
    CU(cudaGetDevice(&device));
    CU(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    CU(cudaFuncGetAttributes(&attr, kernel));
    if (bytes + attr.sharedSizeBytes > (size_t)most) bytes = (size_t)most - attr.sharedSizeBytes;
    CU(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- device helpers ---------------------------------------------------------------------- */

static __device__ __forceinline__ void gdc_wait(void) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
static __device__ __forceinline__ void gdc_trigger(void) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

static __device__ __forceinline__ uint32_t smem_addr(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* c[16, 8] += a[16, 16] b[16, 8] */
static __device__ __forceinline__ void mma16816(float (&c)[4], uint32_t a0, uint32_t a1,
                                                uint32_t a2, uint32_t a3, uint32_t b0,
                                                uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void ldsm4(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
static __device__ __forceinline__ void ldsm4_t(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

static __device__ __forceinline__ void cp_async16(uint32_t dst, const void *src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
static __device__ __forceinline__ void cp_async_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

static __device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
static __device__ __forceinline__ void mbar_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
    asm volatile("{\n.reg .pred p;\n"
                 "wait_%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra wait_%=;\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
/* One bulk copy; src, dst and bytes are multiples of 16. */
static __device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t bytes,
                                                 uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

static __device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
static __device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

/* Sum over the block in a fixed order; every thread gets it. smem: 33 floats. */
static __device__ __forceinline__ float block_sum(float v, float *smem) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = (blockDim.x + 31) >> 5;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) smem[warp] = v;
    __syncthreads();
    if (warp == 0) {
        float s = warp_sum(lane < n ? smem[lane] : 0.f);
        if (lane == 0) smem[32] = s;
    }
    __syncthreads();
    return smem[32];
}

/* Four floats at any address that holds floats; one load where it is aligned. */
static __device__ __forceinline__ float4 load_float4(const float *p) {
    if (((uintptr_t)p & 15) == 0) return *(const float4 *)p;
    return make_float4(p[0], p[1], p[2], p[3]);
}

static __device__ __forceinline__ uint32_t pack_half2(float a, float b) {
    __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&h);
}
static __device__ __forceinline__ float silu(float g) { return g / (1.f + expf(-g)); }

/* Activations enter the tensor cores as x / 16 in half precision: ±1e6 fits, and what is smaller
 * than 5e-7 in size is lost. */
#define X_SCALE 0.0625f
#define X_UNSCALE 16.f
static __device__ __forceinline__ float x_clamp(float x) {
    return fminf(fmaxf(x * X_SCALE, -65504.f), 65504.f);
}

/* ---- operations, one file per noun --------------------------------------------------------- */

void cuda_feed(struct kctx *, const struct kop_feed *);
void cuda_angles(struct kctx *, const struct kop_angles *);
void cuda_embed(struct kctx *, const struct kop_embed *);
void cuda_norm(struct kctx *, const struct kop_norm *);
void cuda_matmul(struct kctx *, const struct kop_matmul *, int n_jobs);
void cuda_head_matmul(struct kctx *, const struct kop_head_matmul *);
void cuda_attn_prep(struct kctx *, const struct kop_attn_prep *);
void cuda_rope(struct kctx *, const struct kop_rope *);
void cuda_select(struct kctx *, const struct kop_select *);
void cuda_attend(struct kctx *, const struct kop_attend *);
void cuda_swiglu(struct kctx *, const struct kop_swiglu *);
void cuda_experts_up(struct kctx *, const struct kop_experts_up *);
void cuda_experts_down(struct kctx *, const struct kop_experts_down *);
void cuda_gather(struct kctx *, const struct kop_gather *);
void cuda_sample(struct kctx *, const struct kop_sample *);

size_t cuda_mat_bytes(int type, int64_t count, int64_t rows, int64_t cols);
void cuda_mat_pack(struct kctx *, struct kmat *, int64_t at, const void *src);
void cuda_mat_unpack(struct kctx *, const struct kmat *, int64_t at, void *dst);

/* Bytes of scratch that each operation asks for. */
size_t cuda_select_scratch(const struct kdims *, const struct kbounds *);
size_t cuda_attend_scratch(const struct kdims *, const struct kbounds *);
size_t cuda_experts_scratch(const struct kdims *, const struct kbounds *);
size_t cuda_sample_scratch(const struct kdims *, const struct kbounds *);

/* Raise the shared-memory limits and check that the device has an image of every kernel kind. */
void cuda_gemv_init(struct kctx *);
void cuda_gemm_init(struct kctx *);
void cuda_experts_init(struct kctx *);
void cuda_plain_init(struct kctx *); /* copies the codebooks */
void cuda_attend_init(struct kctx *);
void cuda_select_init(struct kctx *);

#endif
