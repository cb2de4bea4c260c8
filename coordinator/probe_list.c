/* coordinator/probe_list.c: the sockets of workers by their names, as the kernel lists them. See
 * probe_list.h.
 *
 * Owns: nothing.  Called by: cmd_probe.c, doctor_bundle.c.  Fails how: see probe_list.h.
 * Limits: see probe_list.h.  Tested by: tests/faults/test_probe.py
 */
#include "coordinator/probe_list.h"

#include <inttypes.h>
#include <string.h>

#include "proto/limits.h"

#define SOCKET_PREFIX "@octavo-probe-"

int probe_list(struct probe_socket *out, int most) {
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/net/unix", "re");
    while (f && n < most && fgets(line, sizeof line, f)) {
        const char *at = strstr(line, SOCKET_PREFIX);
        struct probe_socket s;
        if (!at || sscanf(at + strlen(SOCKET_PREFIX), "%" SCNd64 "-%d", &s.pid, &s.rank) != 2 ||
            s.rank < 0 || s.rank >= LIMIT_RANKS)
            continue;
        bool again = false; /* a connection to it has its name too */
        for (int i = 0; i < n; i++) again |= out[i].pid == s.pid && out[i].rank == s.rank;
        if (!again) out[n++] = s;
    }
    if (f) fclose(f);
    return n;
}

void probe_name(char out[PROBE_NAME_BYTES], int64_t pid, int rank) {
    snprintf(out, PROBE_NAME_BYTES, SOCKET_PREFIX "%" PRId64 "-%d", pid, rank);
}
