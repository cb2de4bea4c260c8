/* kernels/cuda/attend_many.cu: absorbed attention of many rows with many heads, by warpgroup
 * products.
 *
 * Owns: nothing.  Called by: attend.cu.  Fails how: a CUDA error ends the process.
 * Limits: compute capability 9.0, multiples of 64 heads, r_kv 512, d_rope 64, half-precision
 * caches. Tested by: tests/gpu/check_ops.c; measured by worker/bench.c
 *
 * A block takes 64 heads of one row. Its positions come in pairs of tiles of 32: each of two
 * warpgroups scores one tile (64 heads x 32 positions, 576 columns), both agree on the running
 * maximum, and each sums the values of both tiles for its half of the latent's columns, so that a
 * head's 512 sums fit into registers. Probabilities change hands as the registers they will be used
 * from. The values of a pair are multiplied while the next one's softmax is computed. Two pairs of
 * warps fetch, one for each of two stages; latents lie in shared memory once, read along their
 * columns for scores and across for values. Rows with most positions are taken first.
 */
#include <cmath>

#include "kernels/cuda/attend_many.cuh"
#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/wgmma.cuh"

#define HEADS   64
#define R       512
#define WIDTH   576
#define PARTS   (WIDTH / 64) /* of 64 columns: 128 bytes of a row */
#define TILE    32           /* positions of a warpgroup */
#define PART    (TILE * 128) /* bytes of 64 columns of a tile */
#define KV_TILE (PARTS * PART)
#define Q_PART  (HEADS * 128)
#define Q_BYTES (PARTS * Q_PART)
#define STAGES  2
#define THREADS 384
#define SMEM    (Q_BYTES + STAGES * 2 * KV_TILE + 2 * 4096 + 2 * HEADS * 4 + 64 + 1024)

struct many_args {
    const int32_t *pos, *slot, *page_table, *selected, *n_selected;
    int max_pages, heads, K, n_rows;
    float factor; /* scale * log2(e) */
    const __half *latent;
    const float *qk;
    float *out;
};

#ifdef WG_HERE

/* A tile of V: 64 columns per 4096 bytes, read across: eight positions further is 1024 bytes. */
static __device__ __forceinline__ uint64_t across(uint32_t addr) {
    return (uint64_t)(addr >> 4 & 0x3fff) | (uint64_t)(PART >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* c[64, 32] (+)= a[64, 16] b[16, 32], both in shared memory. */
template <bool ADD>
static __device__ __forceinline__ void score_step(float (&c)[16], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" WG_D8
                 "}, %16, %17, p, 1, 1, "
                 "0, 0;\n}"
                 : WG_C16
                 : "l"(a), "l"(b), "n"(ADD ? 1 : 0));
}

#define WG_D64                                                                                     \
    WG_D56 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"     \
           "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,"  \
           "%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120," \
           "%121,%122,%123,%124,%125,%126,%127"
#define WG_C128                                                                                    \
    WG_C64, WG_C8(64), WG_C8(72), WG_C8(80), WG_C8(88), WG_C8(96), WG_C8(104), WG_C8(112),         \
        WG_C8(120)

/* c[64, 256] += p[64, 16] v[16, 256]; p in registers, v read across. */
static __device__ __forceinline__ void value_step(float (&c)[128], const uint32_t *p, uint64_t v) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" WG_D64
                 "}, {%128,%129,%130,%131}, %132, p, 1, 1, 1;\n}"
                 : WG_C128
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

static __device__ __forceinline__ void proxy_fence(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ __forceinline__ void both_groups(void) {
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

struct many_smem {
    uint32_t q, kv, full, empty;
    uint32_t *trade; /* [2][4 warps][8][32] probabilities */
    float *top;      /* [2][HEADS] */
};

static __device__ __forceinline__ float in_half(float v) {
    return fminf(fmaxf(v, -65504.f), 65504.f);
}

/* This row's queries, by both warpgroups. */
static __device__ __forceinline__ void load_queries(const float *qk, uint8_t *q) {
#pragma unroll 9
    for (int i = threadIdx.x; i < HEADS * WIDTH / 8; i += 256) {
        int h = i / (WIDTH / 8), chunk = i % (WIDTH / 8);
        const float4 *src = (const float4 *)(qk + h * WIDTH + chunk * 8);
        float4 a = src[0], b = src[1];
        *(uint4 *)(q + chunk / 8 * Q_PART + h * 128 + ((chunk % 8) ^ (h & 7)) * 16) = make_uint4(
            pack_half2(in_half(a.x), in_half(a.y)), pack_half2(in_half(a.z), in_half(a.w)),
            pack_half2(in_half(b.x), in_half(b.y)), pack_half2(in_half(b.z), in_half(b.w)));
    }
}

/* Rows of the cache of this thread's eight positions from u0 on, -1 past the end: looked up while
 * the stage is still in use. */
static __device__ __forceinline__ void find_rows(const int32_t *pages, const int32_t *selected,
                                                 int u0, int n, int (&row)[8]) {
    int first = u0 + threadIdx.x % 64 / 8;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int u = first + 8 * i;
        row[i] = u < n ? (selected ? selected[u] : u) : -1;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (row[i] >= 0) row[i] = pages[row[i] / K_PAGE] * K_PAGE + row[i] % K_PAGE;
}

/* Two warps: the pairs of tiles of one stage. Eight threads to a position's row. */
static __device__ __forceinline__ void fetch_pairs(const struct many_args &a,
                                                   const struct many_smem &s, int t, int n) {
    int stage = (threadIdx.x - 256) / 64, tid = threadIdx.x % 64, c = tid % 8, row[8];
    uint32_t parity = 1, dst = s.kv + stage * 2 * KV_TILE + tid / 8 * 128 + (c ^ (tid / 8)) * 16;
    const int32_t *pages = a.page_table + (int64_t)a.slot[t] * a.max_pages;
    const int32_t *selected = a.selected ? a.selected + (int64_t)t * a.K : NULL;
    for (int u0 = stage * 2 * TILE; u0 < n; u0 += STAGES * 2 * TILE) {
        find_rows(pages, selected, u0, n, row);
        mbar_wait(s.empty + 8 * stage, parity);
        parity ^= 1;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const __half *src = a.latent + (int64_t)max(row[i], 0) * WIDTH + c * 8;
#pragma unroll
            for (int k = 0; k < PARTS; k++)
                cp_async16(dst + i / 4 * KV_TILE + i % 4 * 1024 + k * PART, src + k * 64,
                           row[i] >= 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        proxy_fence();
        mbar_arrive(s.full + 8 * stage);
    }
}

static __device__ __forceinline__ void begin_scores(const struct many_smem &s, int pair, int group,
                                                    float (&c)[16]) {
    int stage = pair % STAGES;
    mbar_wait(s.full + 8 * stage, pair / STAGES & 1);
    uint64_t q = wg_tile(s.q), k = wg_tile(s.kv + (stage * 2 + group) * KV_TILE);
    wg_fence();
    score_step<false>(c, q, k);
#pragma unroll
    for (int i = 1; i < PARTS * 4; i++)
        score_step<true>(c, q + (i / 4 * Q_PART + i % 4 * 32) / 16,
                         k + (i / 4 * PART + i % 4 * 32) / 16);
    wg_commit();
}

/* The values of both tiles of a pair, this group's half of the columns. */
static __device__ __forceinline__ void begin_values(const struct many_smem &s, int pair, int group,
                                                    const uint32_t (&first)[8],
                                                    const uint32_t (&second)[8],
                                                    float (&sum)[128]) {
    uint64_t v = across(s.kv + pair % STAGES * 2 * KV_TILE + group * 4 * PART);
    wg_fence();
#pragma unroll
    for (int k = 0; k < 2; k++) {
        value_step(sum, first + 4 * k, v + k * 2048 / 16);
        value_step(sum, second + 4 * k, v + (KV_TILE + k * 2048) / 16);
    }
    wg_commit();
}

/* Largest and sum over the four lanes that share a row. */
static __device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
static __device__ __forceinline__ float quad_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

/* What a thread keeps of its two rows (g and g + 8). */
struct running {
    float top[2], weight[2], fade[2];
    bool moved;
};

/* Probabilities of this group's tile of a pair from its scores, laid out in shared memory as
 * registers of the value product; the running maximum is agreed upon with the other group. */
static __device__ __forceinline__ void softmax(const struct many_args &a, const struct many_smem &s,
                                               int pair, int group, int n, float (&c)[16],
                                               struct running &run) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x & 31, row = warp * 16 + (lane >> 2);
    int u0 = (pair * 2 + group) * TILE + 2 * (lane & 3);
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 16; i++) { /* i / 4: eight positions; i / 2 % 2: row */
        c[i] = u0 + i / 4 * 8 + i % 2 < n ? c[i] * a.factor : -INFINITY;
        most[i / 2 % 2] = fmaxf(most[i / 2 % 2], c[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = quad_max(most[r]);
        if ((lane & 3) == 0) s.top[group * HEADS + row + 8 * r] = most[r];
    }
    both_groups();
    run.moved = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float now = fmaxf(fmaxf(run.top[r], most[r]), s.top[(1 - group) * HEADS + row + 8 * r]);
        run.fade[r] = exp2f(run.top[r] - now);
        run.moved = run.moved || now != run.top[r];
        run.top[r] = now;
        run.weight[r] *= run.fade[r];
    }
    uint32_t *mine = s.trade + (group * 4 + warp) * 256 + lane;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        int r = i / 2 % 2;
        float p = exp2f(c[i] - run.top[r]), q = exp2f(c[i + 1] - run.top[r]);
        run.weight[r] += p + q;
        mine[i / 2 * 32] = pack_half2(p, q);
    }
}

/* One warpgroup's share of a row: its own tile's scores, half of the values. The values of a pair
 * are multiplied during the softmax of the next. */
static __device__ __forceinline__ void attend_group(const struct many_args &a,
                                                    const struct many_smem &s, int n,
                                                    struct running &run, float (&sum)[128]) {
    int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x & 31;
    int pairs = (n + 2 * TILE - 1) / (2 * TILE);
    const uint32_t *p = s.trade + warp * 256 + lane;
    float c[16];
    uint32_t first[8], second[8]; /* of the two tiles */
    begin_scores(s, 0, group, c);
    wg_wait<0>();
    softmax(a, s, 0, group, n, c, run);
    both_groups();
#pragma unroll
    for (int i = 0; i < 8; i++) first[i] = p[i * 32], second[i] = p[i * 32 + 1024];
#pragma unroll 1
    for (int pair = 0; pair < pairs - 1; pair++) {
        begin_scores(s, pair + 1, group, c);
        begin_values(s, pair, group, first, second, sum);
        wg_wait<1>();
        softmax(a, s, pair + 1, group, n, c, run);
        wg_wait<0>();
        if (lane == 0) mbar_arrive(s.empty + 8 * (pair % STAGES));
        if (__any_sync(~0u, run.moved)) {
#pragma unroll
            for (int i = 0; i < 128; i++) sum[i] *= run.fade[i / 2 % 2];
        }
        both_groups();
#pragma unroll
        for (int i = 0; i < 8; i++) first[i] = p[i * 32], second[i] = p[i * 32 + 1024];
    }
    begin_values(s, pairs - 1, group, first, second, sum);
    wg_wait<0>();
}

static __device__ __forceinline__ void
attend_row(const struct many_args &a, const struct many_smem &s, int t, int head0, int n) {
    int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x & 31;
    int row = warp * 16 + (lane >> 2);
    float sum[128];
    struct running run = {{-INFINITY, -INFINITY}, {0, 0}, {1, 1}, false};
#pragma unroll
    for (int i = 0; i < 128; i++) sum[i] = 0;
    if (n > 0) attend_group(a, s, n, run, sum);
    both_groups();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        run.weight[r] = quad_sum(run.weight[r]);
        if ((lane & 3) == 0) s.top[group * HEADS + row + 8 * r] = run.weight[r];
    }
    both_groups();
    float *out = a.out + ((int64_t)t * a.heads + head0 + row) * R + group * 256 + 2 * (lane & 3);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float l = s.top[row + 8 * r] + s.top[HEADS + row + 8 * r], scale = l > 0 ? 1.f / l : 0.f;
#pragma unroll
        for (int j = 0; j < 32; j++)
            *(float2 *)(out + r * 8 * R + 8 * j) =
                make_float2(sum[4 * j + 2 * r] * scale, sum[4 * j + 2 * r + 1] * scale);
    }
}

#endif /* WG_HERE */

static __global__ void __launch_bounds__(THREADS, 1)
    attend_many_kernel(const __grid_constant__ struct many_args a) {
#ifdef WG_HERE
    extern __shared__ uint8_t raw[];
    uint8_t *base = raw + (1024 - smem_addr(raw) % 1024) % 1024;
    struct many_smem s;
    s.q = smem_addr(base);
    s.kv = s.q + Q_BYTES;
    uint8_t *rest = base + Q_BYTES + STAGES * 2 * KV_TILE;
    s.trade = (uint32_t *)rest;
    s.top = (float *)(rest + 2 * 4096);
    s.full = smem_addr(rest + 2 * 4096 + 2 * HEADS * 4);
    s.empty = s.full + 8 * STAGES;
    int t = a.n_rows - 1 - (int)blockIdx.x, head0 = blockIdx.y * HEADS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(s.full + 8 * i, 64);
            mbar_init(s.empty + 8 * i, 8);
        }
        mbar_init_fence();
    }
    __syncthreads();
    gdc_trigger();
    gdc_wait();
    int n = a.slot[t] < 0 ? 0 : a.selected ? a.n_selected[t] : a.pos[t] + 1;
    if (threadIdx.x >= 256) {
        wg_fewer_registers<40>();
        fetch_pairs(a, s, t, n);
    } else {
        wg_more_registers<232>();
        load_queries(a.qk + ((int64_t)t * a.heads + head0) * WIDTH, base);
        proxy_fence();
        both_groups();
        attend_row(a, s, t, head0, n);
    }
#else
    __trap(); /* an image for 90 instead of 90a; no other chip comes here */
#endif
}

bool cuda_attend_many(struct kctx *c, const struct kop_attend *o) {
    const struct kdims *d = o->dims;
    int T = o->batch->n_rows, heads = d->n_heads;
    if (c->prop.major != 9 || cuda_cache_f32() || d->r_kv != R || d->r_kv + d->d_rope != WIDTH ||
        heads % HEADS != 0 || T * (heads / HEADS) < c->sms)
        return false;
    struct many_args a = {};
    a.pos = o->batch->pos, a.slot = o->batch->slot, a.page_table = o->seqs->page_table;
    a.selected = o->selected, a.n_selected = o->n_selected;
    a.max_pages = o->seqs->max_pages, a.heads = heads, a.K = d->ix_topk, a.n_rows = T;
    a.factor = d->attn_scale * 1.44269504089f;
    a.latent = (const __half *)o->cache->latent, a.qk = o->qk, a.out = o->out;
    launch(c, attend_many_kernel, dim3((unsigned)T, (unsigned)(heads / HEADS)), THREADS, SMEM, a);
    return true;
}

void cuda_attend_many_init(struct kctx *c) {
    if (c->prop.major == 9) allow_smem(attend_many_kernel, SMEM);
}
