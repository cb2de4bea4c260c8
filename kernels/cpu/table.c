/* kernels/cpu/table.c: the CPU backend as a table: its life, its memory, its sizes.
 *
 * Owns: struct kctx.  Called by: worker/ through kernels_table().
 * Fails how: open and alloc return NULL (open with a sentence).
 * Limits: none.  Tested by: tests/kernels/
 *
 * The device is the host, so memory is aligned_alloc and weights stay in file order. The best
 * instruction set the machine has is taken; the switch cpu-isa asks for another, which changes the
 * speed and nothing else.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"

#define HOST_ALIGN 4096 /* of host memory: a page */

int cpu_isa_list(const struct cpu_isa *out[3]) {
    int n = 0;
#ifdef CPU_HAVE_X86
    __builtin_cpu_init();
    /* F16C is older than AVX2, and not every compiler knows it by name. */
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2 && avx512) out[n++] = &cpu_isa_avx512;
    if (avx2) out[n++] = &cpu_isa_avx2;
#endif
    out[n++] = &cpu_isa_plain;
    return n;
}

struct kctx *cpu_open_isa(const struct cpu_isa *isa) {
    struct kctx *c = aligned_alloc(64, (sizeof *c + 63) / 64 * 64);
    if (!c) return NULL;
    memset(c, 0, sizeof *c);
    c->isa = isa;
    return c;
}

static struct kswitch cpu_switches[] = {
    {"cpu-isa", "Instruction set of the inner loops.", {"best", "AVX-512", "AVX2", "plain"}, 0},
};

static struct kctx *cpu_open(int device, char *err, size_t err_bytes) {
    (void)device;
    const struct cpu_isa *isas[3];
    int n = cpu_isa_list(isas), pick = 0;
    const char *want = cpu_switches[0].choices[cpu_switches[0].chosen];
    if (cpu_switches[0].chosen > 0) {
        while (pick < n && strcmp(isas[pick]->name, want) != 0) pick++;
        if (pick == n) {
            snprintf(err, err_bytes,
                     "cpu-isa: expected an instruction set of this machine "
                     "(the best is %s), found %s",
                     isas[0]->name, want);
            return NULL;
        }
    }
    struct kctx *c = cpu_open_isa(isas[pick]);
    if (!c) snprintf(err, err_bytes, "cpu: no memory for the context of %zu bytes", sizeof *c);
    return c;
}

static void cpu_close(struct kctx *c) {
    free(c);
}

static void cpu_info(struct kctx *c, struct kdevice_info *out) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "cpu %s", c->isa->name);
    out->total_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * page;
    out->free_bytes = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * page;
}

static dptr cpu_alloc(struct kctx *c, size_t bytes) {
    (void)c;
    if (bytes > SIZE_MAX - 256) return NULL;
    return aligned_alloc(256, bytes == 0 ? 256 : (bytes + 255) / 256 * 256);
}

static void cpu_free(struct kctx *c, dptr p) {
    (void)c;
    free(p);
}

static void cpu_put(struct kctx *c, dptr dst, const void *src, size_t bytes) {
    (void)c;
    if (bytes) memcpy(dst, src, bytes);
}

static void cpu_get(struct kctx *c, void *dst, const void *src, size_t bytes) {
    (void)c;
    if (bytes) memcpy(dst, src, bytes);
}

static void cpu_zero(struct kctx *c, dptr dst, size_t bytes) {
    (void)c;
    if (bytes) memset(dst, 0, bytes);
}

static void cpu_sync(struct kctx *c) {
    (void)c;
}

static void *cpu_host_alloc(struct kctx *c, size_t bytes) {
    (void)c;
    if (bytes > SIZE_MAX - HOST_ALIGN) return NULL;
    return aligned_alloc(HOST_ALIGN, bytes == 0 ? HOST_ALIGN
                                                : (bytes + HOST_ALIGN - 1) / HOST_ALIGN * HOST_ALIGN);
}

/* Everything queued has been done when the call that queued it returned. */
static void cpu_mark(struct kctx *c, int which) {
    (void)c;
    assert(which >= 0 && which < K_MARKS);
}

static bool cpu_passed(struct kctx *c, int which) {
    cpu_mark(c, which);
    return true;
}

static float cpu_span_us(struct kctx *c, int from, int to) {
    (void)c, (void)from, (void)to;
    return 0;
}

static size_t cpu_mat_bytes(int type, int64_t count, int64_t rows, int64_t cols) {
    return (size_t)count * (size_t)rows * (size_t)ktype_row_bytes(type, cols);
}

static size_t cpu_latent_bytes(const struct kdims *d) {
    return (size_t)(d->r_kv + d->d_rope) * sizeof(float);
}

static size_t cpu_index_bytes(const struct kdims *d) {
    return (size_t)d->ix_dim * sizeof(float);
}

static size_t cpu_scratch_bytes(const struct kdims *d, const struct kbounds *b) {
    size_t need[4] = {cpu_select_scratch(d, b), cpu_attend_scratch(d, b), cpu_experts_scratch(d, b),
                      cpu_sample_scratch(b->vocab)};
    size_t most = 0;
    for (int i = 0; i < 4; i++) most = need[i] > most ? need[i] : most;
    return most;
}

static void cpu_mat_pack(struct kctx *c, struct kmat *m, int64_t at, const void *src) {
    (void)c;
    size_t bytes = cpu_mat_bytes(m->type, 1, m->rows, m->cols);
    assert(at >= 0 && at < m->count);
    m->layout = 0;
    memcpy((char *)m->data + (size_t)at * bytes, src, bytes);
}

static void cpu_mat_unpack(struct kctx *c, const struct kmat *m, int64_t at, void *dst) {
    (void)c;
    size_t bytes = cpu_mat_bytes(m->type, 1, m->rows, m->cols);
    assert(at >= 0 && at < m->count);
    memcpy(dst, (const char *)m->data + (size_t)at * bytes, bytes);
}

const struct kernels *kernels_table(void) {
    static const struct kernels table = {
        .name = "cpu",
        .switches = cpu_switches,
        .n_switches = 1,
        .open = cpu_open,
        .close = cpu_close,
        .info = cpu_info,
        .alloc = cpu_alloc,
        .free = cpu_free,
        .put = cpu_put,
        .get = cpu_get,
        .zero = cpu_zero,
        .sync = cpu_sync,
        .host_alloc = cpu_host_alloc,
        .host_free = cpu_free,
        .get_later = cpu_get,
        .mark = cpu_mark,
        .passed = cpu_passed,
        .wait = cpu_mark,
        .span_us = cpu_span_us,
        .mat_bytes = cpu_mat_bytes,
        .latent_bytes = cpu_latent_bytes,
        .index_bytes = cpu_index_bytes,
        .scratch_bytes = cpu_scratch_bytes,
        .mat_pack = cpu_mat_pack,
        .mat_unpack = cpu_mat_unpack,
        .takes_type = ktype_supported,
        .takes_uneven = true,
        .feed = cpu_feed,
        .angles = cpu_angles,
        .embed = cpu_embed,
        .norm = cpu_norm,
        .matmul = cpu_matmul,
        .head_matmul = cpu_head_matmul,
        .attn_prep = cpu_attn_prep,
        .rope = cpu_rope,
        .select = cpu_select,
        .attend = cpu_attend,
        .swiglu = cpu_swiglu,
        .experts_up = cpu_experts_up,
        .experts_down = cpu_experts_down,
        .gather = cpu_gather,
        .sample = cpu_sample,
    };
    return &table;
}
