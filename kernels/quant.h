/* kernels/quant.h: the quantised block layouts, as the GGUF format defines them.
 *
 * A row of a matrix is cols / block_elems consecutive blocks. Values are defined by the formulas
 * beside each decoder in quant.c and are bit-exact: each product and difference is rounded
 * to float32 in the written order, never contracted.
 *
 * Owns: nothing; pure.  Called by: both backends, the worker's loader.
 * Tested by: tests/kernels/test_dequant.c against values of the `gguf` Python package.
 */
#ifndef OCTAVO_KERNELS_QUANT_H
#define OCTAVO_KERNELS_QUANT_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/codebook.h"

/* The numbers are the file format's. */
enum ktype {
    KT_F32 = 0, KT_F16 = 1, KT_Q4_0 = 2, KT_Q4_1 = 3, KT_Q5_0 = 6, KT_Q5_1 = 7, KT_Q8_0 = 8,
    KT_Q2_K = 10, KT_Q3_K = 11, KT_Q4_K = 12, KT_Q5_K = 13, KT_Q6_K = 14,
    KT_IQ2_XXS = 16, KT_IQ2_XS = 17, KT_IQ3_XXS = 18, KT_IQ1_S = 19, KT_IQ4_NL = 20,
    KT_IQ3_S = 21, KT_IQ2_S = 22, KT_IQ4_XS = 23, KT_IQ1_M = 29, KT_BF16 = 30,
    KT_MXFP4 = 39, KT_NVFP4 = 40,
    KT_MAX = 64
};

#ifdef __cplusplus
extern "C" {
#endif

const char *ktype_name(int type);   /* "Q4_K", or "?" */
bool ktype_supported(int type);     /* has a decoder in this build */
bool ktype_scalar(int type);        /* a code is one number: no codebook, no small float */
int ktype_block_elems(int type);    /* 0 if not supported */
int ktype_block_bytes(int type);
int64_t ktype_row_bytes(int type, int64_t cols); /* cols must be a multiple of block_elems */

/* Decodes n elements (a multiple of block_elems) from blocks at src to dst. The specification. */
void kdequant_row(int type, const void *src, float *dst, int64_t n);

float kf16_to_f32(uint16_t h);
float kbf16_to_f32(uint16_t h);

#ifdef __cplusplus
}
#endif
#endif
