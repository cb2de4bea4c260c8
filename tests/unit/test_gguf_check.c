/* tests/unit/test_gguf_check.c: the scales that --check calls bad are those that decode to what is
 * no number, for every type that has a decoder.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/quant.h"
#include "proto/gguf_check.h"

#define BLOCKS 20000 /* of random bytes: a half float is infinite or NaN in one of 32 */

static bool decodes_to_numbers(int type, const uint8_t *block) {
    float y[256];
    int n = ktype_block_elems(type);
    kdequant_row(type, block, y, n);
    for (int i = 0; i < n; i++)
        if (!isfinite(y[i])) return false;
    return true;
}

/* Two exponents of MXFP4 are numbers whose larger multiples are not; E4M3's NaN decodes to 0. */
static bool is_told_otherwise(int type, const uint8_t *b) {
    if (type == KT_MXFP4) return b[0] == 253 || b[0] == 254;
    if (type != KT_NVFP4) return false;
    for (int i = 0; i < 4; i++)
        if ((b[i] & 0x7F) == 0x7F) return true;
    return false;
}

static void what_is_called_bad_is_what_decodes_to_no_number(void **state) {
    UNUSED(state);
    uint8_t block[256];
    uint64_t seed = 1, types = 0;
    for (int type = 0; type < KT_MAX; type++) {
        if (!ktype_supported(type)) continue;
        uint64_t bad = 0;
        types++;
        for (int k = 0; k < BLOCKS; k++) {
            for (size_t i = 0; i < sizeof block; i++)
                block[i] =
                    (uint8_t)((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 56);
            uint64_t first = 77, found = gguf_check_blocks((uint32_t)type, block, 1, &first);
            bool numbers = decodes_to_numbers(type, block);
            if (found) assert_int_equal(first, 0);
            bad += found;
            if (is_told_otherwise(type, block) || (found == 0) == numbers) continue;
            fail_msg("%s block %d: expected %s, found %llu bad", ktype_name(type), k,
                     numbers ? "numbers" : "a bad scale", (unsigned long long)found);
        }
        if (bad == 0)
            fail_msg("%s: expected bad blocks among %d random ones, found none", ktype_name(type),
                     BLOCKS);
    }
    assert_int_equal(types, 24);
}

static void every_storable_type_can_be_checked(void **state) {
    UNUSED(state);
    uint8_t block[256];
    for (uint32_t type = 0; type < 300; type++) {
        uint64_t first = 0;
        if (!gguf_type_info(type)) continue;
        memset(block, 0, sizeof block);
        assert_int_equal(gguf_check_blocks(type, block, 1, &first), 0);
        memset(block, 255, sizeof block);
        bool integer = type >= 24 && type <= 27;
        assert_int_equal(gguf_check_blocks(type, block, 1, &first), !integer);
    }
}

static void the_first_bad_block_is_told_and_all_are_counted(void **state) {
    UNUSED(state);
    uint8_t blocks[10 * 18] = {0};
    uint64_t first = 0;
    blocks[4 * 18 + 1] = 0x7C, blocks[9 * 18 + 1] = 0xFE;
    assert_int_equal(gguf_check_blocks(KT_Q4_0, blocks, 10, &first), 2);
    assert_int_equal(first, 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_called_bad_is_what_decodes_to_no_number),
        cmocka_unit_test(every_storable_type_can_be_checked),
        cmocka_unit_test(the_first_bad_block_is_told_and_all_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
