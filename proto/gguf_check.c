/* proto/gguf_check.c: are the scales of quantised blocks, and the values of plain tensors, numbers?
 *
 * Owns: nothing.  Called by: coordinator/inspect_check.c.  Fails how: cannot.  Limits: none.
 * Tested by: tests/unit/test_gguf_check.c
 *
 * Only scales are looked at: codes cannot be anything but numbers, and the scales are a fortieth of
 * the bytes. One infinite scale makes a row of a product infinite, the next norm makes NaN of it,
 * and the answer is rubbish without an error anywhere, so a damaged file should be found before it
 * is served. Where in a block the scales stand is the format's; this table is the third place that
 * knows it, because proto may not ask kernels.
 */
#include "proto/gguf_check.h"

#include <string.h>

enum scale {
    NUMBERS, /* nothing that could be anything else */
    HALF,    /* IEEE half floats at the offsets */
    BFLOAT,
    SINGLE,
    DOUBLE,
    NIBBLES,  /* IQ1_M: a half float in the top nibbles of four words */
    EXPONENT, /* MXFP4: a power of two, 255 is NaN */
    E4M3,     /* NVFP4: four bytes, 127 with or without sign is NaN */
};

static const struct {
    enum scale scale;
    uint8_t at[2]; /* the same twice where there is one */
} types[] = {
    [0] = {SINGLE, {0}},     [1] = {HALF, {0}},       [2] = {HALF, {0}},
    [3] = {HALF, {0, 2}},    [6] = {HALF, {0}},       [7] = {HALF, {0, 2}},
    [8] = {HALF, {0}},       [10] = {HALF, {80, 82}}, [11] = {HALF, {108, 108}},
    [12] = {HALF, {0, 2}},   [13] = {HALF, {0, 2}},   [14] = {HALF, {208, 208}},
    [16] = {HALF, {0}},      [17] = {HALF, {0}},      [18] = {HALF, {0}},
    [19] = {HALF, {0}},      [20] = {HALF, {0}},      [21] = {HALF, {0}},
    [22] = {HALF, {0}},      [23] = {HALF, {0}},      [28] = {DOUBLE, {0}},
    [29] = {NIBBLES, {48}},  [30] = {BFLOAT, {0}},    [34] = {HALF, {52, 52}},
    [35] = {HALF, {64, 64}}, [39] = {EXPONENT, {0}},  [40] = {E4M3, {0}},
    [41] = {HALF, {0}},      [42] = {HALF, {0}},
};

static bool half_is_bad(const uint8_t *p) {
    return (p[1] & 0x7C) == 0x7C;
}

static bool single_is_bad(const uint8_t *upper) {
    return (upper[1] & 0x7F) == 0x7F && (upper[0] & 0x80);
}

static bool double_is_bad(const uint8_t *p) {
    return (p[7] & 0x7F) == 0x7F && (p[6] & 0xF0) == 0xF0;
}

static bool e4m3_are_bad(const uint8_t *p) {
    bool bad = false;
    for (int i = 0; i < 4; i++) bad |= (p[i] & 0x7F) == 0x7F;
    return bad;
}

static bool is_bad(uint32_t type, const uint8_t *b) {
    const uint8_t *at = types[type].at;
    switch (types[type].scale) {
    case NUMBERS:
        return false;
    case HALF:
        return half_is_bad(b + at[0]) || half_is_bad(b + at[1]);
    case BFLOAT:
        return single_is_bad(b);
    case SINGLE:
        return single_is_bad(b + 2);
    case DOUBLE:
        return double_is_bad(b);
    case NIBBLES: /* sign and three bits of exponent in the last word, two more before it */
        return (b[at[0] + 7] & 0x70) == 0x70 && (b[at[0] + 5] & 0xC0) == 0xC0;
    case EXPONENT:
        return b[0] == 255;
    case E4M3:
        return e4m3_are_bad(b);
    }
    return false;
}

uint64_t gguf_check_blocks(uint32_t type, const uint8_t *p, uint64_t n, uint64_t *first) {
    uint64_t bytes = gguf_type_info(type)->block_bytes, bad = 0;
    if (type >= ARRAY_LEN(types) || types[type].scale == NUMBERS) return 0;
    for (uint64_t i = 0; i < n; i++, p += bytes)
        if (is_bad(type, p) && bad++ == 0) *first = i;
    return bad;
}
