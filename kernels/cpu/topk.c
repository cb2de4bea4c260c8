/* kernels/cpu/topk.c: the k-th largest of many numbers.
 *
 * Owns: nothing; pure.  Called by: attn.c (selection).  Fails how: cannot.  Limits: none.
 * Tested by: tests/kernels/test_attention.c
 *
 * Keys are fixed byte by byte from the top: count, find the byte in which
 * the k-th falls, go on among those that share it. Four passes whatever the data, no pivot to
 * choose and no bad case; the caller then takes everything above the key and the first `ties` equal
 * to it, in whatever order it likes to see them.
 */
#include <assert.h>

#include "kernels/cpu/cpu.h"

uint32_t cpu_kth_key(const uint32_t *keys, int64_t n, int64_t k, int64_t *ties) {
    uint32_t prefix = 0, mask = 0;
    assert(k >= 1 && k <= n);
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {0};
        for (int64_t u = 0; u < n; u++)
            if ((keys[u] & mask) == prefix) count[keys[u] >> shift & 255]++;
        uint32_t at = 255;
        while (count[at] < k) k -= count[at--];
        prefix |= at << shift;
        mask |= 255u << shift;
    }
    *ties = k;
    return prefix;
}
