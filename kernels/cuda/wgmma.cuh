/* kernels/cuda/wgmma.cuh: Hopper's warpgroup products, as functions.
 *
 * Owns: nothing.  Called by: gemm_wide.cu, attend_many.cu.  Tested by: tests/gpu/check_ops.c
 * Limits: sm_90a; elsewhere nothing of it is compiled.
 *
 * Four warps multiply 64 rows of A, held in registers exactly as four 16-row operands of mma.sync,
 * by a tile of B in shared memory, and go on while the tensor cores work. Registers of A and of the
 * sums must not be touched before wg_wait has returned for their group.
 */
#ifndef OCTAVO_KERNELS_CUDA_WGMMA_H
#define OCTAVO_KERNELS_CUDA_WGMMA_H

#include "kernels/cuda/cuda.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WG_HERE 1 /* this pass compiles for a chip with wgmma */
#endif

#ifdef WG_HERE

static __device__ __forceinline__ void wg_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wg_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All but the newest N groups are done. */
template <int N> static __device__ __forceinline__ void wg_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Rows of 128 bytes whose 16-byte chunks are swizzled by the row, eight rows to 1024 bytes, which
 * the tile's start is a multiple of; sixteen columns further is 32 bytes further. */
static __device__ __forceinline__ uint64_t wg_tile(uint32_t addr) {
    return (uint64_t)(addr >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

#define WG_D0  "%0,%1,%2,%3,%4,%5,%6,%7"
#define WG_D8  WG_D0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_D16 WG_D8 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_D24 WG_D16 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_D32 WG_D24 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_D40 WG_D32 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_D48 WG_D40 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WG_D56 WG_D48 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_C8(i)                                                                                   \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]),    \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define WG_C16 WG_C8(0), WG_C8(8)
#define WG_C24 WG_C16, WG_C8(16)
#define WG_C32 WG_C24, WG_C8(24)
#define WG_C40 WG_C32, WG_C8(32)
#define WG_C48 WG_C40, WG_C8(40)
#define WG_C56 WG_C48, WG_C8(48)
#define WG_C64 WG_C56, WG_C8(56)

/* c[64, N] += a[64, 16] b[16, N]; a: this lane's four registers, b: a wg_tile of N rows. */
template <int N> struct wg_product;
#define WG_PRODUCT(N, D, A, B, ...)                                                                \
    template <> struct wg_product<N> {                                                             \
        static __device__ __forceinline__ void add(float *c, const uint32_t *a, uint64_t b) {      \
            asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" D "}, {" A     \
                         "}, " B ", p, 1, 1, 0;\n}"                                                \
                         : __VA_ARGS__                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
        }                                                                                          \
    }
WG_PRODUCT(32, WG_D8, "%16,%17,%18,%19", "%20", WG_C16);
WG_PRODUCT(48, WG_D16, "%24,%25,%26,%27", "%28", WG_C24);
WG_PRODUCT(64, WG_D24, "%32,%33,%34,%35", "%36", WG_C32);
WG_PRODUCT(80, WG_D32, "%40,%41,%42,%43", "%44", WG_C40);
WG_PRODUCT(96, WG_D40, "%48,%49,%50,%51", "%52", WG_C48);
WG_PRODUCT(112, WG_D48, "%56,%57,%58,%59", "%60", WG_C56);
WG_PRODUCT(128, WG_D56, "%64,%65,%66,%67", "%68", WG_C64);
#undef WG_PRODUCT

/* Registers move between the warpgroups of a block; every warp of a group, and one branch each. */
template <int N> static __device__ __forceinline__ void wg_more_registers(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void wg_fewer_registers(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif /* WG_HERE */

static __device__ __forceinline__ void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

#endif
