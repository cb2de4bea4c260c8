/* tests/kernels/tame.h: makes random blocks have ordinary scales.
 *
 * Used by: tests/kernels/check.h, tests/gpu/check.c
 */
#ifndef OCTAVO_TESTS_KERNELS_TAME_H
#define OCTAVO_TESTS_KERNELS_TAME_H

#include "kernels/quant.h"

/* The scales of one block become 2^-8 or so, of either sign. */
static inline void tame_block(int type, uint8_t *b) {
    static const uint8_t scale_at[KT_MAX][2] = {
        [KT_Q4_1] = {0, 2}, [KT_Q5_1] = {0, 2}, [KT_Q2_K] = {80, 82},  [KT_Q3_K] = {108, 108},
        [KT_Q4_K] = {0, 2}, [KT_Q5_K] = {0, 2}, [KT_Q6_K] = {208, 208}};
    if (type == KT_MXFP4) {
        b[0] = (uint8_t)(118 + b[0] % 4);
    } else if (type == KT_NVFP4) {
        for (int s = 0; s < 4; s++) b[s] = (uint8_t)(b[s] % 32);
    } else if (type == KT_IQ1_M) { /* the half float's upper byte is two nibbles apart */
        b[53] = (uint8_t)((b[53] & 0x3F) | 0xC0);
        b[55] = (uint8_t)((b[55] & 0x8F) | 0x10);
    } else {
        for (int k = 0; k < 2; k++) {
            uint8_t *d = b + scale_at[type][k];
            d[1] = (uint8_t)((d[1] & 0x83) | 0x1C);
        }
    }
}

#endif
