/* kernels/codebook.h: the tables that the IQ types point into, and the small ones of the four-bit
 * float types.
 *
 * The large tables were found by numeric optimisation, so there is no formula for them: they are
 * constants of the GGUF format, as published with the MIT-licensed ggml project. Entries are small
 * vectors; a code in a block is the number of an entry.
 *
 * Owns: the tables, filled before main.  Called by: quant.c, cpu/decode.h, cuda/plain.cu.
 * Fails how: cannot.  Tested by: tests/kernels/test_dequant.c (a digest of every table, taken from
 * the `gguf` Python package)
 */
#ifndef OCTAVO_KERNELS_CODEBOOK_H
#define OCTAVO_KERNELS_CODEBOOK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kcodebooks {
    int8_t iq2_xxs[256][8];
    int8_t iq2_xs[512][8];
    int8_t iq2_s[1024][8];
    int8_t iq3_xxs[256][4];
    int8_t iq3_s[512][4];
    int8_t iq1[2048][8]; /* IQ1_S and IQ1_M */
    uint8_t sign[128];   /* seven sign bits, and an eighth that makes their number even */
    float nvfp4[256];    /* scales of NVFP4: unsigned E4M3, halved because the values are doubled */
};
extern struct kcodebooks kcodebooks;

extern const int8_t kvalues_iq4[16];   /* IQ4_NL and IQ4_XS */
extern const int8_t kvalues_mxfp4[16]; /* MXFP4 and NVFP4: E2M1, doubled */

/* Scale of an MXFP4 block, 2^(e - 128): also halved. */
float kmxfp4_scale(uint8_t e);

#ifdef __cplusplus
}
#endif
#endif
