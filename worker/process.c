/* worker/process.c: see process.h.
 *
 * Owns: nothing.  Called by: main.c and self_test.c before any thread exists.
 * Fails how: see process.h.  Limits: CPU_SETSIZE cores.
 * Tested by: tests/unit/test_worker.c
 *
 * The death signal alone is not enough: the parent may have died before it was asked for, and a pid
 * may have been given to another process since. Hence the start time.
 */
#include <errno.h>
#include <inttypes.h>
#include <numa.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "worker/process.h"

void process_die_with_parent(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

uint64_t process_start_time(int64_t pid) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    line[n] = 0;
    char *at = strrchr(line, ')'); /* the name before it may hold anything */
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

bool process_has_parent(int64_t pid, uint64_t start_time) {
    return getppid() == pid && process_start_time(pid) == start_time;
}

/* "0,2-3" to a set. */
static bool parse_cpus(const char *text, cpu_set_t *set) {
    CPU_ZERO(set);
    for (const char *at = text; *at;) {
        char *end;
        unsigned long first = strtoul(at, &end, 10), last = first;
        if (end == at) return false;
        if (*end == '-') {
            at = end + 1;
            last = strtoul(at, &end, 10);
            if (end == at) return false;
        }
        if (first > last || last >= CPU_SETSIZE || (*end && *end != ',')) return false;
        for (unsigned long cpu = first; cpu <= last; cpu++) CPU_SET(cpu, set);
        at = *end ? end + 1 : end;
    }
    return CPU_COUNT(set) > 0;
}

int process_pin(const char *cpus, struct err_text *err) {
    cpu_set_t set;
    if (!parse_cpus(cpus, &set))
        return err_set(err, ERR_SETUP, "--cpus: expected a list like 0,2-3, found %s", cpus);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        return err_set(err, ERR_SETUP, "--cpus %s: expected cores this process may use, found: %s",
                       cpus, strerror(errno));
    if (numa_available() < 0 || numa_max_node() == 0) return OK;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &set)) {
            int node = numa_node_of_cpu(cpu);
            if (node >= 0) numa_set_preferred(node);
            break;
        }
    return OK;
}
