/* coordinator/pin.c: which cores each worker may run on. See pin.h.
 *
 * Owns: nothing; pure.  Called by: launch.c, gpus.c.  Fails how: it does not.
 * Tested by: tests/unit/test_fleet.c
 *
 * With a core or more per worker each gets a run of neighbours of its own, so that no two step
 * threads ever take turns. With fewer, everybody gets all of them: ranks that wait for each other
 * many times per token are better placed by the scheduler of the system than by a fixed deal, which
 * one busy stranger on one core would slow down as a whole.
 */
#include "coordinator/pin.h"

void pin_plan(cpu_set_t *out, const cpu_set_t *allowed, int rank, int world) {
    int n = CPU_COUNT(allowed), seen = 0;
    assert(world > 0 && rank >= 0 && rank < world);
    if (n < world) {
        *out = *allowed;
        return;
    }
    int first = rank * n / world, end = (rank + 1) * n / world;
    CPU_ZERO(out);
    for (int c = 0; c < CPU_SETSIZE; c++) {
        if (!CPU_ISSET(c, allowed)) continue;
        if (seen >= first && seen < end) CPU_SET(c, out);
        seen++;
    }
}

void pin_text(char out[PIN_TEXT_BYTES], const cpu_set_t *set) {
    size_t n = 0;
    out[0] = 0;
    for (int c = 0; c < CPU_SETSIZE; c++) {
        if (!CPU_ISSET(c, set)) continue;
        int last = c;
        while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, set)) last++;
        int w = last > c ? snprintf(out + n, PIN_TEXT_BYTES - n, "%s%d-%d", n ? "," : "", c, last)
                         : snprintf(out + n, PIN_TEXT_BYTES - n, "%s%d", n ? "," : "", c);
        n += (size_t)w;
        if (n >= PIN_TEXT_BYTES) return;
        c = last;
    }
}
