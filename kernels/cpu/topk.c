/* kernels/cpu/topk.c: the k-th largest of many numbers.
 *
 * Owns: nothing; pure.  Called by: attn.c (selection).  Fails how: cannot.  Limits: none.
 * Tested by: tests/kernels/test_attention.c
 *
 * Keys are fixed digit by digit from the top (11, 11 and 10 bits): count, find the digit in which
 * the k-th falls, go on among those that share it. Three passes whatever the data, no pivot to
 * choose and no bad case; the caller then takes everything above the key and the first `ties` equal
 * to it, in whatever order it likes to see them.
 */
#include <assert.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

uint32_t cpu_kth_key(const uint32_t *keys, int64_t n, int64_t k, int64_t *ties) {
    static const struct { int shift, bits; } digit[3] = {{21, 11}, {10, 11}, {0, 10}};
    uint32_t prefix = 0, mask = 0;
    assert(k >= 1 && k <= n);
    for (int i = 0; i < 3; i++) {
        int64_t count[2048] = {0};
        uint32_t low = (1u << digit[i].bits) - 1;
        for (int64_t u = 0; u < n; u++)
            if ((keys[u] & mask) == prefix) count[keys[u] >> digit[i].shift & low]++;
        uint32_t at = low;
        while (count[at] < k) k -= count[at--];
        prefix |= at << digit[i].shift;
        mask |= low << digit[i].shift;
    }
    *ties = k;
    return prefix;
}
